"""The door of a gateway: how much may be inside at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from serving.errors import refusal


class Entrance:
    """Counts requests that are open, and prompt tokens that wait for their first token.

    Attributes:
        requests: open ones.
        prompt_tokens: of those among them that have no token yet.
    """

    def __init__(self, max_requests: int, max_prompt_tokens: int) -> None:
        self._max_requests, self._max_prompt_tokens = max_requests, max_prompt_tokens
        self.requests = 0
        self.prompt_tokens = 0

    @contextlib.contextmanager
    def enter(self, prompt_tokens: int) -> Iterator[Callable[[], None]]:
        """Let a request in for as long as the context lasts. The value is to be called with its first token.

        Raises:
          OverloadedError: too much is inside. A prompt of any length enters where no other one waits.
        """
        if self.requests >= self._max_requests:
            raise refusal("QUEUE_FULL", f"{self.requests} requests are open, which is all there may be")
        if self.prompt_tokens and self.prompt_tokens + prompt_tokens > self._max_prompt_tokens:
            raise refusal(
                "QUEUE_FULL",
                f"{self.prompt_tokens} prompt tokens wait; with this request's there would be more than "
                f"{self._max_prompt_tokens}",
            )
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        waiting = prompt_tokens

        def first_token() -> None:
            nonlocal waiting
            self.prompt_tokens -= waiting
            waiting = 0

        try:
            yield first_token
        finally:
            first_token()
            self.requests -= 1
