"""What a worker needs to take states from others, put together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from deepinfer_jax.arrival import Receiver
from deepinfer_jax.replay import Replay
from serving.arrivals import DEFAULT_MOST_BYTES, Arrivals
from serving.grpc_transport import GrpcTransport
from serving.jax_transport import JaxTransport
from serving.kv_transport import KvFetcher, KvTransport
from serving.shared_files import keep_removed
from serving.shm_transport import ShmTransport
from serving.state_pulls import PullSettings
from serving.transfer_engine import TransferEngine

Changes = Callable[[Sequence[KvTransport]], Sequence[KvTransport]]


@dataclasses.dataclass(frozen=True)
class ReceivingSettings:
    """How a worker takes states.

    Attributes:
        pulls: how they are pulled by gRPC.
        most_bytes: of states that are fetched or wait for the engine.
        opening_threads: that read shared files, and check states and give them the engine's form.
        shared: directory of files in memory that processes of this host share; None reads none.
    """

    pulls: PullSettings = dataclasses.field(default_factory=PullSettings)
    most_bytes: int = DEFAULT_MOST_BYTES
    opening_threads: int = 2
    shared: Path | None = None


@contextlib.asynccontextmanager
async def receiving(
    receiver: Receiver,
    replay: Replay,
    settings: ReceivingSettings | None = None,
    credentials: grpc.ChannelCredentials | None = None,
    changes: Changes = lambda transports: transports,
    transferring: TransferEngine | None = None,
) -> AsyncIterator[Arrivals]:
    """States for one engine. Leave the context when no call needs any more.

    Args:
      receiver, replay: the engine's.
      settings: how states are taken.
      credentials: for their holders; None is plain text.
      changes: replaces transports.
      transferring: pulls from those of other processes, closed by whoever made it; None pulls nothing.
    """
    settings = settings or ReceivingSettings()
    opener = ThreadPoolExecutor(settings.opening_threads, "opening")
    pulling = GrpcTransport(receiver.form, settings.pulls, credentials)
    transports: list[KvTransport] = [pulling]
    tasks = []
    if transferring is not None:
        transports.insert(0, JaxTransport(pulling, transferring, opener))
    if settings.shared is not None:
        transports.insert(0, ShmTransport(pulling, opener, settings.shared))
        tasks.append(asyncio.create_task(keep_removed(settings.shared)))
    fetcher = KvFetcher(changes(transports))
    arrivals = Arrivals(receiver, replay, fetcher, pulling.release, opener, settings.most_bytes)
    try:
        yield arrivals
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await arrivals.close()
        opener.shutdown(wait=False, cancel_futures=True)
