"""All workers of a gateway: found, asked how they are, and chosen from."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator

from serving.accounts import Reservation
from serving.configuration import GatewaySection
from serving.discovery import Discovery
from serving.placement import choose_decode, choose_prefill
from serving.proto.deepinfer.v1.inference_pb2 import ModelInfo
from serving.worker import Worker

_log = logging.getLogger("serving.workers")

DECODERS = ("decode", "all")
"""Roles of workers that answer."""

# Workers that differ in one of these would answer the same request differently, or cannot exchange state.
# What people know something by comes before the fingerprint, which depends on most of it.
_COMPARED = (
    "weights_id",
    "vocabulary",
    "numerics",
    "page_tokens",
    "keep",
    "replay_mode",
    "deterministic",
    "fingerprint",
)


class Place:
    """A worker that a request goes to, and what it occupies there. Leave it by :meth:`leave`."""

    def __init__(self, worker: Worker, reservation: Reservation) -> None:
        self.worker, self._reservation = worker, reservation

    def cached(self, tokens: int) -> None:
        """Note that the worker's caches hold so many tokens of the prompt."""
        self._reservation.prompt_tokens = max(0, self._reservation.prompt_tokens - tokens)

    def leave(self) -> None:
        """Note that the request has ended there; may be repeated."""
        self.worker.account.release(self._reservation)


class Workers:
    """The workers of a gateway, in one event loop."""

    def __init__(self, settings: GatewaySection, discovery: Discovery | None = None) -> None:
        """Nothing is asked before :meth:`start`."""
        self._settings = settings
        self._discovery = Discovery(settings.workers) if discovery is None else discovery
        self._workers: dict[str, Worker] = {}
        self._leaving: dict[str, Worker] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    async def start(self) -> None:
        """Find the workers, ask each once, and go on doing both."""
        await self._find()
        await self._poll()
        self._tasks = [
            asyncio.create_task(self._repeat(self._find, self._settings.resolve_seconds)),
            asyncio.create_task(self._repeat(self._poll, self._settings.poll_seconds)),
        ]

    async def found(self) -> None:
        """Wait until there is one that answers."""
        while self.info is None:
            await asyncio.sleep(self._settings.poll_seconds)

    async def close(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in (*self._workers.values(), *self._leaving.values()):
            await worker.close()

    @property
    def info(self) -> ModelInfo | None:
        """What is served: what a worker that answers serves; None where there is none."""
        return next((worker.info for worker in self if worker.serves(*DECODERS)), None)

    def decoders(self) -> list[Worker]:
        """Workers that answer."""
        return [worker for worker in self if worker.serves(*DECODERS)]

    def prefill_place(self, prompt_tokens: int, excluded: Collection[str]) -> Place | None:
        """A place for a prompt of so many tokens; None where there is no worker for it.

        ``excluded``: addresses of workers that have failed it.
        """
        loads = [
            worker.account.prefill_load(worker.address, available=worker.available)
            for worker in self
            if worker.role == "prefill"
        ]
        return self._place(choose_prefill(loads, excluded), prompt_tokens, prompt_tokens)

    def decode_place(
        self, prompt_tokens: int, tokens: int, excluded: Collection[str], fingerprint: str = ""
    ) -> Place | None:
        """A place for an answer; None where there is no worker for it.

        Args:
          prompt_tokens: that are computed there.
          tokens: of prompt and answer.
          excluded: addresses of workers that have failed it.
          fingerprint: that the worker must have; empty takes any.
        """
        loads = [
            worker.account.decode_load(worker.address, worker.info.page_tokens, available=worker.available)
            for worker in self
            if worker.role in DECODERS and worker.info and fingerprint in ("", worker.info.fingerprint)
        ]
        return self._place(choose_decode(loads, tokens, excluded), prompt_tokens, tokens)

    def _place(self, address: str | None, prompt_tokens: int, tokens: int) -> Place | None:
        if address is None:
            return None
        worker = self._workers[address]
        return Place(worker, worker.account.reserve(prompt_tokens, tokens))

    def _trouble_with(self, info: ModelInfo, address: str) -> str:
        """Why a worker cannot be used beside those that are."""
        if info.role == "gateway":
            return "it is a gateway itself"
        pinned = self._settings.fingerprint
        if pinned and info.fingerprint != pinned:
            return f"its fingerprint is {info.fingerprint}, configured is {pinned}"
        for other in self:
            if other.address != address and other.available and other.info is not None:
                for name in _COMPARED:
                    mine, theirs = getattr(info, name), getattr(other.info, name)
                    if mine != theirs:
                        return f"its {name} is {mine}, that of {other.name} is {theirs}"
                return ""
        return ""

    async def _find(self) -> None:
        addresses = await self._discovery.addresses()
        for address in addresses:
            if address in self._leaving:
                self._workers[address] = self._leaving.pop(address)
            elif address not in self._workers:
                self._workers[address] = self._connect(address)
        for address in [known for known in self._workers if known not in addresses]:
            _log.info("worker has gone", extra={"address": address})
            self._leaving[address] = self._workers.pop(address)
        for address in [known for known, worker in self._leaving.items() if not worker.account.open_requests]:
            await self._leaving.pop(address).close()

    def _connect(self, address: str) -> Worker:
        return Worker(address, self._settings.call_seconds, lambda info: self._trouble_with(info, address))

    async def _poll(self) -> None:
        await asyncio.gather(*(worker.poll() for worker in self))

    @staticmethod
    async def _repeat(work: Callable[[], Awaitable[None]], seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await work()
            except Exception:
                # Whatever it is, the gateway must not go on with what it knew for good.
                _log.exception("workers not asked")
