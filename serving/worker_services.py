"""The services of a worker by its role, over one engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from deepinfer_jax.async_engine import AsyncEngine
from deepinfer_jax.engine import Engine
from serving.configuration import KvSection
from serving.inference import InferenceService
from serving.prefill_worker import HoldingSettings, PrefillWorker
from serving.proto.deepinfer.v1.inference_pb2 import ModelInfo
from serving.receiving import ReceivingSettings, receiving
from serving.server import Service
from serving.shared_files import DIRECTORY, host_id
from serving.state_pulls import PullSettings
from serving.transfer_engine import TransferEngine, TransferEngineError
from serving.worker_metrics import arrivals_registry, holding_registry

_log = logging.getLogger("serving.kv")
_SETTLING_SECONDS = 0.05


class WorkerServices:
    """What a worker serves.

    Attributes:
        services: for its server.
        registries: its metrics.
        advertise: is told where the server is reached, before the first call.
        settled: waits until nothing is held for others.
    """

    def __init__(
        self,
        services: Sequence[Service],
        registries: Sequence[CollectorRegistry],
        advertise: Callable[[Sequence[str]], None] = lambda uris: None,
        settled: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.services, self.registries = tuple(services), tuple(registries)
        self.advertise, self.settled = advertise, settled


@contextlib.asynccontextmanager
async def worker_services(
    inner: Engine, engine: AsyncEngine, info: ModelInfo, section: KvSection, host: str = "127.0.0.1"
) -> AsyncIterator[WorkerServices]:
    """The services of the role that ``info`` names; leave the context behind the server's end.

    Args:
      inner, engine: the engine, and what turns its loop.
      info: what is served.
      section: how state is handed over.
      host: where other workers reach this machine.
    """
    registries = [inner.metrics.registry]
    if info.role == "prefill":
        holding = HoldingSettings(
            section.lease_seconds, section.held_bytes, section.held_states, shared=_shared(section)
        )
        async with (
            _transferring(section, host) as transferring,
            PrefillWorker(engine, inner.config, inner.settings, info, holding, transferring) as worker,
        ):
            answers = InferenceService(engine, info, held=worker.leases)
            registries.append(holding_registry(worker))
            services = (answers.service(), *worker.services())

            async def settled() -> None:
                while len(worker.leases):
                    await asyncio.sleep(_SETTLING_SECONDS)

            yield WorkerServices(services, registries, worker.advertise, settled)
    elif info.role == "decode":
        pulls = PullSettings(lanes=section.lanes, chunk_bytes=section.chunk_bytes, patience=section.patience_seconds)
        settings = ReceivingSettings(pulls, section.arriving_bytes, shared=_shared(section))
        replay = inner.settings.replay
        async with (
            _transferring(section, host) as transferring,
            receiving(engine.receiver, replay, settings, transferring=transferring) as arrivals,
        ):
            answers = InferenceService(engine, info, arrivals=arrivals)
            registries.append(arrivals_registry(arrivals))
            yield WorkerServices([answers.service()], registries)
    else:
        yield WorkerServices([InferenceService(engine, info).service()], registries)


@contextlib.asynccontextmanager
async def _transferring(section: KvSection, host: str) -> AsyncIterator[TransferEngine | None]:
    """This process's end of the transfer engine; None where that is not wanted, or does not start."""
    transferring = None
    if "jax" in section.transports:
        try:
            transferring = TransferEngine(host)
        except TransferEngineError:
            _log.warning("transport jax is not available", exc_info=True)
    try:
        yield transferring
    finally:
        if transferring is not None:
            transferring.close()


def _shared(section: KvSection) -> Path | None:
    """Where states lie that other processes of this host read; None where that is not wanted, or not possible."""
    return DIRECTORY if "shm" in section.transports and host_id(DIRECTORY) is not None else None
