"""How fast states travel between two processes of this host, against bare streams of bytes in the same run."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import grpc

from deepinfer_jax.cache.records import StateFormat
from serving.bench.holder import BARE, hold, plan_of
from serving.bench.seals import seal_seconds
from serving.channels import RetryPolicy, client_options
from serving.grpc_transport import GrpcTransport
from serving.kv_chunks import DEFAULT_CHUNK_BYTES
from serving.kv_transport import KvTransport, TransferProgress
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvHandle
from serving.shared_files import DIRECTORY
from serving.shm_transport import ShmTransport
from serving.state_pulls import PullSettings

# Seconds.
_LONGEST = 600.0


@dataclasses.dataclass(frozen=True)
class TransferFigures:
    """Bytes per second, each the best of ``rounds`` turns that took their turns with the others.

    All carry the bytes of the same state, which the receiver keeps.

    Attributes:
        bytes: of the state, sealed sections.
        chunk_bytes, lanes, rounds: how it was measured.
        bare_grpc: a gRPC stream of messages of ``chunk_bytes`` bytes.
        bare_grpc_lanes: as many of them at once, over connections of their own, as states are pulled by.
        grpc: a state by Pulls: packed, with checksums, read and checked again.
        bare_tcp: one socket, into one buffer.
        shm: a state by a shared file: written by one process and read by another meanwhile, until both are done.
        sealing, opening: making sealed sections, and checking the seals, in one thread.
    """

    bytes: int
    chunk_bytes: int
    lanes: int
    rounds: int
    bare_grpc: float
    bare_grpc_lanes: float
    grpc: float
    bare_tcp: float
    shm: float
    sealing: float
    opening: float

    @property
    def grpc_share(self) -> float:
        """Of a bare stream."""
        return self.grpc / self.bare_grpc

    @property
    def shm_share(self) -> float:
        """Of bare TCP."""
        return self.shm / self.bare_tcp


def measure_transfer(
    form: StateFormat,
    *,
    tokens: int,
    rounds: int = 5,
    lanes: int = PullSettings.lanes,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    shared: Path = DIRECTORY,
    progress: Callable[[], None] = lambda: None,
) -> TransferFigures:
    """Measure. A second process is started for it, which holds a state of random content.

    Args:
      form: how states are cut into records.
      tokens: of the state.
      rounds: turns of each kind.
      lanes: connections by which a state is pulled.
      chunk_bytes: of all streams.
      shared: directory of shared files.
      progress: called behind each round.
    """
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=hold, args=(other, form, tokens, chunk_bytes, shared), daemon=True)
    process.start()
    other.close()
    try:
        return asyncio.run(_measure(pipe, form, tokens, rounds, lanes, chunk_bytes, shared, progress))
    finally:
        pipe.close()
        process.join(_LONGEST)


async def _measure(
    pipe: Connection,
    form: StateFormat,
    tokens: int,
    rounds: int,
    lanes: int,
    chunk_bytes: int,
    shared: Path,
    progress: Callable[[], None],
) -> TransferFigures:
    target, port, content, size = await asyncio.to_thread(pipe.recv)
    handle = KvHandle.FromString(content)
    pulling = GrpcTransport(form, PullSettings(lanes=lanes, chunk_bytes=chunk_bytes))
    seconds: dict[str, list[float]] = {}

    async def timed(name: str, measured: Callable[[], Awaitable[float]]) -> None:
        seconds.setdefault(name, []).append(await measured())

    with ThreadPoolExecutor(2) as threads:
        reading = ShmTransport(pulling, threads, shared)
        try:
            for _ in range(rounds):
                await timed("bare_grpc", lambda: _pull_bytes(target, 1, size))
                await timed("grpc", lambda: _fetch(pulling, handle, form, tokens, size))
                await timed("bare_grpc_lanes", lambda: _pull_bytes(target, lanes, size * lanes))
                await timed("bare_tcp", lambda: asyncio.to_thread(_receive, port, size))
                await timed("shm", lambda: _share(pipe, reading, form, tokens, size))
                progress()
            sealing, opening = await asyncio.to_thread(seal_seconds, size)
        finally:
            await pulling.close()
    best = {name: min(times) for name, times in seconds.items()}
    return TransferFigures(
        bytes=size,
        chunk_bytes=chunk_bytes,
        lanes=lanes,
        rounds=rounds,
        bare_grpc=size / best["bare_grpc"],
        bare_grpc_lanes=size * lanes / best["bare_grpc_lanes"],
        grpc=size / best["grpc"],
        bare_tcp=size / best["bare_tcp"],
        shm=size / best["shm"],
        sealing=size / sealing,
        opening=size / opening,
    )


async def _fetch(transport: KvTransport, handle: KvHandle, form: StateFormat, tokens: int, size: int) -> float:
    """Seconds of a fetch; its content must be whole."""
    endpoint = next(endpoint for endpoint in handle.endpoints if transport.reaches(endpoint))
    plan, deadline = plan_of(form, tokens), asyncio.get_running_loop().time() + _LONGEST
    begin = time.perf_counter()
    snapshot = await transport.fetch(handle, endpoint, plan, deadline=deadline, progress=TransferProgress())
    seconds = time.perf_counter() - begin
    assert sum(map(len, snapshot.values())) == size
    return seconds


async def _share(pipe: Connection, transport: KvTransport, form: StateFormat, tokens: int, size: int) -> float:
    """Seconds in which the other process writes a file and this one reads it."""
    pipe.send("make one")
    handle = KvHandle.FromString(await asyncio.to_thread(pipe.recv))
    try:
        pipe.send("fill it")
        return await _fetch(transport, handle, form, tokens, size)
    finally:
        pipe.send("drop it")


async def _pull_bytes(target: str, lanes: int, size: int) -> float:
    """Seconds of bare streams that carry ``size`` bytes together."""
    options = (*client_options(RetryPolicy(attempts=1)), ("grpc.use_local_subchannel_pool", 1))
    channels = [grpc.aio.insecure_channel(target, options) for _ in range(lanes)]

    async def pull(channel: grpc.aio.Channel) -> list[bytes]:
        call, messages = channel.unary_stream(BARE)(b"", timeout=_LONGEST), []
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
        return messages

    try:
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        begin = time.perf_counter()
        streams = await asyncio.gather(*map(pull, channels))
        seconds = time.perf_counter() - begin
    finally:
        for channel in channels:
            await channel.close()
    assert sum(len(message) for stream in streams for message in stream) == size
    return seconds


def _receive(port: int, size: int) -> float:
    """Seconds of a bare socket."""
    buffer = bytearray(size)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        begin, at = time.perf_counter(), 0
        with memoryview(buffer) as view:
            while at < size:
                count = connection.recv_into(view[at:])
                assert count
                at += count
        return time.perf_counter() - begin
