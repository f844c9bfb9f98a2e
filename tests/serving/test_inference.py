"""The service of tokens over a real engine: its answers are the engine's own, and whatever happens gives all back.

Deterministic f32 over a tiny model, replay mode exact.
"""

import asyncio
import contextlib
import dataclasses
import math
import threading
import time

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.async_engine import AsyncEngine
from deepinfer_jax.errors import InputError
from deepinfer_jax.request import Request, SamplingParams
from deepinfer_jax.sequence import branch_seed
from serving.async_client import AsyncClient
from serving.channels import RetryPolicy
from serving.client import Client
from serving.errors import (
    CODES,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    ServerFaultError,
    UnavailableError,
)
from serving.events import Delta, Started
from serving.generate_call import GenerateCall
from serving.inference import InferenceService
from serving.model_info import model_info
from serving.proto.deepinfer.v1.inference_pb2 import GenerateRequest
from serving.request_messages import generate_message
from serving.status import error_from
from tests.running_engines import SETTINGS, fresh_engine, run
from tests.serving.clusters import Throttle
from tests.serving.servers import NAME, in_thread, started

PROMPT = tuple(np.random.default_rng(7).integers(3, 95, 40).tolist())
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = dataclasses.replace(GREEDY, max_tokens=50)
ONCE = RetryPolicy(attempts=1)
GENERATE = f"/{NAME}/Generate"


def service_of(engine, inner):
    info = model_info(
        inner,
        model="tiny",
        weights_id="w",
        numerics="f32",
        fingerprint=bytes(32),
        stop_strings=False,
        worker="worker-1",
    )
    return InferenceService(engine, info)


@contextlib.contextmanager
def serving(**changes):
    """A fresh engine behind a server in a thread: the engine and its target."""
    inner = fresh_engine("f32", **changes)
    with AsyncEngine(inner) as engine, in_thread(service_of(engine, inner), worker="worker-1") as target:
        yield inner, target


@contextlib.asynccontextmanager
async def serving_here(**changes):
    """A fresh engine behind a server in this event loop: the engine, its service and a client."""
    inner = fresh_engine("f32", **changes)
    with AsyncEngine(inner) as engine:
        service = service_of(engine, inner)
        async with started(service) as (_, target), AsyncClient(target, retries=ONCE) as client:
            yield engine, service, client


async def books_are_back(engine, service):
    """Wait until nothing of any request is left; hangs if something leaks."""
    while service._running:
        await asyncio.sleep(0.001)
    while await engine.call(lambda inner: inner.busy):
        await asyncio.sleep(0.001)
    books = await engine.call(lambda inner: (inner.books.used_blocks, inner.books.used_slots, inner.load()))
    assert books[:2] == (0, 0)
    assert books[2].waiting_requests == books[2].shards[0].running_requests == 0


REQUESTS = [
    ("greedy", PROMPT, GREEDY),
    ("sampled", PROMPT[:20], SamplingParams(max_tokens=6, temperature=0.7, top_p=0.9, top_k=20, seed=5)),
    ("penalised", PROMPT[:9], SamplingParams(max_tokens=6, repetition_penalty=1.5, presence_penalty=0.5, seed=0)),
    ("biased", PROMPT[:9], SamplingParams(max_tokens=6, logit_bias={3: 5.0, 4: -5.0}, min_tokens=3, seed=2)),
    ("scored", PROMPT[:30], dataclasses.replace(GREEDY, logprobs=3, prompt_logprobs=2)),
    ("prompt alone", PROMPT[:30], dataclasses.replace(GREEDY, max_tokens=0, prompt_logprobs=0)),
    ("stopped", PROMPT, None),
]


@pytest.mark.parametrize(("prompt", "params"), [r[1:] for r in REQUESTS], ids=[r[0] for r in REQUESTS])
def test_an_answer_is_the_engines_own(prompt, params):
    if params is None:
        third = run(fresh_engine("f32"), [Request(PROMPT, GREEDY)])[0].tokens[2]
        params = dataclasses.replace(GREEDY, stop_ids=frozenset({third}))
    (expected,) = run(fresh_engine("f32"), [Request(prompt, params)])
    with serving() as (_, target), Client(target) as client:
        answer = client.complete(prompt, params, request_id="mine")
    last = expected.last
    assert list(answer.tokens) == expected.tokens
    assert list(answer.logprobs) == expected.logprobs
    assert answer.prompt_logprobs == (expected.prompt_logprobs or ())
    assert (answer.finished.reason, answer.finished.matched) == (last.finish_reason, last.matched)
    assert answer.finished.completion_tokens == len(expected.tokens)
    given = {} if params.seed is not None else {"seed": answer.finished.receipt.engine.seed}
    assert answer.finished.receipt.engine == dataclasses.replace(last.receipt, **given)
    assert answer.finished.receipt.worker == answer.started.worker == "worker-1"
    assert answer.finished.receipt.timing.total >= 0
    assert answer.started.request_id == "mine"
    assert (answer.started.prompt_tokens, answer.started.cached_tokens) == (len(prompt), 0)


def test_branches_are_streams_of_their_own():
    params = SamplingParams(max_tokens=5, seed=11)
    expected = run(fresh_engine("f32"), [Request(PROMPT, dataclasses.replace(params, n=3))])
    with serving() as (_, target), Client(target) as client:
        answers = [client.complete(PROMPT, params, branch=branch) for branch in range(3)]
    assert [list(answer.tokens) for answer in answers] == [answer.tokens for answer in expected]
    assert [answer.finished.receipt.engine.seed for answer in answers] == [branch_seed(11, i) for i in range(3)]


def test_the_start_says_what_a_cache_had():
    with serving() as (_, target), Client(target) as client:
        client.complete(PROMPT, GREEDY, salt=b"a")
        hits = [client.complete(PROMPT, GREEDY, salt=salt).started.cached_tokens for salt in (b"a", b"b")]
        hits.append(client.complete(PROMPT, GREEDY, salt=b"a", read_cache=False).started.cached_tokens)
    assert hits == [32, 0, 0]


def test_what_is_served_and_how_busy_it_is():
    with serving() as (inner, target), Client(target) as client:
        info, load = client.model_info(), client.load()
    assert (info.model, info.vocabulary, info.eos_token_id) == ("tiny", inner.config.vocab_size, 1)
    assert (info.max_context, info.page_tokens, info.max_running) == (96, SETTINGS.block_tokens, SETTINGS.slots)
    assert (info.fingerprint, info.role, info.deterministic) == ("00" * 32, "all", True)
    assert (load.queued_requests, load.draining, len(load.shards)) == (0, False, 1)
    assert (load.shards[0].slots, load.shards[0].pages) == (SETTINGS.slots, SETTINGS.blocks)


ENGINE_REFUSALS = [
    ({"prompt": PROMPT, "params": dataclasses.replace(GREEDY, max_tokens=57)}, "CONTEXT_TOO_LONG", "max_tokens"),
    ({"prompt": (10**6,)}, "BAD_TOKEN_ID", "prompt_token_ids"),
    ({"prompt": PROMPT, "params": dataclasses.replace(GREEDY, stop=("a",))}, "NOT_SUPPORTED", "stop.strings"),
    ({"prompt": PROMPT, "params": GREEDY, "write_cache": False}, "NOT_SUPPORTED", "cache.write"),
]


@pytest.mark.parametrize(("fields", "reason", "field"), ENGINE_REFUSALS)
def test_what_cannot_be_served_is_refused_at_once(fields, reason, field):
    with serving() as (inner, target), Client(target) as client:
        with pytest.raises(InvalidRequestError) as caught:
            client.complete(**fields)
        load = client.load()
    assert caught.value.reason == reason
    assert field in caught.value.metadata["field"]
    assert caught.value.metadata["worker"] == "worker-1"
    assert (load.queued_requests, load.shards[0].running_requests, inner.books.used_blocks) == (0, 0, 0)


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=60) | st.just(b"\x12\x02\x05\x06"), min_size=1, max_size=5))
def _fuzz(stub, contents):
    for content in contents:
        try:
            list(stub(content, timeout=30.0))
        except grpc.RpcError as error:
            typed = error_from(error)
            assert isinstance(typed, InvalidRequestError), typed
            assert CODES[typed.reason] == typed.code


def test_fuzzed_requests_are_refused_or_answered_and_cost_nothing():
    whole = generate_message_of(PROMPT, GREEDY).SerializeToString()
    with serving() as (inner, target), grpc.insecure_channel(target) as channel:
        stub = channel.unary_stream(GENERATE)
        _fuzz(stub)
        assert len(list(stub(whole, timeout=30.0))) > 2
        refused = inner.metrics.value("finished_requests_total", reason="error")
    assert refused == 0
    assert (inner.books.used_blocks, inner.books.used_slots, inner.busy) == (0, 0, False)


def generate_message_of(prompt, params):
    return generate_message(GenerateCall(prompt, params))


def test_too_many_requests_are_refused_with_a_delay():
    async def crowd():
        async with serving_here(max_waiting=2) as (engine, service, client):
            results = await asyncio.gather(
                *(client.complete(PROMPT[:20], LONG) for _ in range(8)), return_exceptions=True
            )
            await books_are_back(engine, service)
        return results

    results = asyncio.run(crowd())
    refused = [result for result in results if isinstance(result, Exception)]
    assert 0 < len(refused) < 8
    for error in refused:
        assert isinstance(error, OverloadedError), error
        assert (error.reason, error.retry_after) == ("QUEUE_FULL", 1.0)


def test_a_client_that_leaves_gives_everything_back():
    async def leave():
        async with serving_here() as (engine, service, client):
            stages = []
            for stop_at in (0, 1, 2, 5):
                async with contextlib.aclosing(client.generate(PROMPT, LONG)) as events:
                    for _ in range(stop_at):
                        stages.append(type(await anext(events)).__name__)
                    if not stop_at:
                        waiting = asyncio.create_task(anext(events))
                        while not service._running:
                            await asyncio.sleep(0)
                        waiting.cancel()
                        await asyncio.wait((waiting,))
                await books_are_back(engine, service)
            aborted = await engine.call(lambda inner: inner.metrics.value("finished_requests_total", reason="abort"))
            answer = await client.complete(PROMPT, GREEDY)
        return stages, aborted, answer

    stages, aborted, answer = asyncio.run(leave())
    assert stages[:3] == ["Started", "Started", "Delta"]
    assert 3 <= aborted <= 4
    assert list(answer.tokens) == run(fresh_engine("f32"), [Request(PROMPT, GREEDY)])[0].tokens


def test_abort_ends_the_stream_of_another():
    async def abort():
        async with serving_here() as (engine, service, client):
            events = client.generate(PROMPT, LONG, request_id="a")
            seen = [await anext(events), await anext(events)]
            with pytest.raises(InvalidRequestError) as caught:
                await client.complete(PROMPT, GREEDY, request_id="a")
            found = [await client.abort("a"), await client.abort("b")]
            seen += [event async for event in events]
            await books_are_back(engine, service)
        return seen, found, caught.value

    seen, found, error = asyncio.run(abort())
    assert found == [True, False]
    assert error.reason == "REQUEST_ID_IN_USE"
    last = seen[-1]
    assert (last.reason, last.matched) == ("cancelled", None)
    assert last.completion_tokens == sum(len(event.tokens) for event in seen if isinstance(event, Delta))


def test_abort_ends_one_that_waits():
    async def abort():
        async with serving_here() as (engine, service, client):
            # Held between two steps, so that the order of what comes is known.
            held, release = asyncio.Event(), threading.Event()
            loop = asyncio.get_running_loop()

            def hold(inner):
                loop.call_soon_threadsafe(held.set)
                release.wait()

            holding = asyncio.create_task(engine.call(hold))
            await held.wait()
            answer = asyncio.create_task(client.complete(PROMPT, LONG, request_id="a"))
            while "a" not in service._running:
                await asyncio.sleep(0)
            assert await client.abort("a")
            release.set()
            await holding
            result = await answer
            await books_are_back(engine, service)
        return result

    answer = asyncio.run(abort())
    assert (answer.finished.reason, answer.tokens) == ("cancelled", ())


def test_a_deadline_ends_the_request_in_the_engine():
    async def late():
        async with serving_here() as (engine, service, client):
            release = threading.Event()
            holding = asyncio.create_task(engine.call(lambda inner: release.wait()))
            with pytest.raises(DeadlineError):
                await client.complete(PROMPT, LONG, timeout=0.2)
            release.set()
            await holding
            await books_are_back(engine, service)

    asyncio.run(late())


def test_an_engine_ends_what_is_late_though_its_server_hears_of_nothing():
    async def late():
        async with serving_here() as (engine, service, client):
            inner = await engine.call(lambda inner: inner)
            throttle = Throttle(inner)
            throttle.allow(0)
            answer = asyncio.create_task(client.complete(PROMPT, LONG, timeout=1.5))
            while not inner.busy and not answer.done():
                await asyncio.sleep(0.001)
            # The event loop stands still meanwhile.
            time.sleep(1.6)
            throttle.allow(math.inf)
            while inner.busy:
                time.sleep(0.001)
            ended = inner.metrics.value("finished_requests_total", reason="deadline")
            with pytest.raises(DeadlineError):
                await answer
            await books_are_back(engine, service)
        return ended

    assert asyncio.run(late()) == 1


def test_a_reader_that_does_not_read_delays_nobody():
    async def stall():
        async with serving_here() as (engine, service, client):
            unread = client._stub.Generate(generate_message_of(PROMPT[:30], LONG), timeout=60.0)
            while not service._running:
                await asyncio.sleep(0)
            answer = await client.complete(PROMPT, GREEDY)
            tokens = [token async for message in unread for token in message.delta.token_ids]
            await books_are_back(engine, service)
        return answer, tokens

    answer, tokens = asyncio.run(stall())
    expected = run(fresh_engine("f32"), [Request(PROMPT, GREEDY), Request(PROMPT[:30], LONG)])
    assert [list(answer.tokens), tokens] == [part.tokens for part in expected]


def test_an_engine_that_ends_makes_its_server_unavailable():
    async def end():
        async with serving_here() as (engine, _, client):
            events = client.generate(PROMPT, LONG)
            seen = [await anext(events)]
            await asyncio.to_thread(engine.close)
            errors = []
            for waiting in (_drain(events), client.complete(PROMPT, GREEDY), client.load()):
                with pytest.raises(UnavailableError) as caught:
                    await waiting
                errors.append(caught.value.reason)
        return seen, errors

    seen, errors = asyncio.run(end())
    assert isinstance(seen[0], Started)
    assert errors == ["ENGINE_STOPPED"] * 3


async def _drain(events):
    return [event async for event in events]


def test_scores_that_are_not_finite_are_a_fault():
    async def poison():
        async with serving_here() as (engine, service, client):
            events = client.generate(PROMPT, LONG)
            await anext(events)

            def spoil(inner):
                (sequence,) = inner._running.values()
                inner._device.poison([], [inner.books.number(sequence)])

            await engine.call(spoil)
            with pytest.raises(ServerFaultError) as caught:
                await _drain(events)
            await books_are_back(engine, service)
        return caught.value

    assert asyncio.run(poison()).reason == "ENGINE_FAULT"


def test_many_streams_at_once_are_the_engines_own():
    """More streams than slots, of both clients, some of which leave: those that stay get what they get alone."""
    requests = [
        (PROMPT[:length], SamplingParams(max_tokens=7, seed=length, ignore_eos=True)) for length in range(4, 28)
    ]
    expected = [answer.tokens for answer in run(fresh_engine("f32"), [Request(*request) for request in requests])]

    async def many():
        async with serving_here() as (engine, service, client):

            async def leave(prompt):
                async with contextlib.aclosing(client.generate(prompt, LONG)) as events:
                    await anext(events)

            leaving = [leave(PROMPT[: 5 + i]) for i in range(8)]
            answers = await asyncio.gather(*(client.complete(*request) for request in requests), *leaving)
            await books_are_back(engine, service)
        return [list(answer.tokens) for answer in answers[: len(requests)]]

    assert asyncio.run(many()) == expected


def test_a_bounded_engine_refuses_exact_requests():
    with serving(mode="bounded") as (_, target), Client(target) as client:
        with pytest.raises(InvalidRequestError) as caught:
            client.complete(PROMPT, GREEDY, replay="exact")
        client.complete(PROMPT, GREEDY, replay="bounded")
    assert caught.value.metadata["field"] == "cache.replay_mode"


def test_hand_over_is_not_served_here():
    message = GenerateRequest(prompt_token_ids=PROMPT, max_tokens=4)
    message.kv.kv_id, message.kv.fingerprint, message.kv.mode = "a", "0" * 64, 1
    message.kv.endpoints.add(uri="grpc://h:1")
    with serving() as (_, target), grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream(GENERATE)(message.SerializeToString(), timeout=10.0))
    assert error_from(caught.value).metadata["field"] == "kv"


def test_a_client_refuses_what_it_cannot_send():
    with Client("127.0.0.1:1") as client, pytest.raises(InputError):
        client.complete(PROMPT, dataclasses.replace(GREEDY, n=2))
