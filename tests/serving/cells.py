"""Clusters of every kind over tiny engines, the same random requests through any of them, and what came."""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from typing import Any

from deepinfer_jax.request import Request, SamplingParams
from deepinfer_jax.sequence import branch_seed
from serving.async_client import AsyncClient
from serving.events import Answer
from tests.deepinfer_jax.test_engine_machine import Build, alone
from tests.running_engines import KEEP, built, encoder, receiver
from tests.serving.bounded_answers import check_bounded
from tests.serving.clusters import deployed, engine_worker, gateway
from tests.serving.random_requests import Plan, plans, tokenizer

OPEN_REQUESTS = 10
SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cluster and how it computes.

    Attributes:
        prefillers, decoders: how many of them; none are a process of role all.
        mode: ``full`` or ``encoder_only``.
        decoder: decoder replay.
        replay: ``exact`` or ``bounded``.
    """

    prefillers: int
    decoders: int
    mode: str
    decoder: str
    replay: str

    def __str__(self):
        shape = f"{self.prefillers}P{self.decoders}D" if self.decoders else "all"
        return "-".join((shape, self.mode, self.decoder, self.replay))

    @contextlib.asynccontextmanager
    async def running(self, senders=None, receivers=(receiver, built)):
        """A client of the cluster, and whether nothing is left of any request.

        ``senders``, ``receivers``: what builds the engine of each worker.
        """
        common = {"decoder": self.decoder, "mode": self.replay}
        if not self.decoders:
            async with deployed(**common) as cluster:
                yield cluster
            return
        if senders is None:
            senders = (encoder if self.mode == "encoder_only" else built, receiver)
        async with contextlib.AsyncExitStack() as stack:
            workers = [
                await stack.enter_async_context(engine_worker(f"{role[0]}{number}", role=role, build=build, **common))
                for role, count, builds in (
                    ("prefill", self.prefillers, senders),
                    ("decode", self.decoders, receivers),
                )
                for number, build in enumerate(builds[:count])
            ]
            addresses = [worker.address for worker in workers]
            settings = {"tokenizer": tokenizer(), "prefill": self.mode, "call_seconds": SECONDS}
            gate = await stack.enter_async_context(gateway(*addresses, **settings))

            async def idle():
                placed = any(worker.account.open_requests for worker in gate.workers)
                return not placed and all([await worker.idle() for worker in workers])

            yield gate.client, idle

    def hands_over(self, prompt, params, tokens):
        """Whether an answer of these tokens came by two workers; None where its first token may have ended it."""
        if not self.decoders or not params.max_tokens:
            return False
        if self.mode == "encoder_only":
            return len(prompt) > KEEP and params.prompt_logprobs is None
        return True if len(tokens) > 1 else None


@dataclasses.dataclass
class Asked:
    """A request and what was answered."""

    plan: Plan
    prompt: tuple[int, ...]
    params: SamplingParams
    answer: Answer

    @property
    def receipt(self):
        return self.answer.finished.receipt

    def request(self):
        """As an engine gets it; of what the gateway drew the receipt tells."""
        params = dataclasses.replace(self.params, seed=self.receipt.engine.seed)
        return Request(self.prompt, params)


async def ask(client: AsyncClient, some: tuple[Plan, ...]) -> list[Asked]:
    """All requests, some of them open at a time; one that continues another waits for its end."""
    open_requests = asyncio.Semaphore(OPEN_REQUESTS)
    asked: list[asyncio.Task[Asked]] = []

    async def one(plan: Plan) -> Asked:
        parent = None if plan.parent is None else await asyncio.shield(asked[plan.parent])
        before = None if parent is None else (parent.prompt, parent.answer.tokens)
        prompt, params = plan.resolved(before, tokenizer())
        answer = await client.complete(prompt, params, timeout=SECONDS, **plan.more)
        return Asked(plan, prompt, params, answer)

    async def in_turn(plan: Plan) -> Asked:
        try:
            return await one(plan)
        finally:
            open_requests.release()

    for plan in some:
        await open_requests.acquire()
        asked.append(asyncio.create_task(in_turn(plan)))
    return list(await asyncio.gather(*asked))


def through(cell: Cell, count: int, **builds: Any) -> list[Asked]:
    """So many requests through a cluster of its own, behind which nothing is left."""

    async def run():
        async with cell.running(**builds) as (client, idle):
            asked = await ask(client, plans(count))
            assert await idle()
            return asked

    return asyncio.run(run())


def check_hand_over(cell: Cell, one: Asked) -> None:
    """What the receipt says of the way that a request took."""
    receipt, tokens = one.receipt, one.answer.tokens
    handed = receipt.handed_over_bytes > 0
    assert cell.hands_over(one.prompt, one.params, tokens) in (handed, None)
    if handed:
        assert (receipt.prefill_worker[0], receipt.worker[0]) == ("p", "d")
        assert receipt.transport == "shm"
    assert receipt.failovers == 0
    timing = receipt.timing
    assert (timing.transfer is not None) == handed
    # The word when the last token was computed may come too late to be waited for.
    assert handed or timing.exposed_transfer is None
    assert (timing.prefill is not None) == (timing.decode is not None) == bool(tokens)
    assert 0 <= timing.queue <= timing.queue + (timing.prefill or 0) + (timing.decode or 0) <= timing.total + 1e-6
    if one.params.seed is not None:
        assert receipt.engine.seed == branch_seed(one.params.seed, one.plan.branch)


def check_alone(cell: Cell, one: Asked, build: Build = built) -> None:
    """An answer is the one that a request gets which has an engine to itself, bit for bit; ``build``: makes that."""
    (wanted,) = alone("f32", cell.decoder, one.request(), tokenizer(), build)
    answer, finished = one.answer, one.answer.finished
    assert list(answer.tokens) == wanted.tokens
    assert list(answer.logprobs) == wanted.logprobs
    assert answer.prompt_logprobs == (wanted.prompt_logprobs or ())
    assert (finished.reason, finished.matched) == (wanted.last.finish_reason, wanted.last.matched)
    assert finished.completion_tokens == len(wanted.tokens)


def check_replayed(cell: Cell, one: Asked) -> Counter[str]:
    """An answer agrees with whole sequences that hide what the replays of its receipt hide."""
    answer, finished = one.answer, one.answer.finished
    assert finished.completion_tokens == len(answer.tokens)
    assert (finished.reason == "length") == (finished.matched is None)
    text = tokenizer().decode(answer.tokens)
    stops = [place + len(stop) for stop in one.params.stop if (place := text.find(stop)) >= 0]
    if isinstance(finished.matched, str):
        # By the last token, which may go on behind it: control tokens are words.
        before = tokenizer().decode(answer.tokens[:-1])
        assert len(before) < min(stops) == text.find(finished.matched) + len(finished.matched)
    else:
        assert not stops
    if finished.reason == "length":
        assert len(answer.tokens) == one.params.max_tokens
    replays = one.receipt.engine.replays
    clear, unlike = check_bounded(
        cell.decoder, one.request(), answer.tokens, answer.logprobs, finished.matched, replays
    )
    return Counter({"behind replays": bool(replays), "clear tokens": clear, "unlike exact": unlike})


def tally(asked: list[Asked]) -> Counter[str]:
    """What happened, for tests that want to see that it did."""
    seen: Counter[str] = Counter()
    for one in asked:
        receipt, engine, finished = one.receipt, one.receipt.engine, one.answer.finished
        seen["requests"] += 1
        seen["handed over"] += receipt.handed_over_bytes > 0
        seen["bytes"] += receipt.handed_over_bytes
        seen["handed over inside a block"] += engine.received_tokens % 16 != 0
        seen["handed over at an odd length"] += engine.received_tokens % 2
        seen["hits"] += engine.hit_tokens > 0
        seen["hit tokens"] += engine.hit_tokens
        seen["replayed rows"] += engine.replayed_tokens
        seen["bounded replays"] += bool(engine.replays)
        seen["preemptions"] += engine.preemptions
        seen["tokens"] += len(one.answer.tokens)
        seen[f"ended by {type(finished.matched).__name__}"] += finished.reason == "stop"
        seen[f"prompts on {receipt.prefill_worker or receipt.worker}"] += 1
        seen[f"answers on {receipt.worker}"] += 1
    return seen
