"""A process that holds one state for measurements, and sends bare bytes beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

from deepinfer_jax.cache.records import StateFormat
from deepinfer_jax.cache.sections import HEADER_BYTES, seal
from deepinfer_jax.cache.snapshot import META, SnapshotMeta
from serving.held_state import HeapStorage, HeldState, SectionStorage
from serving.kv_sections import PlannedSection, StatePlan
from serving.kv_transfer import KvTransferService
from serving.leases import Leases
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvEndpoint, KvHandle
from serving.server import Server, Service
from serving.shared_files import SharedStorage

BARE = "/bench.Bytes/Pull"

_SECTIONS_AT_ONCE = 128


def plan_of(form: StateFormat, tokens: int) -> StatePlan:
    """The plan of the state that is held."""
    return StatePlan.of(form, tokens, tokens + 1)


def hold(pipe: Connection, form: StateFormat, tokens: int, chunk_bytes: int, shared: Path) -> None:
    """Run in a process of its own, until the pipe says or loses the word.

    Over the pipe it sends gRPC's target, the port of bare TCP, a handle for Pulls and the bytes of the state. Then it
    waits for words: at the first of three it sends a handle for an empty shared file, at the second it puts the state
    there, at the third it gives the file back. A pipe that is closed ends it.
    """
    asyncio.run(_serve(pipe, form, tokens, chunk_bytes, shared))


def sections_of(form: StateFormat, tokens: int) -> dict[str, bytes]:
    """Sealed sections of random content."""
    return dict(_sections(form, plan_of(form, tokens), tokens))


def _sections(form: StateFormat, plan: StatePlan, tokens: int) -> Iterator[tuple[str, bytes]]:
    meta = SnapshotMeta(form.fingerprint, tuple(range(tokens + 1)), prompt_length=tokens, computed=tokens)
    for section in plan.sections:
        yield section.name, meta.to_bytes() if section.name == META else _random_section(form, section)


def _random_section(form: StateFormat, section: PlannedSection) -> bytes:
    return seal(section.name, form.fingerprint, os.urandom(section.most - HEADER_BYTES))


async def _serve(pipe: Connection, form: StateFormat, tokens: int, chunk_bytes: int, shared: Path) -> None:
    loop = asyncio.get_running_loop()
    leases: Leases[HeldState] = Leases(most_bytes=1 << 40, most_states=4)
    transfer = KvTransferService(form, [0] * len(form.layout.ratios), leases)
    plan = plan_of(form, tokens)
    with ThreadPoolExecutor(1) as sealer:
        sections = await loop.run_in_executor(sealer, sections_of, form, tokens)
        size = sum(map(len, sections.values()))
        content = b"".join(sections.values())
        server = Server([transfer.service(), _bare_service(content, chunk_bytes)])
        target = f"127.0.0.1:{await server.start('127.0.0.1:0')}"

        def held(storage: SectionStorage) -> KvHandle:
            kv_id = leases.open(lambda: HeldState(form, plan, storage, sealer), tokens=tokens, size=plan.most_bytes)
            endpoints = [endpoint for endpoint in (storage.endpoint, KvEndpoint(uri=f"grpc://{target}")) if endpoint]
            return KvHandle(kv_id=kv_id, endpoints=endpoints, fingerprint=form.fingerprint.hex())

        heap = HeapStorage()
        heap.put(sections)
        with _bare_socket(content, chunk_bytes) as port:
            pipe.send((target, port, held(heap).SerializeToString(), size))
            while await loop.run_in_executor(None, _told, pipe):
                storage = SharedStorage(shared)
                handle = held(storage)
                pipe.send(handle.SerializeToString())
                await loop.run_in_executor(None, _told, pipe)
                await loop.run_in_executor(sealer, _fill, storage, sections)
                await loop.run_in_executor(None, _told, pipe)
                leases.release(handle.kv_id)
        leases.drop_all("measured")
        await server.stop(0.0)


def _told(pipe: Connection) -> bool:
    """Whether there is another word."""
    try:
        pipe.recv()
    except EOFError:
        return False
    return True


def _fill(storage: SectionStorage, sections: dict[str, bytes]) -> None:
    items = list(sections.items())
    for at in range(0, len(items), _SECTIONS_AT_ONCE):
        storage.put(dict(items[at : at + _SECTIONS_AT_ONCE]))


def _bare_service(content: bytes, chunk_bytes: int) -> Service:
    """Sends the content to whoever asks, in messages that are nothing else."""

    async def pull(request: bytes, context: Any) -> Any:
        for begin in range(0, len(content), chunk_bytes):
            yield content[begin : begin + chunk_bytes]

    def add(servicer: Any, server: grpc.aio.Server) -> None:
        handlers = {"Pull": grpc.unary_stream_rpc_method_handler(pull)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bytes", handlers),))

    return Service("bench.Bytes", None, add)


@contextlib.contextmanager
def _bare_socket(content: bytes, chunk_bytes: int) -> Iterator[int]:
    """The port at which every connection is sent the content."""
    view = memoryview(content)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                for begin in range(0, len(view), chunk_bytes):
                    connection.sendall(view[begin : begin + chunk_bytes])

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
