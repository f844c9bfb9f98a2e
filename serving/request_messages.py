"""Requests for tokens and their messages. Whatever a message holds is checked here, before anything is queued."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from google.protobuf.duration_pb2 import Duration

from deepinfer_jax.errors import InputError
from deepinfer_jax.request import MOST_BIASES, MOST_BRANCHES, MOST_STOP_IDS, SamplingParams
from serving.errors import bad_field
from serving.generate_call import GenerateCall, Retention
from serving.proto.deepinfer.v1 import types_pb2
from serving.proto.deepinfer.v1.inference_pb2 import GenerateRequest
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvHandle
from serving.refusals import refusal_of

MOST_ID_CHARACTERS = 128
MOST_SALT_BYTES = 64
MOST_STOP_STRINGS = 16
MOST_STOP_BYTES = 1024
MOST_TRACE_CHARACTERS = 256
MOST_ENDPOINTS = 16
MOST_URI_CHARACTERS = 1024
MOST_OPAQUE_BYTES = 4096
MOST_NAME_CHARACTERS = 256
LONGEST_TTL = 315_576_000_000  # seconds, of google.protobuf.Duration

_PRINTABLE = re.compile(r"[!-~]*")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_REPLAYS = {"exact": types_pb2.REPLAY_MODE_EXACT, "bounded": types_pb2.REPLAY_MODE_BOUNDED}
_RETENTIONS = {
    "transient": types_pb2.RETENTION_CLASS_TRANSIENT,
    "chat": types_pb2.RETENTION_CLASS_CHAT,
    "agent": types_pb2.RETENTION_CLASS_AGENT,
}
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
)


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """What a server's model and engine take: ids below ``vocabulary``, and prompts of up to ``max_context`` tokens."""

    vocabulary: int
    max_context: int


def generate_message(call: GenerateCall) -> GenerateRequest:
    """The message of a call. Numbers are rounded to 32 bits."""
    params = call.params
    if params.n != 1:
        raise InputError("n", params.n, "1, since a call is one branch", "make a call for each branch")
    message = GenerateRequest(
        request_id=call.request_id,
        prompt_token_ids=call.prompt + call.answer,
        sampling=_sampling_message(call),
        stop=types_pb2.StopSpec(
            stop_token_ids=sorted(params.stop_ids), ignore_eos=params.ignore_eos, strings=params.stop
        ),
        logprobs=types_pb2.LogprobSpec(generated=params.logprobs, prompt=params.prompt_logprobs),
        cache=_cache_message(call),
        priority=call.priority,
        traceparent=call.traceparent,
        max_tokens=params.max_tokens,
        kv=call.kv,
        first_token=call.first_token,
    )
    if call.answer:
        message.prompt_len = len(call.prompt)
    return message


def parse_generate(message: GenerateRequest, limits: RequestLimits) -> GenerateCall:
    """The call of a message.

    Raises:
      InvalidRequestError: names the first field that is missing or out of range, and what is accepted.
    """
    _check_unserved(message)
    _check_text("request_id", message.request_id, MOST_ID_CHARACTERS)
    _check_text("traceparent", message.traceparent, MOST_TRACE_CHARACTERS)
    prompt, answer = _prompt(message, limits)
    sampling, cache = message.sampling, message.cache
    if sampling.branch >= MOST_BRANCHES:
        raise bad_field("sampling.branch", sampling.branch, f"0 to {MOST_BRANCHES - 1}")
    if len(cache.salt) > MOST_SALT_BYTES:
        raise bad_field("cache.salt", f"{len(cache.salt)} bytes", f"at most {MOST_SALT_BYTES} bytes")
    return GenerateCall(
        prompt=prompt,
        answer=answer,
        params=_params(message, limits),
        request_id=message.request_id,
        branch=sampling.branch,
        priority=message.priority,
        salt=cache.salt,
        read_cache=cache.read if cache.HasField("read") else True,
        write_cache=cache.write if cache.HasField("write") else True,
        retention=_retention(cache),
        replay=_name("cache.replay_mode", cache.replay_mode, _REPLAYS),
        kv=_handle(message.kv) if message.HasField("kv") else None,
        first_token=_first_token(message, limits),
        traceparent=message.traceparent,
    )


def check_id(field: str, text: str) -> None:
    """Refuse what cannot be the id of anything.

    Raises:
      InvalidRequestError: it is missing, too long, or not printable.
    """
    if not text:
        raise bad_field(field, "", "an id")
    _check_text(field, text, MOST_ID_CHARACTERS)


def check_fingerprint(field: str, text: str) -> None:
    """Refuse what cannot be a fingerprint.

    Raises:
      InvalidRequestError: it is none.
    """
    if not _FINGERPRINT.fullmatch(text):
        raise bad_field(field, text, "64 hexadecimal digits, in lower case")


def _sampling_message(call: GenerateCall) -> types_pb2.SamplingParams:
    params = call.params
    return types_pb2.SamplingParams(
        seed=params.seed,
        logit_bias=params.logit_bias,
        branch=call.branch,
        **{name: getattr(params, name) for name in _SAMPLING},
    )


def _cache_message(call: GenerateCall) -> types_pb2.CacheSpec:
    message = types_pb2.CacheSpec(
        salt=call.salt,
        read=call.read_cache,
        write=call.write_cache,
        replay_mode=types_pb2.REPLAY_MODE_UNSPECIFIED if call.replay is None else _REPLAYS[call.replay],
    )
    if isinstance(call.retention, str):
        message.retention_class = _RETENTIONS[call.retention]
    elif call.retention is not None:
        message.ttl.FromNanoseconds(round(call.retention * 1e9))
    return message


def _check_unserved(message: GenerateRequest) -> None:
    if message.HasField("constraint"):
        kind = message.constraint.WhichOneof("kind")
        if kind is None:
            raise bad_field("constraint", "of no kind", "a constraint of one kind, or none")
        accepted = "no constraint, as this server has no structured outputs"
        raise bad_field(f"constraint.{kind}", "present", accepted, "CONSTRAINT_INVALID")
    if message.images:
        accepted = "none, as this server takes no images"
        raise bad_field("images", f"{len(message.images)} images", accepted, "NOT_SUPPORTED")


def _check_text(field: str, text: str, most: int) -> None:
    if len(text) > most or not _PRINTABLE.fullmatch(text):
        raise bad_field(field, text, f"at most {most} printable ASCII characters without spaces")


def _prompt(message: GenerateRequest, limits: RequestLimits) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of the prompt, and those of the answer so far."""
    count = len(message.prompt_token_ids)
    if not count:
        raise bad_field("prompt_token_ids", [], "at least one token")
    if count > limits.max_context:
        accepted = f"at most {limits.max_context} tokens"
        raise bad_field("prompt_token_ids", f"{count} tokens", accepted, "CONTEXT_TOO_LONG")
    ids = tuple(message.prompt_token_ids)
    _check_ids("prompt_token_ids", ids, limits)
    length = message.prompt_len if message.HasField("prompt_len") else count
    if not 1 <= length <= count:
        raise bad_field("prompt_len", length, f"1 to {count}, the number of prompt_token_ids")
    return ids[:length], ids[length:]


def _check_ids(field: str, ids: Iterable[int], limits: RequestLimits) -> None:
    largest = max(ids, default=0)
    if largest >= limits.vocabulary:
        accepted = f"0 to {limits.vocabulary - 1}, the ids of this model's vocabulary"
        raise bad_field(field, largest, accepted, "BAD_TOKEN_ID")


def _params(message: GenerateRequest, limits: RequestLimits) -> SamplingParams:
    sampling, stop, logprobs = message.sampling, message.stop, message.logprobs
    for field, count, most in (
        ("sampling.logit_bias", len(sampling.logit_bias), MOST_BIASES),
        ("stop.stop_token_ids", len(stop.stop_token_ids), MOST_STOP_IDS - 1),
        ("stop.strings", len(stop.strings), MOST_STOP_STRINGS),
    ):
        if count > most:
            raise bad_field(field, f"{count} entries", f"at most {most}")
    for text in stop.strings:
        if not 1 <= len(text.encode()) <= MOST_STOP_BYTES:
            raise bad_field("stop.strings", text, f"strings of 1 to {MOST_STOP_BYTES} bytes")
    _check_ids("sampling.logit_bias", sampling.logit_bias, limits)
    _check_ids("stop.stop_token_ids", stop.stop_token_ids, limits)
    given: dict[str, Any] = {name: getattr(sampling, name) for name in _SAMPLING if sampling.HasField(name)}
    if sampling.HasField("seed"):
        given["seed"] = sampling.seed
    if message.HasField("max_tokens"):
        given["max_tokens"] = message.max_tokens
    try:
        return SamplingParams(
            **given,
            logit_bias=dict(sampling.logit_bias),
            stop_ids=frozenset(stop.stop_token_ids),
            stop=tuple(stop.strings),
            ignore_eos=stop.ignore_eos,
            logprobs=logprobs.generated if logprobs.HasField("generated") else None,
            prompt_logprobs=logprobs.prompt if logprobs.HasField("prompt") else None,
        )
    except InputError as error:
        raise refusal_of(error) from error


def _retention(cache: types_pb2.CacheSpec) -> Retention | None:
    kind = cache.WhichOneof("retention")
    if kind == "ttl":
        return _seconds(cache.ttl)
    return None if kind is None else _name("cache.retention_class", cache.retention_class, _RETENTIONS)


def _seconds(ttl: Duration) -> float:
    seconds = ttl.seconds + ttl.nanos / 1e9
    if not (0 <= ttl.nanos < 10**9 and 0 < seconds <= LONGEST_TTL):
        raise bad_field("cache.ttl", f"{ttl.seconds} s and {ttl.nanos} ns", f"above 0 up to {LONGEST_TTL} seconds")
    return seconds


def _name(field: str, value: int, values: dict[str, Any]) -> str | None:
    """The name of an enum's value; None for the unspecified one."""
    found = [name for name, known in values.items() if known == value]
    if value and not found:
        raise bad_field(field, value, ", ".join(f"{known} ({name})" for name, known in values.items()))
    return found[0] if found else None


def _handle(kv: KvHandle) -> KvHandle:
    if not kv.kv_id:
        raise bad_field("kv.kv_id", "", "the id that the prefill worker gave")
    _check_text("kv.kv_id", kv.kv_id, MOST_ID_CHARACTERS)
    check_fingerprint("kv.fingerprint", kv.fingerprint)
    if len(kv.endpoints) > MOST_ENDPOINTS:
        raise bad_field("kv.endpoints", f"{len(kv.endpoints)} endpoints", f"at most {MOST_ENDPOINTS}")
    for endpoint in kv.endpoints:
        _check_text("kv.endpoints.uri", endpoint.uri, MOST_URI_CHARACTERS)
        if len(endpoint.opaque) > MOST_OPAQUE_BYTES:
            raise bad_field("kv.endpoints.opaque", f"{len(endpoint.opaque)} bytes", f"at most {MOST_OPAQUE_BYTES}")
    if not any(endpoint.uri.startswith(("grpc://", "grpc+unix://")) for endpoint in kv.endpoints):
        raise bad_field("kv.endpoints", [endpoint.uri for endpoint in kv.endpoints], "at least a grpc:// one")
    if kv.mode not in (types_pb2.PREFILL_MODE_FULL, types_pb2.PREFILL_MODE_ENCODER_ONLY):
        raise bad_field("kv.mode", kv.mode, "1 (full), 2 (encoder only)")
    if len(kv.worker) > MOST_NAME_CHARACTERS:
        raise bad_field("kv.worker", kv.worker, f"at most {MOST_NAME_CHARACTERS} characters")
    return kv


def _first_token(message: GenerateRequest, limits: RequestLimits) -> int | None:
    if not message.HasField("first_token"):
        return None
    if not message.HasField("kv"):
        raise bad_field("first_token", message.first_token, "absent, as there is no kv")
    _check_ids("first_token", (message.first_token,), limits)
    return message.first_token
