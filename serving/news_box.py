"""News of one request between the engine, which waits for nobody, and the stream that carries them to a reader."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from deepinfer_jax.request import Output
from serving.errors import refusal

DEFAULT_UNREAD_TOKENS = 4096
"""Tokens that may wait for a reader, beside what gRPC itself takes ahead of one."""


class NewsBox:
    """Holds news until they are taken, all that are there at a time, and no more than a bound.

    The engine goes on while a stream waits for its reader. What comes meanwhile is sent together; a reader that falls
    behind by more than the bound loses its request.
    """

    def __init__(self, unread_tokens: int = DEFAULT_UNREAD_TOKENS) -> None:
        self._limit, self._waiting = unread_tokens, 0
        self._news: list[Output] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    async def fill(self, news: AsyncGenerator[Output, None]) -> None:
        """Put news in until they end; what they raise is raised to the taker, behind those before."""
        try:
            async with contextlib.aclosing(news):
                async for output in news:
                    self._waiting += len(output.tokens)
                    if self._waiting > self._limit:
                        raise refusal("READER_TOO_SLOW", f"more than {self._limit} tokens waited for their reader")
                    self._news.append(output)
                    self._changed.set()
        except Exception as error:
            self._error = error
            self._changed.set()

    async def take(self) -> list[Output]:
        """All news there are, once there are any."""
        while not self._news:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        news, self._news, self._waiting = self._news, [], 0
        return news
