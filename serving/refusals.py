"""Refusals of the engine as refusals of calls: the reason of an error, and the field of the request it is about."""

from __future__ import annotations

from deepinfer_jax.errors import DeepInferError, InputError, OverloadError, SnapshotError
from serving.errors import ServingError, bad_field, refusal

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "seed",
)
FIELDS = {name: f"sampling.{name}" for name in _SAMPLING} | {
    "prompt": "prompt_token_ids",
    "token id": "prompt_token_ids",
    "prompt and new tokens": "prompt_token_ids and max_tokens",
    "stop_ids": "stop.stop_token_ids",
    "stop": "stop.strings",
    "ignore_eos": "stop.ignore_eos",
    "logprobs": "logprobs.generated",
    "prompt_logprobs": "logprobs.prompt",
    "n": "sampling.branch",
}
"""Fields of a request's message by what the engine calls them."""


def refusal_of(error: Exception) -> ServingError:
    """How a call ends in which an error was raised. What nobody foresaw tells the caller nothing of itself."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, InputError):
        return _of_input(error)
    if isinstance(error, OverloadError):
        return refusal("QUEUE_FULL", str(error))
    if isinstance(error, SnapshotError):
        return refusal("KV_DAMAGED", str(error), field=error.key)
    if isinstance(error, DeepInferError):
        return refusal("ENGINE_FAULT", str(error))
    if isinstance(error, TimeoutError):
        return refusal("DEADLINE_PASSED", "the deadline passed")
    return refusal("ENGINE_FAULT", "the server failed; its log says why")


def _of_input(error: InputError) -> ServingError:
    # A key may name one entry of a field: logit_bias[7].
    name, bracket, entry = error.key.partition("[")
    field = FIELDS.get(name, name) + bracket + entry
    accepted = f"{error.accepted} ({error.remedy})" if error.remedy else error.accepted
    reason = "INVALID_FIELD"
    if error.key == "prompt and new tokens":
        reason = "CONTEXT_TOO_LONG"
    elif "vocabulary" in error.accepted:
        reason = "BAD_TOKEN_ID"
    return bad_field(field, error.value, accepted, reason)
