"""The gateway over real engines: answers, fail-over, refusals, ends. Deterministic, replay mode exact, numerics f32."""

import asyncio
import contextlib
import dataclasses
import math

import pytest

from deepinfer_jax.checkpoint.default_model import default_model
from deepinfer_jax.request import Request, SamplingParams
from deepinfer_jax.sequence import branch_seed
from deepinfer_jax.text.tokenizer import Tokenizer
from serving.errors import DeadlineError, InvalidRequestError, OverloadedError, UnavailableError
from serving.events import Delta, Finished, Started
from tests.deepinfer_jax.test_engine_machine import alone, stream
from tests.running_engines import receiver
from tests.serving.clusters import engine_worker, eventually, gateway

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
NOISY = dataclasses.replace(GREEDY, temperature=1.0, seed=7, repetition_penalty=1.3, logprobs=2)
PROMPT = stream(0)[:41]
# Steps in which a prompt is computed and an answer has begun, but cannot end.
FEW = 7


async def tokens_until(events, count):
    """The events up to so many tokens."""
    seen = []
    async for event in events:
        seen.append(event)
        if sum(len(one.tokens) for one in seen if isinstance(one, Delta)) >= count:
            break
    return seen


def test_answers_are_those_of_the_engine_alone():
    wanted = [alone("f32", "off", Request(PROMPT, params))[0] for params in (GREEDY, NOISY)]

    async def ask():
        async with engine_worker("w") as worker, gateway(worker.address) as gate:
            info = await gate.client.model_info()
            answers = [await gate.client.complete(PROMPT, params) for params in (GREEDY, NOISY)]
            branch = await gate.client.complete(PROMPT, NOISY, branch=2)
            drawn = await gate.client.complete(PROMPT, dataclasses.replace(NOISY, seed=None), branch=1)
            again = dataclasses.replace(NOISY, seed=drawn.finished.receipt.engine.seed)
            load = await gate.client.load()
            return info, answers, branch, drawn, await gate.client.complete(PROMPT, again), load, await worker.idle()

    info, answers, branch, drawn, repeated, load, idle = asyncio.run(ask())
    assert (info.worker, info.role, info.max_context, info.kv_handles) == ("gate", "gateway", 96, False)
    for answer, expected in zip(answers, wanted, strict=True):
        assert list(answer.tokens) == expected.tokens
        assert list(answer.logprobs) == expected.logprobs
    assert answers[0].started.prompt_tokens == len(PROMPT)
    receipt = answers[1].finished.receipt
    assert (receipt.worker, receipt.prefill_worker, receipt.failovers) == ("w", "", 0)
    assert answers[1].started.cached_tokens == receipt.engine.hit_tokens == 32
    assert branch.finished.receipt.engine.seed == branch_seed(7, 2)
    assert branch.tokens != answers[1].tokens
    # The seed of the receipt stands for the drawn one and the branch.
    assert repeated.tokens == drawn.tokens
    assert len(load.shards) == 1
    assert idle


@pytest.mark.parametrize("params", [GREEDY, NOISY])
def test_an_answer_goes_on_elsewhere_when_its_worker_is_lost(params):
    (wanted,) = alone("f32", "off", Request(PROMPT, params))

    async def ask():
        async with (
            engine_worker("one") as one,
            engine_worker("two", build=receiver) as two,
            gateway(one.address, two.address) as gate,
        ):
            for worker in (one, two):
                worker.throttle.allow(FEW)
            events = gate.client.generate(PROMPT, params)
            seen = await tokens_until(events, 1)
            first, other = (one, two) if seen[0].worker == "one" else (two, one)
            await first.stop()
            other.throttle.allow(math.inf)
            seen += [event async for event in events]
            metrics = gate.service.metrics
            return seen, other is two, await other.idle(), metrics.value("failovers_total")

    seen, on_two, idle, failovers = asyncio.run(ask())
    assert [type(event) for event in (seen[0], seen[-1])] == [Started, Finished]
    assert [token for event in seen if isinstance(event, Delta) for token in event.tokens] == wanted.tokens
    assert [entry for event in seen if isinstance(event, Delta) for entry in event.logprobs] == wanted.logprobs
    finished = seen[-1]
    assert (finished.reason, finished.completion_tokens, finished.receipt.failovers) == ("length", 12, 1)
    assert finished.receipt.worker == ("two" if on_two else "one")
    # How long it waited on the worker that is gone nobody knows.
    assert finished.receipt.timing.queue is None
    assert idle
    assert failovers == 1


def test_a_request_is_repeated_elsewhere_before_its_first_token():
    async def ask():
        async with (
            engine_worker("one") as one,
            engine_worker("two", build=receiver) as two,
            gateway(one.address, two.address) as gate,
        ):
            one.server.guard.drain()
            two.server.guard.drain()
            with pytest.raises(UnavailableError) as refused:
                await gate.client.complete(PROMPT, GREEDY)
            two.server.guard._draining = False
            await eventually(lambda: len(gate.workers.decoders()) == 1)
            answer = await gate.client.complete(PROMPT, GREEDY)
            return refused.value, answer

    refused, answer = asyncio.run(ask())
    assert (refused.reason, refused.retry_after) == ("DRAINING", 1.0)
    assert (answer.finished.receipt.worker, answer.finished.receipt.failovers) == ("two", 0)


def test_without_workers_everything_is_refused_at_once():
    async def ask():
        async with gateway("127.0.0.1:1") as gate:
            for call in (gate.client.complete(PROMPT, GREEDY), gate.client.model_info()):
                with pytest.raises(UnavailableError) as refused:
                    await call
                assert (refused.value.reason, refused.value.retry_after) == ("NO_WORKER", 1.0)

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("prompt", "params", "more", "reason", "field"),
    [
        ((), GREEDY, {}, "INVALID_FIELD", "prompt_token_ids"),
        ((96,), GREEDY, {}, "BAD_TOKEN_ID", "prompt_token_ids"),
        (PROMPT, dataclasses.replace(GREEDY, max_tokens=60), {}, "CONTEXT_TOO_LONG", "prompt_token_ids and max_tokens"),
        (PROMPT, GREEDY, {"request_id": "a b"}, "INVALID_FIELD", "request_id"),
        (PROMPT, dataclasses.replace(GREEDY, stop=("x",)), {}, "NOT_SUPPORTED", "stop.strings"),
        (PROMPT, dataclasses.replace(GREEDY, stop_ids=frozenset({97})), {}, "BAD_TOKEN_ID", "stop.stop_token_ids"),
    ],
)
def test_requests_that_no_worker_would_take_cost_nothing(prompt, params, more, reason, field):
    async def ask():
        async with engine_worker("w") as worker, gateway(worker.address) as gate:
            with pytest.raises(InvalidRequestError) as refused:
                await gate.client.complete(prompt, params, **more)
            steps = await worker.engine.call(lambda engine: engine.metrics.value("steps_total"))
            return refused.value, steps, gate.service.metrics.value("failed_requests_total", reason=reason)

    refused, steps, counted = asyncio.run(ask())
    assert (refused.reason, refused.metadata["field"]) == (reason, field)
    assert (steps, counted) == (0, 1)


def test_stop_strings_end_an_answer_and_the_worker():
    tokenizer = Tokenizer.from_directory(default_model())
    (whole,) = alone("f32", "off", Request(PROMPT, GREEDY))
    text = tokenizer.decode(whole.tokens)
    # In the middle of the answer, across a token's end.
    stop = text[len(tokenizer.decode(whole.tokens[:5])) - 1 :][:2]
    ends = next(count for count in range(1, 13) if stop in tokenizer.decode(whole.tokens[:count]))

    async def ask():
        async with engine_worker("w") as worker, gateway(worker.address, tokenizer=tokenizer) as gate:
            params = dataclasses.replace(GREEDY, stop=(stop, "never to be seen"), max_tokens=50)
            answer = await gate.client.complete(PROMPT, params)
            return answer, await worker.idle()

    answer, idle = asyncio.run(ask())
    assert list(answer.tokens) == whole.tokens[:ends]
    assert (answer.finished.reason, answer.finished.matched) == ("stop", stop)
    assert answer.finished.completion_tokens == ends
    # The worker was asked to end, and its receipt came.
    assert answer.finished.receipt.worker == "w"
    assert idle


def test_aborted_requests_end_with_a_word_and_their_receipt():
    async def ask():
        async with engine_worker("w") as worker, gateway(worker.address) as gate:
            worker.throttle.allow(FEW)
            events = gate.client.generate(PROMPT, GREEDY, request_id="mine")
            await tokens_until(events, 1)
            with pytest.raises(InvalidRequestError, match="REQUEST_ID_IN_USE"):
                await gate.client.complete(PROMPT, GREEDY, request_id="mine")
            found = await gate.client.abort("mine"), await gate.client.abort("other")
            worker.throttle.allow(math.inf)
            rest = [event async for event in events]
            return found, rest[-1], await worker.idle()

    found, last, idle = asyncio.run(ask())
    assert found == (True, False)
    assert (last.reason, last.receipt.worker) == ("cancelled", "w")
    assert 1 <= last.completion_tokens < 12
    assert idle


def test_clients_that_leave_free_everything():
    async def ask():
        async with engine_worker("w") as worker, gateway(worker.address) as gate:
            for count in (0, 1, 2):
                worker.throttle.allow(FEW)
                events = gate.client.generate(PROMPT, GREEDY)
                async with contextlib.aclosing(events):
                    await tokens_until(events, count)
                worker.throttle.allow(math.inf)
            await eventually(lambda: not gate.server.guard.running)
            metrics = gate.service.metrics
            return await worker.idle(), metrics.value("open_requests"), metrics.value("waiting_prompt_tokens")

    assert asyncio.run(ask()) == (True, 0, 0)


def test_no_more_enters_than_is_allowed():
    async def ask():
        async with engine_worker("w") as worker:
            async with gateway(worker.address, max_requests=1) as gate:
                worker.throttle.allow(FEW)
                events = gate.client.generate(PROMPT, GREEDY)
                await tokens_until(events, 1)
                with pytest.raises(OverloadedError) as refused:
                    await gate.client.complete(PROMPT, GREEDY)
                worker.throttle.allow(math.inf)
                await events.aclose()
                await eventually(lambda: not gate.server.guard.running)
                await gate.client.complete(PROMPT, GREEDY)
            return refused.value

    refused = asyncio.run(ask())
    assert (refused.reason, refused.retry_after) == ("QUEUE_FULL", 1.0)


def test_a_deadline_reaches_the_worker_and_comes_back():
    async def ask():
        async with engine_worker("w") as worker, gateway(worker.address, deadline_margin=5.0) as gate:
            with pytest.raises(DeadlineError) as refused:
                await gate.client.complete(PROMPT, GREEDY, timeout=4.0)
            return refused.value

    assert asyncio.run(ask()).reason == "DEADLINE_PASSED"


def test_a_draining_gateway_finishes_what_it_has():
    async def ask():
        async with engine_worker("w") as worker, gateway(worker.address) as gate:
            worker.throttle.allow(FEW)
            events = gate.client.generate(PROMPT, GREEDY)
            await tokens_until(events, 1)
            stopping = asyncio.create_task(gate.server.stop(20.0))
            await eventually(lambda: gate.server.guard.draining)
            with pytest.raises(UnavailableError) as refused:
                await gate.client.complete(PROMPT, GREEDY)
            worker.throttle.allow(math.inf)
            rest = [event async for event in events]
            await stopping
            return refused.value, rest

    refused, rest = asyncio.run(ask())
    assert refused.reason == "DRAINING"
    assert (rest[-1].reason, rest[-1].completion_tokens) == ("length", 12)
