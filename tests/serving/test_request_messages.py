"""Requests through their messages and back, and every value that is refused before anything is queued."""

import dataclasses
import math
import pickle

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from deepinfer_jax.errors import InputError
from deepinfer_jax.request import SamplingParams
from deepinfer_jax.sequence import branch_seed
from serving.errors import InvalidRequestError
from serving.generate_call import GenerateCall
from serving.proto.deepinfer.v1 import types_pb2
from serving.proto.deepinfer.v1.inference_pb2 import GenerateRequest
from serving.request_messages import generate_message, parse_generate
from tests.serving.strategies import LIMITS, generate_calls

FINGERPRINT = "0" * 64
KV = {"kv_id": "a", "endpoints": [{"uri": "grpc://h:1"}], "fingerprint": FINGERPRINT, "mode": 1}


def request(**fields):
    return GenerateRequest(**{"prompt_token_ids": [1, 2, 3]} | fields)


@given(generate_calls())
def test_a_request_survives_its_message(make):
    call = make()
    content = generate_message(call).SerializeToString()
    assert parse_generate(GenerateRequest.FromString(content), LIMITS) == call


def test_a_bare_request_has_the_defaults_of_the_engine():
    assert parse_generate(request(), LIMITS) == GenerateCall((1, 2, 3), SamplingParams())


def test_zero_is_not_absent():
    message = request(sampling={"temperature": 0, "seed": 0}, max_tokens=0, logprobs={"generated": 0, "prompt": 0})
    params = parse_generate(message, LIMITS).params
    assert (params.temperature, params.seed, params.max_tokens) == (0.0, 0, 0)
    assert (params.logprobs, params.prompt_logprobs) == (0, 0)


def test_the_engine_gets_the_seed_of_the_branch():
    call = GenerateCall((1,), SamplingParams(seed=5), branch=3, priority=2, salt=b"s", read_cache=False)
    made = call.engine_request(1.5)
    assert made.params.seed == branch_seed(5, 3)
    assert (made.deadline, made.priority, made.salt, made.read_cache) == (1.5, 2, b"s", False)
    assert dataclasses.replace(call, branch=0).engine_request(None).params.seed == 5
    assert dataclasses.replace(call, params=SamplingParams()).engine_request(None).params.seed is None


def test_several_branches_are_several_calls():
    with pytest.raises(InputError, match="a call for each branch"):
        generate_message(GenerateCall((1,), SamplingParams(n=2)))


BAD_TOKEN_ID, CONTEXT_TOO_LONG = "BAD_TOKEN_ID", "CONTEXT_TOO_LONG"
REFUSALS = [
    ({"prompt_token_ids": []}, "prompt_token_ids", "at least one token", "INVALID_FIELD"),
    ({"prompt_token_ids": [0, 500]}, "prompt_token_ids", "0 to 499", BAD_TOKEN_ID),
    ({"prompt_token_ids": [2**32 - 1]}, "prompt_token_ids", "0 to 499", BAD_TOKEN_ID),
    ({"prompt_token_ids": [1] * 65}, "prompt_token_ids", "at most 64 tokens", CONTEXT_TOO_LONG),
    ({"prompt_len": 0}, "prompt_len", "1 to 3", "INVALID_FIELD"),
    ({"prompt_len": 4}, "prompt_len", "1 to 3", "INVALID_FIELD"),
    ({"request_id": "a b"}, "request_id", "printable ASCII", "INVALID_FIELD"),
    ({"request_id": "ä"}, "request_id", "printable ASCII", "INVALID_FIELD"),
    ({"request_id": "a" * 129}, "request_id", "at most 128", "INVALID_FIELD"),
    ({"traceparent": "a\n"}, "traceparent", "printable ASCII", "INVALID_FIELD"),
    ({"sampling": {"temperature": -0.5}}, "sampling.temperature", "from 0 to 100", "INVALID_FIELD"),
    ({"sampling": {"temperature": math.nan}}, "sampling.temperature", "from 0 to 100", "INVALID_FIELD"),
    ({"sampling": {"temperature": math.inf}}, "sampling.temperature", "from 0 to 100", "INVALID_FIELD"),
    ({"sampling": {"top_p": 0}}, "sampling.top_p", "above 0 to 1", "INVALID_FIELD"),
    ({"sampling": {"top_p": 1.5}}, "sampling.top_p", "above 0 to 1", "INVALID_FIELD"),
    ({"sampling": {"min_p": 2}}, "sampling.min_p", "from 0 to 1", "INVALID_FIELD"),
    ({"sampling": {"presence_penalty": 3}}, "sampling.presence_penalty", "from -2 to 2", "INVALID_FIELD"),
    ({"sampling": {"frequency_penalty": -3}}, "sampling.frequency_penalty", "from -2 to 2", "INVALID_FIELD"),
    ({"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty", "above 0 to 100", "INVALID_FIELD"),
    ({"sampling": {"logit_bias": {7: 101}}}, "sampling.logit_bias[7]", "from -100 to 100", "INVALID_FIELD"),
    ({"sampling": {"logit_bias": {500: 1}}}, "sampling.logit_bias", "0 to 499", BAD_TOKEN_ID),
    ({"sampling": {"logit_bias": dict.fromkeys(range(129), 1)}}, "sampling.logit_bias", "at most 128", "INVALID_FIELD"),
    ({"sampling": {"min_tokens": 9}, "max_tokens": 8}, "sampling.min_tokens", "at most max_tokens", "INVALID_FIELD"),
    ({"sampling": {"branch": 128}}, "sampling.branch", "0 to 127", "INVALID_FIELD"),
    ({"stop": {"stop_token_ids": [500]}}, "stop.stop_token_ids", "0 to 499", BAD_TOKEN_ID),
    ({"stop": {"stop_token_ids": [1] * 16}}, "stop.stop_token_ids", "at most 15", "INVALID_FIELD"),
    ({"stop": {"strings": [""]}}, "stop.strings", "1 to 1024 bytes", "INVALID_FIELD"),
    ({"stop": {"strings": ["ä" * 513]}}, "stop.strings", "1 to 1024 bytes", "INVALID_FIELD"),
    ({"stop": {"strings": ["a"] * 17}}, "stop.strings", "at most 16", "INVALID_FIELD"),
    ({"logprobs": {"generated": 21}}, "logprobs.generated", "0 to 20", "INVALID_FIELD"),
    ({"logprobs": {"prompt": 21}}, "logprobs.prompt", "0 to 20", "INVALID_FIELD"),
    ({"cache": {"salt": b"a" * 65}}, "cache.salt", "at most 64 bytes", "INVALID_FIELD"),
    ({"cache": {"replay_mode": 3}}, "cache.replay_mode", "1 (exact), 2 (bounded)", "INVALID_FIELD"),
    ({"cache": {"replay_mode": -1}}, "cache.replay_mode", "1 (exact), 2 (bounded)", "INVALID_FIELD"),
    ({"cache": {"retention_class": 9}}, "cache.retention_class", "1 (transient), 2 (chat)", "INVALID_FIELD"),
    ({"cache": {"ttl": {"seconds": 0}}}, "cache.ttl", "above 0", "INVALID_FIELD"),
    ({"cache": {"ttl": {"seconds": -1}}}, "cache.ttl", "above 0", "INVALID_FIELD"),
    ({"cache": {"ttl": {"seconds": 1, "nanos": -1}}}, "cache.ttl", "above 0", "INVALID_FIELD"),
    ({"cache": {"ttl": {"seconds": 2**62}}}, "cache.ttl", "above 0", "INVALID_FIELD"),
    ({"constraint": {}}, "constraint", "of one kind", "INVALID_FIELD"),
    ({"constraint": {"regex": "a*"}}, "constraint.regex", "no structured outputs", "CONSTRAINT_INVALID"),
    ({"constraint": {"tools": {}}}, "constraint.tools", "no structured outputs", "CONSTRAINT_INVALID"),
    ({"images": [{}]}, "images", "takes no images", "NOT_SUPPORTED"),
    ({"first_token": 1}, "first_token", "there is no kv", "INVALID_FIELD"),
    ({"kv": KV, "first_token": 500}, "first_token", "0 to 499", BAD_TOKEN_ID),
    ({"kv": {}}, "kv.kv_id", "that the prefill worker gave", "INVALID_FIELD"),
    ({"kv": KV | {"kv_id": "\x00"}}, "kv.kv_id", "printable ASCII", "INVALID_FIELD"),
    ({"kv": KV | {"fingerprint": "0" * 63}}, "kv.fingerprint", "64 hexadecimal digits", "INVALID_FIELD"),
    ({"kv": KV | {"endpoints": []}}, "kv.endpoints", "at least a grpc:// one", "INVALID_FIELD"),
    ({"kv": KV | {"endpoints": [{"uri": "shm://h/x"}]}}, "kv.endpoints", "at least a grpc:// one", "INVALID_FIELD"),
    ({"kv": KV | {"mode": 0}}, "kv.mode", "1 (full), 2 (encoder only)", "INVALID_FIELD"),
    ({"kv": KV | {"mode": 3}}, "kv.mode", "1 (full), 2 (encoder only)", "INVALID_FIELD"),
]


@pytest.mark.parametrize(("fields", "field", "accepted", "reason"), REFUSALS, ids=lambda value: str(value)[:40])
def test_a_refusal_names_the_field_and_what_is_accepted(fields, field, accepted, reason):
    with pytest.raises(InvalidRequestError) as caught:
        parse_generate(request(**fields), LIMITS)
    error = caught.value
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert error.metadata["field"] == field
    assert accepted in error.metadata["accepted"]
    assert field in error.message
    assert accepted in error.message
    assert error.retry_after is None
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_every_refusal_of_the_list_is_reached_alone():
    """The request that they spoil is accepted without them, the handle too."""
    assert parse_generate(request(kv=KV, first_token=0), LIMITS).first_token == 0


def outcome(content):
    """What becomes of any bytes: a call, or one of the two refusals that a server gives."""
    try:
        return parse_generate(GenerateRequest.FromString(content), LIMITS)
    except (DecodeError, InvalidRequestError) as error:
        return error


@given(st.binary(max_size=300))
@example(b"")
@example(b"\x08")
@example(b"\x1a\x02\x0d\x00")
def test_any_bytes_are_a_request_or_refused(content):
    assert isinstance(outcome(content), GenerateCall | DecodeError | InvalidRequestError)


@given(generate_calls(), st.data())
def test_damaged_requests_are_requests_or_refused(make, data):
    content = bytearray(generate_message(make()).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    for damaged in (bytes(content), bytes(content[:cut]), bytes(content[cut:])):
        assert isinstance(outcome(damaged), GenerateCall | DecodeError | InvalidRequestError)


ANY_NUMBERS = st.floats(width=32)
ANY_COUNTS = st.integers(0, 2**32 - 1) | st.integers(0, 200)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "request_id": st.text(max_size=200),
            "prompt_token_ids": st.lists(ANY_COUNTS, max_size=80),
            "sampling": st.fixed_dictionaries(
                {},
                optional=dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), ANY_NUMBERS)
                | dict.fromkeys(("top_k", "min_tokens", "branch"), ANY_COUNTS)
                | {"logit_bias": st.dictionaries(ANY_COUNTS, ANY_NUMBERS, max_size=4)},
            ),
            "stop": st.fixed_dictionaries(
                {}, optional={"stop_token_ids": st.lists(ANY_COUNTS, max_size=20), "strings": st.lists(st.text())}
            ),
            "cache": st.fixed_dictionaries(
                {},
                optional={
                    "salt": st.binary(max_size=80),
                    "retention_class": st.integers(-(2**31), 2**31 - 1) | st.integers(0, 4),
                    "replay_mode": st.integers(-(2**31), 2**31 - 1) | st.integers(0, 3),
                },
            ),
            "max_tokens": ANY_COUNTS,
            "prompt_len": ANY_COUNTS,
            "first_token": ANY_COUNTS,
        },
    )
)
def test_any_values_are_a_request_or_refused(fields):
    """What passes is what the engine takes: its own checks are behind it."""
    call = outcome(GenerateRequest(**fields).SerializeToString())
    if isinstance(call, InvalidRequestError):
        assert call.metadata["field"]
        return
    assert max(call.prompt) < LIMITS.vocabulary
    assert len(call.prompt) + len(call.answer) <= LIMITS.max_context
    assert parse_generate(generate_message(call), LIMITS) == call


def test_enums_have_an_unspecified_zero():
    for enum in types_pb2.DESCRIPTOR.enum_types_by_name.values():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
