"""Ending an answer at a stop string where only token ids come by."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from deepinfer_jax.errors import InputError
from deepinfer_jax.text.stop_strings import StopMatcher
from deepinfer_jax.text.tokenizer import TextStream, Tokenizer


class StopStrings:
    """Watches the tokens of one answer."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._text, self._matcher = TextStream(tokenizer), StopMatcher(stops)

    @property
    def found(self) -> str | None:
        """The stop string that ended the answer."""
        return self._matcher.found

    def push(self, tokens: Sequence[int]) -> int:
        """Take the next tokens. Returns how many of them belong to the answer: all, up to the one that completes it."""
        for number, token in enumerate(tokens):
            # A model's vocabulary may have ids that its tokenizer has no text for.
            with contextlib.suppress(InputError):
                self._matcher.push(self._text.push([token]))
            if self._matcher.found is not None:
                return number + 1
        return len(tokens)
