"""States fetched from another process of the same host, out of the file that it keeps them in."""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from deepinfer_jax.cache.sections import stated_bytes
from deepinfer_jax.cache.snapshot import Snapshot
from serving.grpc_transport import GrpcTransport
from serving.kv_sections import PlannedSection, StatePlan
from serving.kv_transport import TransferProgress, TransportError
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvEndpoint, KvHandle
from serving.shared_files import DIRECTORY, path_of

# Seconds between looks at a file that grows; the longer one while nothing comes.
_SHORT_PAUSE, _LONG_PAUSE = 0.0005, 0.01
# Bytes that are read at a time, in a thread.
_READ_BYTES = 16 << 20


class ShmTransport:
    """Reads states where they are kept; a ``Pull`` of ``meta`` tells when they are complete, or lost. For one loop."""

    name = "shm"

    def __init__(self, control: GrpcTransport, reader: Executor, directory: Path = DIRECTORY) -> None:
        """Make a transport.

        Args:
          control: reaches the holders of the states.
          reader: runs the reading.
          directory: where files of this host are.
        """
        self._control, self._reader, self._directory = control, reader, directory
        # Watches of states that are here: the word when they were computed is on its way.
        self._ending: set[asyncio.Task[None]] = set()

    def reaches(self, endpoint: KvEndpoint) -> bool:
        path = path_of(endpoint, self._directory)
        return path is not None and path.exists()

    async def fetch(
        self, handle: KvHandle, endpoint: KvEndpoint, plan: StatePlan, *, deadline: float, progress: TransferProgress
    ) -> Snapshot:
        path = path_of(endpoint, self._directory)
        call = next((other for other in handle.endpoints if self._control.reaches(other)), None)
        if path is None or call is None:
            raise TransportError("KV_EXPIRED", "the state has no file on this host, or no endpoint of its holder")
        told = TransferProgress()
        # The file is closed even where a cancel cuts off the last wait.
        with contextlib.closing(_GrowingFile(path, plan)) as file:
            watching = asyncio.create_task(self._control.watch(handle, call, plan, deadline=deadline, progress=told))
            try:
                await self._read(file, watching, progress)
            except BaseException:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                raise
        self._let_end(watching, told, progress)
        return file.sections

    async def close(self) -> None:
        """End what is left of watches; the control transport is closed by whoever made it."""
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _let_end(self, watching: asyncio.Task[None], told: TransferProgress, progress: TransferProgress) -> None:
        """Tell a progress when its state was computed, as soon as that is known; nobody waits for it."""

        def ended(task: asyncio.Task[None]) -> None:
            self._ending.discard(task)
            if not task.cancelled() and task.exception() is None:
                # The clock is that of this host.
                progress.computed_at = told.sender_computed_at

        self._ending.add(watching)
        watching.add_done_callback(ended)

    async def _read(self, file: _GrowingFile, watching: asyncio.Task[None], progress: TransferProgress) -> None:
        loop, pause = asyncio.get_running_loop(), _SHORT_PAUSE
        while not file.complete:
            # Asked before the file is: what is missing then never comes.
            finished = watching.done()
            size = await loop.run_in_executor(self._reader, file.read) if file.changed else 0
            progress.add(size, file.taken)
            if finished and not size and not file.complete:
                watching.result()
                raise TransportError("KV_DAMAGED", f"the file of the state ends before {file.due.name}")
            pause = _SHORT_PAUSE if size else min(1.25 * pause, _LONG_PAUSE)
            if not size:
                await asyncio.wait((watching,), timeout=pause)


class _GrowingFile:
    """Sections out of a file, as they come."""

    def __init__(self, path: Path, plan: StatePlan) -> None:
        self._planned, self._place, self._at = plan.sections, 0, 0
        self._read = 0
        self.sections: dict[str, bytes | memoryview] = {}
        # Those of the last read.
        self.taken: dict[str, bytes | memoryview] = {}
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise TransportError("KV_EXPIRED", f"the file of the state cannot be opened: {error.strerror}") from error
        # Memory that is not cleared first, and that is warm where the allocator keeps what was given back.
        self._buffer = memoryview(np.empty(plan.most_bytes, np.uint8))

    @property
    def complete(self) -> bool:
        return self._place == len(self._planned)

    @property
    def due(self) -> PlannedSection:
        """The section that comes next."""
        return self._planned[self._place]

    @property
    def changed(self) -> bool:
        """Whether the file has another size than what was read of it."""
        return os.fstat(self._file).st_size != self._read

    def close(self) -> None:
        os.close(self._file)

    def read(self) -> int:
        """Take the whole sections that are there now, some of them if they are many. Returns their bytes.

        Raises:
          TransportError: the file has shrunk, or holds what cannot be there.
        """
        size = os.fstat(self._file).st_size
        if size < self._read or size > len(self._buffer):
            found = f"the file of the state has {size} bytes"
            raise TransportError("KV_DAMAGED" if size else "KV_EXPIRED", f"{found}, {self._read} of which were read")
        part = self._buffer[self._read : min(size, self._read + _READ_BYTES)]
        self._read += os.preadv(self._file, [part], self._read)
        begin, at, content = self._at, self._at, self._buffer[: self._read]
        self.taken = {}
        while self._place < len(self._planned):
            section = self._planned[self._place]
            # Whether what is there is that section is for its seal to say.
            behind = at + (section.most if section.least == section.most else _stated(section, content[at:]))
            if behind > self._read:
                break
            self.taken[section.name] = content[at:behind]
            at, self._place = behind, self._place + 1
        self._at = at
        self.sections |= self.taken
        return at - begin


def _stated(section: PlannedSection, content: memoryview) -> int:
    """Bytes of a section that content begins with; more than there is where that cannot be said yet."""
    stated = stated_bytes(content)
    if stated is None:
        return section.most
    if not section.least <= stated <= section.most:
        raise TransportError("KV_DAMAGED", f"{section.name} cannot have {stated} bytes")
    return stated
