"""Ending an answer at a stop string, wherever its characters fall on tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    Text is held back only while it could still be the beginning of a stop string. What is returned never contains a
    stop string or a part of the one that ended the answer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops``: non-empty strings; of two that end at the same character the longer one counts."""
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Text that can be shown now; nothing once :attr:`found` is set."""
        if self.found is not None:
            return ""
        text = self._held + text
        places = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if places:
            end, self.found = min(places, key=lambda place: place[0])
            self._held = ""
            return text[: end - len(self.found)]
        keep = self._open_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _open_length(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
