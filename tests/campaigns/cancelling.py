"""Requests that are cancelled while it is certain where they are: queued, computing, transferring or decoding.

A stage is made certain by letting nothing leave it: the worker in question stands still, or the network does. What was
seen of a request by then, and the books of its worker, say where it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import grpc

from deepinfer_jax.request import SamplingParams
from serving.channels import RetryPolicy, client_options
from serving.generate_call import GenerateCall
from serving.proto.deepinfer.v1 import inference_pb2, inference_pb2_grpc
from serving.request_messages import generate_message
from tests.serving.bad_network import BadNetwork, Fault, Stall
from tests.serving.process_clusters import LONG, LONG_PROMPT, PROMPT, SHORT, Cluster, left_in

STAGES = ("queued", "computing", "transferring", "decoding")
DEADLINE = 120.0
GAUGES = (
    "deepinfer_gateway_open_requests",
    "deepinfer_gateway_placed_requests",
    "deepinfer_gateway_waiting_prompt_tokens",
    "deepinfer_kv_held_states",
    "deepinfer_kv_held_bytes",
    "deepinfer_kv_running_pulls",
    "deepinfer_kv_arriving_bytes",
    "deepinfer_kv_backlog_bytes",
)
"""What is 0 on the pages of metrics where there is no request."""
# Between two looks at books that others change.
_LOOK_SECONDS = 0.005
# For what a process sent before it stood still to come through.
_SETTLE_SECONDS = 0.03
_CANCELLED = grpc.StatusCode.CANCELLED


class LeakError(AssertionError):
    """Something of a cancelled request is left."""


class Asked:
    """One request: its call, and what came for it."""

    def __init__(self, stub: Any, prompt: tuple[int, ...], params: SamplingParams) -> None:
        message = generate_message(GenerateCall(prompt, params, salt=os.urandom(8)))
        self.call = stub.Generate(message, timeout=DEADLINE)
        self.started, self.ended, self.tokens = False, False, list[int]()
        self.deltas = 0
        self.code: grpc.StatusCode | None = None
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for event in self.call:
                kind = event.WhichOneof("event")
                self.started |= kind == "started"
                self.ended |= kind == "finished"
                if kind == "delta":
                    self.deltas += 1
                    self.tokens += event.delta.token_ids
        except (grpc.RpcError, asyncio.CancelledError):
            pass
        self.code = await self.call.code()

    async def cancel(self) -> bool:
        """End it. Returns whether that was before its end."""
        self.call.cancel()
        await self.reading
        return self.code is _CANCELLED


@dataclasses.dataclass
class Sample:
    """What the processes take: MiB resident, open files and threads of each by name."""

    cancels: int
    resident: dict[str, float]
    files: dict[str, int]
    threads: dict[str, int]


class Cancelling:
    """Waves of requests at a cluster, all of which are cancelled. Use as an asynchronous context manager.

    The cluster has a prefill worker ``p`` behind a network, another one ``s`` whose states lie in files, a decode
    worker ``d``, and gateways ``g`` over p and d, ``h`` over s and d.

    Attributes:
        cancelled: requests by the stage in which they were, ``anywhere`` where that was left to chance.
        missed: requests that ended before, or without, their cancel.
    """

    def __init__(self, cluster: Cluster, network: BadNetwork, seed: int = 0) -> None:
        self._cluster, self._network, self._random = cluster, network, random.Random(seed)
        self.cancelled: Counter[str] = Counter()
        self.missed = 0
        self.samples: list[Sample] = []
        self._expected: list[int] = []

    async def __aenter__(self) -> Cancelling:
        options = client_options(RetryPolicy(attempts=1))
        self._channels = {
            name: grpc.aio.insecure_channel(self._cluster.address(name), options) for name in self._cluster.members
        }
        self._stubs = {name: inference_pb2_grpc.InferenceStub(channel) for name, channel in self._channels.items()}
        self.slots = (await self._load("d")).shards[0].slots
        self._expected = await self.answer("g")
        return self

    async def __aexit__(self, *details: object) -> None:
        for channel in self._channels.values():
            await channel.close()

    @property
    def total(self) -> int:
        """Cancelled requests."""
        return sum(self.cancelled.values())

    async def answer(self, gateway: str) -> list[int]:
        """The tokens of a request that nobody cancels."""
        asked = Asked(self._stubs[gateway], PROMPT, SHORT)
        await asked.reading
        if not asked.ended or asked.code is not grpc.StatusCode.OK:
            raise LeakError(f"an answer ended with {asked.code}")
        return asked.tokens

    # Stages.

    async def queued_and_computing(self, count: int) -> None:
        """Prompts in all slots of a prefill worker, and ``count`` behind them."""
        gateway, worker = self._random.choice((("g", "p"), ("h", "s")))
        computing = self._ask(gateway, self.slots, LONG_PROMPT, SHORT)
        await self._until(lambda load: load.shards[0].running_requests == self.slots, worker)
        queued = self._ask(gateway, count, PROMPT, SHORT)
        await self._until(lambda load: load.queued_requests >= count, worker)
        # Perhaps they began meanwhile.
        begun = self._random.random() * 0.3
        await asyncio.sleep(begun)
        async with self._still(worker):
            # As long as nobody has left a slot, nobody has got one.
            full = not any(asked.deltas or asked.code for asked in computing)
            await self._cancel("queued", [asked for asked in queued if full and not asked.started])
            await self._cancel("computing", [asked for asked in computing if asked.started and not asked.deltas])
            rest = [asked for asked in (*computing, *queued) if asked.code is None]
            await self._cancel("anywhere", rest)

    async def transferring(self, count: int) -> None:
        """Prompts that are computed, and whose states cannot come through the network."""
        self._network.fault = fault = Stall()
        try:
            passed = self._network.passed
            asked = self._ask("g", count, PROMPT, LONG)
            while not all(one.deltas or one.code for one in asked):
                await asyncio.sleep(_LOOK_SECONDS)
            await self._until(lambda load: load.shards[0].read_backlog_bytes > 0, "d")
            # The first token is the prefill worker's. What follows it comes from states of which no byte has passed.
            held = self._network.passed == passed
            await self._cancel("transferring", [one for one in asked if held and one.deltas == 1])
            await self._cancel("anywhere", [one for one in asked if one.code is None])
        finally:
            fault.over, self._network.fault = True, Fault()

    async def decoding(self, count: int) -> None:
        """Answers that have begun on the decode worker."""
        asked = self._ask(self._random.choice("gh"), count, PROMPT, LONG)
        while not all(one.deltas > 1 or one.code for one in asked):
            await asyncio.sleep(_LOOK_SECONDS)
        async with self._still("d"):
            await self._cancel("decoding", [one for one in asked if not one.ended])
            await self._cancel("anywhere", [one for one in asked if one.code is None])

    async def anywhere(self, count: int) -> None:
        """Requests that are cancelled at random, wherever they are."""
        gateway = self._random.choice("gh")
        asked = self._ask(gateway, count, PROMPT, LONG)

        async def leave(one: Asked) -> None:
            await asyncio.sleep(self._random.random() * 0.05 * count)
            await self._cancel("anywhere", [one])

        await asyncio.gather(*map(leave, asked))

    # Baseline.

    async def check(self, *, answers: bool = True) -> None:
        """Wait until all is back where it was before; the cluster's leases bound that.

        Raises:
          LeakError: it does not come back, or answers are not what they were.
        """
        left: dict[str, Any] = {}
        for _ in range(int(30.0 / _LOOK_SECONDS)):
            left = await self._left()
            if not left:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        if left:
            raise LeakError(f"left behind after {self.total} cancels: {left}")
        for gateway in "gh" if answers else "":
            if (tokens := await self.answer(gateway)) != self._expected:
                raise LeakError(f"an answer is {tokens}, was {self._expected}")

    def sample(self) -> Sample:
        """What the processes take now."""
        names = list(self._cluster.members)
        paths = {name: Path(f"/proc/{self._cluster.pid(name)}") for name in names}
        page = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
        sample = Sample(
            self.total,
            {name: int((path / "statm").read_text().split()[1]) * page for name, path in paths.items()},
            {name: len(list((path / "fd").iterdir())) for name, path in paths.items()},
            {name: len(list((path / "task").iterdir())) for name, path in paths.items()},
        )
        self.samples.append(sample)
        return sample

    async def _left(self) -> dict[str, Any]:
        """What processes have of requests, by name; those that have nothing are not there."""
        left: dict[str, Any] = {}
        for name, member in self._cluster.members.items():
            page = await asyncio.to_thread(self._cluster.metrics, name)
            counts = {gauge: page[gauge] for gauge in GAUGES if page.get(gauge)}
            if not member.workers:
                load = await self._load(name)
                books = {"queued": load.queued_requests, "files": len(self._cluster.shared_files(name))}
                books |= {"shards": [left_in(shard) for shard in load.shards if any(left_in(shard))]}
                counts |= {book: count for book, count in books.items() if count}
            if counts:
                left[name] = counts
        return left

    # Parts.

    def _ask(self, gateway: str, count: int, prompt: tuple[int, ...], params: SamplingParams) -> list[Asked]:
        return [Asked(self._stubs[gateway], prompt, params) for _ in range(count)]

    async def _load(self, name: str) -> inference_pb2.Load:
        return await self._stubs[name].GetLoad(inference_pb2.GetLoadRequest(), timeout=DEADLINE)

    async def _until(self, reached: Any, name: str) -> None:
        """Wait until the load of a worker is so."""
        while not reached(await self._load(name)):
            await asyncio.sleep(_LOOK_SECONDS)

    @contextlib.asynccontextmanager
    async def _still(self, name: str) -> Any:
        """Let a process stand still, once what it has sent is here."""
        self._cluster.signal(name, signal.SIGSTOP)
        try:
            await asyncio.sleep(_SETTLE_SECONDS)
            for gateway in "gh":
                await self._load(gateway)
            yield
        finally:
            self._cluster.signal(name, signal.SIGCONT)

    async def _cancel(self, stage: str, asked: list[Asked]) -> None:
        """Cancel requests, and count those that had not ended."""
        for hit in await asyncio.gather(*(one.cancel() for one in asked)):
            self.cancelled[stage] += hit
            self.missed += not hit
