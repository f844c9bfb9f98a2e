"""States fetched from another process of the same host, out of the file that it keeps them in."""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import Executor
from pathlib import Path

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
        # The file is closed even where a cancel cuts off the last wait.
        with contextlib.closing(_GrowingFile(path, plan)) as file:
            watching = asyncio.create_task(
                self._control.watch(handle, call, plan, deadline=deadline, progress=TransferProgress())
            )
            try:
                await self._read(file, watching, progress)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        return file.sections

    async def close(self) -> None:
        """Nothing: the control transport is closed by whoever made it."""

    async def _read(self, file: _GrowingFile, watching: asyncio.Task[None], progress: TransferProgress) -> None:
        loop, pause = asyncio.get_running_loop(), _SHORT_PAUSE
        while not file.complete:
            # Asked before the file is: what is missing then never comes.
            finished = watching.done()
            size = await loop.run_in_executor(self._reader, file.read)
            if file.rest_has_begun:
                progress.state_is_complete()
            progress.add(size)
            if finished and not size and not file.complete:
                watching.result()
                raise TransportError("KV_DAMAGED", f"the file of the state ends before {file.due.name}")
            pause = _SHORT_PAUSE if size else min(2 * pause, _LONG_PAUSE)
            if not size:
                await asyncio.wait((watching,), timeout=pause)


class _GrowingFile:
    """Sections out of a file, as they come."""

    def __init__(self, path: Path, plan: StatePlan) -> None:
        self._planned, self._place, self._at = plan.sections, 0, 0
        self.sections: dict[str, bytes | memoryview] = {}
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise TransportError("KV_EXPIRED", f"the file of the state cannot be opened: {error.strerror}") from error
        self._most = plan.most_bytes

    @property
    def complete(self) -> bool:
        return self._place == len(self._planned)

    @property
    def due(self) -> PlannedSection:
        """The section that comes next."""
        return self._planned[self._place]

    @property
    def rest_has_begun(self) -> bool:
        """Whether something came that is there only when the state is complete."""
        return self._place > 0 and self._planned[self._place - 1].part != self._planned[0].part

    def close(self) -> None:
        os.close(self._file)

    def read(self) -> int:
        """Take the whole sections that are there now, some of them if they are many. Returns their bytes.

        Raises:
          TransportError: the file has shrunk, or holds what cannot be there.
        """
        size = os.fstat(self._file).st_size
        if size < self._at or size > self._most:
            found = f"the file of the state has {size} bytes"
            raise TransportError("KV_DAMAGED" if size else "KV_EXPIRED", f"{found}, {self._at} of which were read")
        most = max(_READ_BYTES, self.due.most)
        content = memoryview(os.pread(self._file, min(size - self._at, most), self._at))
        begin = self._at
        while not self.complete and content:
            stated = stated_bytes(content)
            if stated is not None and not self.due.least <= stated <= self.due.most:
                raise TransportError("KV_DAMAGED", f"{self.due.name} cannot have {stated} bytes")
            if stated is None or stated > len(content):
                break
            self.sections[self.due.name] = content[:stated]
            content = content[stated:]
            self._at += stated
            self._place += 1
        return self._at - begin
