"""Pages of a state on its way, opened in threads while later ones come: at its end little is left to be done."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from deepinfer_jax.arrival import Arrival, Opening
from deepinfer_jax.cache.snapshot import Snapshot


class EarlyOpening:
    """Runs an :class:`Opening`. For one event loop; close it."""

    def __init__(self, opening: Opening, opener: Executor) -> None:
        """``opener``: runs the checks, one batch of sections at a time."""
        self._opening, self._opener = opening, opener
        self._waiting: dict[str, bytes | memoryview] = {}
        self._running: asyncio.Task[None] | None = None

    def take(self, sections: Snapshot) -> None:
        """Have sections opened soon."""
        self._waiting |= sections
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._open())

    async def finish(self, snapshot: Snapshot) -> Arrival:
        """Open the rest of a snapshot that is here.

        Raises:
          SnapshotError: see :meth:`deepinfer_jax.arrival.Receiver.open`.
        """
        # What waits is part of the rest.
        self._waiting = {}
        if self._running is not None:
            await self._running
        return await asyncio.get_running_loop().run_in_executor(self._opener, self._opening.finish, snapshot)

    def close(self) -> None:
        """Open nothing more."""
        self._waiting = {}
        if self._running is not None:
            self._running.cancel()

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            sections, self._waiting = self._waiting, {}
            await loop.run_in_executor(self._opener, self._opening.take, sections)
