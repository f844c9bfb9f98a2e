"""Errors of the engine and of calls: reasons, codes and fields."""

import grpc
import pytest

from deepinfer_jax.errors import ConfigError, InputError, OverloadError, SnapshotError
from deepinfer_jax.request import Request, SamplingParams
from serving.errors import CODES, RETRY_SECONDS, ContractError, ServingError, bad_field, refusal
from serving.generate_call import GenerateCall
from serving.proto.deepinfer.v1.errors_pb2 import ErrorReason
from serving.refusals import FIELDS, refusal_of
from serving.request_messages import generate_message
from tests.running_engines import fresh_engine


def test_every_reason_of_the_protocol_has_a_code():
    assert set(CODES) == set(ErrorReason.keys()) - {"ERROR_REASON_UNSPECIFIED"}
    assert set(RETRY_SECONDS) <= set(CODES)
    waits = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
    assert {CODES[reason] for reason in RETRY_SECONDS} == waits


@pytest.mark.parametrize("reason", CODES)
def test_a_refusal_is_of_the_class_of_its_code(reason):
    error = refusal(reason, "so it is", field="a")
    assert type(error) is not ServingError
    assert (error.code, error.retry_after) == (CODES[reason], RETRY_SECONDS.get(reason))
    assert str(error) == f"{reason}: so it is"


def test_long_values_are_cut():
    error = bad_field("a", "x" * 100_000, "less")
    assert len(error.message) < 300
    assert len(error.metadata["value"]) < 200


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OverloadError("waiting requests", 5, "at most 4"), "QUEUE_FULL"),
        (SnapshotError("slot(3)", "missing", "all"), "KV_DAMAGED"),
        (ConfigError("a", 1, "2"), "ENGINE_FAULT"),
        (TimeoutError(), "DEADLINE_PASSED"),
        (ZeroDivisionError("secret"), "ENGINE_FAULT"),
        (refusal("DRAINING", "x"), "DRAINING"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_have_reasons(error, reason):
    assert refusal_of(error).reason == reason
    assert "secret" not in refusal_of(error).message


def test_a_breach_of_contract_names_no_reason():
    assert (ContractError("x").reason, ContractError("x").code) == ("", grpc.StatusCode.INTERNAL)


def test_the_fields_are_those_of_the_message():
    message = generate_message(GenerateCall((1,)))
    for path in FIELDS.values():
        for name in path.split(" and "):
            place = message
            for part in name.split("."):
                assert part in place.DESCRIPTOR.fields_by_name, name
                place = getattr(place, part)


ENGINE_REFUSALS = [
    (Request(()), "prompt_token_ids", "INVALID_FIELD"),
    (Request((10**6,)), "prompt_token_ids", "BAD_TOKEN_ID"),
    (Request((1,), SamplingParams(stop_ids=frozenset({10**6}))), "stop.stop_token_ids", "BAD_TOKEN_ID"),
    (Request((1,), SamplingParams(max_tokens=10**6)), "prompt_token_ids and max_tokens", "CONTEXT_TOO_LONG"),
    (Request((1,) * 90, SamplingParams(max_tokens=7)), "prompt_token_ids and max_tokens", "CONTEXT_TOO_LONG"),
    (Request((1,), SamplingParams(max_tokens=1, stop=("a",))), "stop.strings", "INVALID_FIELD"),
]


@pytest.mark.parametrize(("request_", "field", "reason"), ENGINE_REFUSALS)
def test_what_the_engine_refuses_names_a_field_of_the_message(request_, field, reason):
    with pytest.raises(InputError) as caught:
        fresh_engine("f32").check(request_)
    error = refusal_of(caught.value)
    assert (error.metadata["field"], error.reason) == (field, reason)
    assert error.metadata["accepted"] in error.message
