"""A prompt computed by one worker and answered by another is what one engine gives, bit for bit, by every transport.

Deterministic execution, replay mode exact; numerics and decoder replay as named. The two engines have other pools,
slots, ring lengths and tiles. Requests run at once, and their states are fetched while they are computed.
"""

import asyncio
import dataclasses

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from deepinfer_jax.request import Request, SamplingParams
from serving.generate_call import GenerateCall
from tests.deepinfer_jax.test_engine_machine import FIELDS, alone, stream
from tests.running_engines import KEEP, built, encoder
from tests.serving.split_workers import ENCODER_ONLY, FULL, split

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
DRAWN = st.fixed_dictionaries({name: FIELDS[name] for name in FIELDS if name not in ("n", "prompt_logprobs")})


def rounded(fields):
    """Parameters whose numbers pass through 32 bits unchanged."""
    exact = {"temperature": 0.75, "top_p": 0.875, "min_p": 0.0625, "repetition_penalty": 1.25}
    changed = {name: exact[name] for name in exact if fields[name] not in (0.0, 1.0, 1.5)}
    return SamplingParams(**(fields | changed | {"max_tokens": max(1, fields["max_tokens"])}))


async def ask_all(workers, calls, mode):
    return await asyncio.gather(*(workers.ask(call, mode) for call in calls))


def assert_same(whole, wanted, handed):
    assert whole.tokens == wanted.tokens
    assert whole.logprobs == [dataclasses.replace(entry) for entry in wanted.logprobs]
    assert whole.finished.reason == wanted.last.finish_reason
    assert whole.finished.completion_tokens == len(wanted.tokens)
    assert whole.finished.matched == wanted.last.matched
    receipt = whole.finished.receipt
    if whole.prefilled.HasField("kv"):
        assert (receipt.transport, receipt.prefill_worker, receipt.worker) == (handed, "prefill", "decode")
        assert receipt.handed_over_bytes == whole.prefilled.kv.bytes
        assert receipt.engine.received_tokens == whole.prefilled.kv.computed_tokens
        # The word when the state was computed may come too late to wait for.
        if receipt.timing.exposed_transfer is not None:
            assert 0 <= receipt.timing.exposed_transfer <= receipt.timing.transfer
            assert 0 < receipt.exposed_bytes <= receipt.handed_over_bytes


def compare(numerics, decoder, mode, drawn, handed="grpc", **how):
    params = [rounded(fields) for _, _, fields in drawn]
    calls = [
        GenerateCall(stream(seed)[:length], sampling) for (seed, length, _), sampling in zip(drawn, params, strict=True)
    ]
    expected = [alone(numerics, decoder, Request(call.prompt, call.params))[0] for call in calls]

    async def run():
        async with split(numerics, decoder, **how) as workers:
            return await ask_all(workers, calls, mode)

    for whole, wanted in zip(asyncio.run(run()), expected, strict=True):
        # An answer may end with its first token, or instead of it, where its prompt is computed.
        assert whole.prefilled.HasField("kv") or (mode == FULL and len(wanted.tokens) < 2)
        assert_same(whole, wanted, handed)


@pytest.fixture(params=["grpc", "shm"])
def handed(request, tmp_path):
    """Settings of both workers for a transport."""
    return {"handed": request.param, "shared": tmp_path if request.param == "shm" else None}


ONCE = settings(max_examples=3, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("numerics", ["f32", pytest.param("f32q", marks=pytest.mark.slow)])
@ONCE
@given(drawn=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 70), DRAWN), min_size=1, max_size=5))
def test_a_prompt_and_its_answer_on_two_workers_are_those_of_one_engine(handed, numerics, drawn):
    compare(numerics, "compact", FULL, drawn, **handed)


@pytest.mark.parametrize(
    ("numerics", "sender"), [("f32", encoder), ("f32", built), pytest.param("f32q", encoder, marks=pytest.mark.slow)]
)
@ONCE
@given(drawn=st.lists(st.tuples(st.integers(0, 2), st.integers(KEEP + 1, 70), DRAWN), min_size=1, max_size=5))
def test_half_a_model_computes_prompts_for_a_whole_one(handed, numerics, sender, drawn):
    compare(numerics, "compact", ENCODER_ONLY, drawn, sender=sender, **handed)
