"""The pulls of one state: streams resumed where they break, read again where chunks are damaged."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import grpc

from deepinfer_jax.cache.records import StateFormat
from deepinfer_jax.cache.snapshot import Snapshot
from deepinfer_jax.errors import ConfigError
from serving.errors import ServingError, StateError
from serving.kv_assembly import PullReader, join
from serving.kv_chunks import DEFAULT_CHUNK_BYTES, ChunkError
from serving.kv_sections import StatePlan
from serving.kv_transport import TransferProgress, TransportError
from serving.proto.deepinfer.v1.kv_transfer_pb2 import (
    KV_PART_META,
    KV_PART_PAGES,
    KV_PART_PENDING,
    KV_PART_SLOTS,
    KvDescribeRequest,
    KvHandle,
    KvPullRequest,
    KvRange,
)
from serving.proto.deepinfer.v1.kv_transfer_pb2_grpc import KvTransferStub
from serving.status import error_from

_PULL = "/deepinfer.v1.KvTransfer/Pull"
_REST = (KV_PART_SLOTS, KV_PART_PENDING, KV_PART_META)


@dataclasses.dataclass(frozen=True)
class PullSettings:
    """How states are pulled.

    Attributes:
        lanes: connections to one sender, over each of which one range of pages is pulled at a time.
        range_bytes: about the bytes of such a range.
        chunk_bytes: most bytes of data in a message.
        attempts: streams in a row that may break before a byte has come.
        first_delay: seconds before a broken stream is resumed; each further delay is twice as long.
        patience: seconds without a message after which a stream is taken for dead, unless the sender has no more yet.
    """

    lanes: int = 2
    range_bytes: int = 32 << 20
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    attempts: int = 5
    first_delay: float = 0.1
    patience: float = 5.0

    def __post_init__(self) -> None:
        for name in ("lanes", "range_bytes", "chunk_bytes", "attempts", "first_delay", "patience"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"transfer.{name}", getattr(self, name), "above 0")


class _StalledError(Exception):
    """Nothing came for too long."""


class StatePulls:
    """The pulls of one state."""

    def __init__(
        self,
        form: StateFormat,
        settings: PullSettings,
        handle: KvHandle,
        plan: StatePlan,
        deadline: float,
        progress: TransferProgress,
    ) -> None:
        """Arguments are those of :meth:`serving.kv_transport.KvTransport.fetch`, and how states are cut and pulled."""
        self._form, self._settings = form, settings
        self._handle, self._plan, self._deadline, self._progress = handle, plan, deadline, progress
        self._readers: list[PullReader] = []

    def snapshot(self) -> Snapshot:
        """All sections; the pulls have ended, and were for all of them."""
        return join(self._plan, self._readers)

    async def rest(self, channel: grpc.aio.Channel) -> None:
        """Pull everything but pages."""
        await self._pull(channel, KvPullRequest(parts=_REST))

    async def meta(self, channel: grpc.aio.Channel) -> None:
        """Pull ``meta`` alone."""
        await self._pull(channel, KvPullRequest(parts=[KV_PART_META]))

    async def pages(self, channel: grpc.aio.Channel, ranges: Iterator[KvRange]) -> None:
        """Pull ranges, which several lanes take from one list."""
        for pages in ranges:
            await self._pull(channel, KvPullRequest(parts=[KV_PART_PAGES], pages=pages))

    async def _pull(self, channel: grpc.aio.Channel, request: KvPullRequest) -> None:
        """One pull to its end, over as many streams as it takes."""
        settings = self._settings
        request.kv_id, request.fingerprint = self._handle.kv_id, self._handle.fingerprint
        request.chunk_bytes, request.sums = settings.chunk_bytes, True
        reader = PullReader(self._plan.select(request, self._form), settings.chunk_bytes)
        self._readers.append(reader)
        failures = 0
        while not reader.done:
            before = reader.received
            if reader.position is not None:
                request.resume.CopyFrom(reader.position)
            try:
                await self._stream(channel, request, reader)
            except (ChunkError, grpc.RpcError, _StalledError) as error:
                if isinstance(error, _StalledError) and await self._waits_rightly(channel, reader):
                    continue
                failures = 1 if reader.received > before else failures + 1
                failure = _failure(error)
                if failures >= settings.attempts or not isinstance(failure, TransportError):
                    raise failure from error
                await asyncio.sleep(settings.first_delay * 2 ** (failures - 1))

    async def _stream(self, channel: grpc.aio.Channel, request: KvPullRequest, reader: PullReader) -> None:
        """One stream of a pull, to its end."""
        seconds = self._deadline - asyncio.get_running_loop().time()
        stream = _Stream(channel, request, seconds, self._settings.patience)
        try:
            while (message := await stream.read()) is not None:
                before = reader.received
                sections = reader.add(message)
                self._progress.add(reader.received - before, sections)
                if reader.computed is not None:
                    self._progress.computed(*reader.computed)
        finally:
            stream.cancel()
        reader.end()

    async def _waits_rightly(self, channel: grpc.aio.Channel, reader: PullReader) -> bool:
        """Whether the sender has nothing yet of what a pull waits for."""
        request = KvDescribeRequest(kv_id=self._handle.kv_id)
        try:
            layout = await KvTransferStub(channel).Describe(request, timeout=self._settings.patience)
        except grpc.RpcError as error:
            failure = _failure(error)
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED or isinstance(failure, TransportError):
                return False
            raise failure from error
        due = reader.due
        if layout.progress.done or due is None:
            return False
        return due.part != KV_PART_PAGES or due.place >= layout.progress.complete_pages


class _Stream:
    """One stream of serialised chunks."""

    def __init__(self, channel: grpc.aio.Channel, request: KvPullRequest, seconds: float, patience: float) -> None:
        """``seconds``: until the deadline; ``patience``: seconds that a message may take."""
        pull = channel.unary_stream(_PULL, KvPullRequest.SerializeToString, None)
        self._call, self._patience = pull(request, timeout=seconds), patience
        self._stalled = False

    async def read(self) -> bytes | None:
        """The next message; None behind the last one, where the status is OK."""
        # Cancelling the call, and not the task that reads, leaves nothing of it behind.
        timer = asyncio.get_running_loop().call_later(self._patience, self._give_up)
        try:
            message = await self._call.read()
        except asyncio.CancelledError:
            if self._stalled:
                raise _StalledError from None
            raise
        finally:
            timer.cancel()
        return None if message is grpc.aio.EOF else message

    def cancel(self) -> None:
        """End it; without effect where it has ended."""
        self._call.cancel()

    def _give_up(self) -> None:
        self._stalled = True
        self._call.cancel()


def _failure(error: Exception) -> ServingError:
    """A ``TransportError`` for what another stream might cure, anything else as it is."""
    if isinstance(error, ChunkError):
        return TransportError("KV_DAMAGED", f"state arrives damaged: {error}")
    if isinstance(error, _StalledError):
        return TransportError("KV_EXPIRED", "the holder of the state sends nothing any more")
    assert isinstance(error, grpc.RpcError)
    served = error_from(error)
    if isinstance(served, StateError) and served.reason:
        return served
    # Whatever else it says, be it of the request or its time: what was asked may have been damaged on its way. The
    # deadline itself is kept by who waits for the state.
    return TransportError("KV_EXPIRED", f"the holder of the state cannot be reached: {served.message}")
