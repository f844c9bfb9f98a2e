"""A prefill worker: the services of prompts and of their state, over one engine and one table of leases."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from deepinfer_jax.async_engine import AsyncEngine
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.settings import EngineSettings
from serving.held_state import HeapStorage, HeldState, SectionStorage
from serving.kv_transfer import KvTransferService
from serving.leases import DEFAULT_LEASE_SECONDS, Leases, keep_swept
from serving.offers import Offers
from serving.prefill import PrefillService
from serving.proto.deepinfer.v1.inference_pb2 import ModelInfo
from serving.server import Service
from serving.shared_files import SharedStorage, keep_removed
from serving.transfer_engine import TransferEngine

_log = logging.getLogger("serving.kv")


@dataclasses.dataclass(frozen=True)
class HoldingSettings:
    """What a worker holds for others.

    Attributes:
        lease_seconds: that a state is held behind the last Pull.
        most_bytes, most_states: held together, computed ones and those that are computed.
        sealing_threads: that make sections of pages.
        shared: directory of files in memory that other processes of this host read; None keeps states in this one.
    """

    lease_seconds: float = DEFAULT_LEASE_SECONDS
    most_bytes: int = 4 << 30
    most_states: int = 1024
    sealing_threads: int = 2
    shared: Path | None = None


class PrefillWorker:
    """Use as an asynchronous context manager around the server that serves :meth:`services`.

    Attributes:
        leases: the held states.
        transfer: the bulk plane's service.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        config: ModelConfig,
        settings: EngineSettings,
        info: ModelInfo,
        holding: HoldingSettings | None = None,
        transferring: TransferEngine | None = None,
    ) -> None:
        """Make a worker over an engine, which is closed by whoever made it.

        Args:
          engine: computes.
          config, settings: its.
          info: what is served.
          holding: what is held.
          transferring: where states are offered too, closed by whoever made it; None offers them nowhere.
        """
        holding = holding or HoldingSettings()
        self._shared, self._transferring = holding.shared, transferring
        self._offers = None if transferring is None else Offers(transferring)
        self.leases: Leases[HeldState] = Leases(
            seconds=holding.lease_seconds, most_bytes=holding.most_bytes, most_states=holding.most_states
        )
        self._sealer = ThreadPoolExecutor(holding.sealing_threads, "sealing")
        self._prefill = PrefillService(engine, settings, info, self.leases, storage=self._storage, sealer=self._sealer)
        self.transfer = KvTransferService(engine.receiver.form, config.kv_source_layer_ids, self.leases, self._offers)
        self._sweeping: list[asyncio.Task[None]] = []

    def services(self) -> tuple[Service, Service]:
        """As parts of a server."""
        return self._prefill.service(), self.transfer.service()

    def advertise(self, uris: Sequence[str]) -> None:
        """Say where the bulk plane is reached, ``grpc://HOST:PORT``; before the first call."""
        own = [] if self._transferring is None else [self._transferring.uri]
        self._prefill.advertise([*own, *uris])

    async def __aenter__(self) -> PrefillWorker:
        self._sweeping = [asyncio.create_task(keep_swept(self.leases))]
        if self._shared is not None:
            self._sweeping.append(asyncio.create_task(keep_removed(self._shared)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._sweeping:
            task.cancel()
        await asyncio.gather(*self._sweeping, return_exceptions=True)
        self.leases.drop_all("the worker has ended")
        if self._offers is not None:
            await self._offers.close()
        self._sealer.shutdown(wait=False, cancel_futures=True)

    def _storage(self) -> SectionStorage:
        if self._shared is not None:
            try:
                return SharedStorage(self._shared)
            except OSError:
                _log.warning("a state cannot be kept in %s", self._shared, exc_info=True)
        return HeapStorage()
