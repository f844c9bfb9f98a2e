"""A gateway over a prefill worker and decode workers, as real servers over real engines, gives what one engine gives.

Deterministic, replay mode exact, numerics f32; decoder replay as named. The engines have other pools, slots, rings and
tiles. Requests run at once, and their states are fetched while they are computed.
"""

import asyncio
import contextlib
import dataclasses
import math

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from deepinfer_jax.request import Request, SamplingParams
from serving.errors import ServingError
from serving.events import Delta
from tests.deepinfer_jax.test_engine_machine import FIELDS, alone, stream
from tests.running_engines import KEEP, built, encoder, receiver
from tests.serving.clusters import engine_worker, eventually, gateway

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = stream(0)[:61]
FEW = 7
# Numbers that pass through 32 bits unchanged.
DRAWN = st.fixed_dictionaries(
    {name: FIELDS[name] for name in FIELDS if name not in ("n", "temperature", "top_p", "min_p", "repetition_penalty")}
    | {"temperature": st.sampled_from([0.0, 0.75]), "repetition_penalty": st.sampled_from([1.0, 1.25])}
)
REQUESTS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 70), DRAWN), min_size=1, max_size=6)
MODES = {"full": ("off", built), "encoder_only": ("compact", encoder)}


@contextlib.asynccontextmanager
async def split(mode):
    """A prefill worker, a decode worker and a gateway."""
    decoder, sender = MODES[mode]
    async with (
        engine_worker("p", role="prefill", decoder=decoder, build=sender) as prefill,
        engine_worker("d", role="decode", decoder=decoder, build=receiver) as decode,
        gateway(prefill.address, decode.address, prefill=mode) as gate,
    ):
        yield prefill, decode, gate


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=5, phases=[Phase.generate])
@given(drawn=REQUESTS)
def test_answers_through_a_gateway_are_those_of_one_engine(mode, drawn):
    decoder, _ = MODES[mode]
    calls = [(stream(seed)[:length], SamplingParams(**fields)) for seed, length, fields in drawn]
    expected = [alone("f32", decoder, Request(*call))[0] for call in calls]

    async def ask():
        async with split(mode) as (prefill, decode, gate):
            answers = await asyncio.gather(*(gate.client.complete(*call) for call in calls))
            return answers, await prefill.idle() and await decode.idle()

    answers, idle = asyncio.run(ask())
    for (prompt, params), answer, wanted in zip(calls, answers, expected, strict=True):
        assert list(answer.tokens) == wanted.tokens
        assert list(answer.logprobs) == wanted.logprobs
        assert answer.prompt_logprobs == (wanted.prompt_logprobs or ())
        finished = answer.finished
        assert (finished.reason, finished.matched) == (wanted.last.finish_reason, wanted.last.matched)
        assert finished.completion_tokens == len(wanted.tokens)
        handed = finished.receipt.prefill_worker == "p" and finished.receipt.worker == "d"
        if mode == "encoder_only":
            assert handed == (len(prompt) > KEEP and params.prompt_logprobs is None and params.max_tokens > 0)
        elif len(wanted.tokens) > 1:
            assert handed
        assert (finished.receipt.handed_over_bytes > 0) == handed
        assert finished.receipt.engine.seed == wanted.last.receipt.seed
    assert idle


def test_what_a_lost_decode_worker_had_goes_on_elsewhere():
    params = dataclasses.replace(GREEDY, temperature=0.75, seed=3, logprobs=1)
    (wanted,) = alone("f32", "compact", Request(PROMPT, params))

    async def ask():
        async with (
            engine_worker("p", role="prefill", decoder="compact", build=encoder) as prefill,
            engine_worker("d1", role="decode", decoder="compact", build=receiver) as one,
            engine_worker("d2", role="decode", decoder="compact", build=built) as two,
            gateway(prefill.address, one.address, two.address, prefill="encoder_only") as gate,
        ):
            for worker in (one, two):
                worker.throttle.allow(FEW)
            events, seen = gate.client.generate(PROMPT, params), []
            async for event in events:
                seen.append(event)
                if isinstance(event, Delta):
                    break
            lost, other = (one, two) if seen[0].worker == "d1" else (two, one)
            await lost.stop()
            other.throttle.allow(math.inf)
            seen += [event async for event in events]
            return seen, await prefill.idle() and await other.idle()

    seen, idle = asyncio.run(ask())
    deltas = [event for event in seen if isinstance(event, Delta)]
    assert [token for delta in deltas for token in delta.tokens] == wanted.tokens
    assert [entry for delta in deltas for entry in delta.logprobs] == wanted.logprobs
    receipt = seen[-1].receipt
    assert (receipt.failovers, receipt.prefill_worker) == (1, "p")
    assert receipt.worker != seen[0].worker
    assert idle


@pytest.mark.parametrize("stop", ["prefill", "decode", "both"])
def test_a_cancel_while_workers_stand_still_frees_everything(stop):
    async def ask():
        async with split("full") as (prefill, decode, gate):
            for worker, name in ((prefill, "prefill"), (decode, "decode")):
                if stop in (name, "both"):
                    worker.throttle.allow(1)
            reading = asyncio.create_task(gate.client.complete(PROMPT, GREEDY))
            await eventually(lambda: gate.service.metrics.value("open_requests") == 1)
            await asyncio.sleep(0.2)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await eventually(lambda: not gate.server.guard.running)
            await gate.service.close()
            for worker in (prefill, decode):
                worker.throttle.allow(math.inf)
            return await prefill.idle() and await decode.idle()

    assert asyncio.run(ask())


def test_a_prefill_worker_that_ends_while_it_computes_costs_nothing_but_time():
    (wanted,) = alone("f32", "off", Request(PROMPT, GREEDY))

    async def ask():
        async with split("full") as (prefill, decode, gate):
            prefill.throttle.allow(1)
            reading = asyncio.create_task(gate.client.complete(PROMPT, GREEDY))
            await eventually(lambda: prefill.server.guard.running)
            await prefill.stop()
            return await reading, await decode.idle()

    answer, idle = asyncio.run(ask())
    assert list(answer.tokens) == wanted.tokens
    assert (answer.finished.receipt.prefill_worker, answer.finished.receipt.worker) == ("", "d")
    assert idle


def test_a_refusal_of_a_prefill_worker_names_the_field_of_the_request():
    async def ask():
        async with split("full") as (prefill, decode, gate):
            with pytest.raises(ServingError) as refused:
                await gate.client.complete(PROMPT, GREEDY, write_cache=False)
            return refused.value, await prefill.idle() and await decode.idle()

    error, idle = asyncio.run(ask())
    assert (error.reason, error.metadata["field"]) == ("NOT_SUPPORTED", "cache.write")
    assert idle
