"""Events and the messages that carry them, one by one. Their order is the business of :mod:`serving.answer_stream`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from deepinfer_jax.request import Logprob, Receipt
from serving.errors import ContractError
from serving.events import Delta, Finished, PromptLogprobs, ServedReceipt, Started, Timing
from serving.proto.deepinfer.v1 import inference_pb2, types_pb2

FINISH_REASONS = {
    "stop": types_pb2.FINISH_REASON_STOP,
    "length": types_pb2.FINISH_REASON_LENGTH,
    "content_filter": types_pb2.FINISH_REASON_CONTENT_FILTER,
    "cancelled": types_pb2.FINISH_REASON_CANCELLED,
}
"""Reasons of the protocol by the names that events have for them."""

_REASON_NAMES = {value: name for name, value in FINISH_REASONS.items()}
_TIMES = tuple(field.name for field in dataclasses.fields(Timing))
_COUNTS = tuple(field.name for field in dataclasses.fields(Receipt) if field.name != "replays")
_SERVED = ("worker", "prefill_worker", "handed_over_bytes", "exposed_bytes", "transport", "failovers")


def started_message(event: Started) -> inference_pb2.Started:
    """The message of an event; see :func:`started_event`."""
    return inference_pb2.Started(
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        system_fingerprint=event.fingerprint,
        request_id=event.request_id,
        worker=event.worker,
    )


def started_event(message: inference_pb2.Started) -> Started:
    """The event of a message."""
    return Started(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        fingerprint=message.system_fingerprint,
        request_id=message.request_id,
        worker=message.worker,
    )


def delta_message(event: Delta, seq: int) -> inference_pb2.TokenDelta:
    """New tokens as the stream's message ``seq``."""
    return inference_pb2.TokenDelta(token_ids=event.tokens, seq=seq, **_logprob_lists(event.logprobs))


def delta_event(message: inference_pb2.TokenDelta) -> Delta:
    """The event of a message.

    Raises:
      ContractError: there are no tokens, or tokens and log-probabilities are not equally many.
    """
    tokens = tuple(message.token_ids)
    if not tokens:
        raise ContractError("delta has no tokens")
    return Delta(tokens, _logprobs(tokens, message) if message.logprobs else ())


def prompt_logprobs_message(event: PromptLogprobs, seq: int) -> inference_pb2.PromptLogprobs:
    """Log-probabilities of a prompt as the stream's message ``seq``."""
    return inference_pb2.PromptLogprobs(first_position=event.first_position, seq=seq, **_logprob_lists(event.logprobs))


def prompt_logprobs_event(message: inference_pb2.PromptLogprobs, prompt: Sequence[int]) -> PromptLogprobs:
    """The event of a message about this prompt.

    Raises:
      ContractError: the prompt has no such positions, or the lists differ in length.
    """
    first, count = message.first_position, len(message.logprobs)
    if not 1 <= first <= first + count <= len(prompt):
        raise ContractError(f"prompt_logprobs of {count} tokens from {first} on, of a prompt of {len(prompt)}")
    return PromptLogprobs(first, _logprobs(prompt[first : first + count], message))


def finished_message(event: Finished) -> inference_pb2.Finished:
    """The message of an event; see :func:`finished_event`."""
    message = inference_pb2.Finished(
        reason=FINISH_REASONS[event.reason],
        completion_tokens=event.completion_tokens,
        draft_tokens=event.draft_tokens,
        accepted_tokens=event.accepted_tokens,
        receipt=receipt_message(event.receipt),
    )
    if isinstance(event.matched, str):
        message.stop_string = event.matched
    elif event.matched is not None:
        message.stop_token_id = event.matched
    return message


def finished_event(message: inference_pb2.Finished) -> Finished:
    """The event of a message.

    Raises:
      ContractError: it has no reason, or one that is unknown here.
    """
    if message.reason not in _REASON_NAMES:
        raise ContractError(f"finished has reason {message.reason}")
    matched = message.WhichOneof("matched")
    return Finished(
        reason=_REASON_NAMES[message.reason],
        completion_tokens=message.completion_tokens,
        receipt=receipt_of(message.receipt),
        matched=None if matched is None else getattr(message, matched),
        draft_tokens=message.draft_tokens,
        accepted_tokens=message.accepted_tokens,
    )


def receipt_message(receipt: ServedReceipt) -> types_pb2.Receipt:
    """The message of a receipt; the engine's fields have the same names in it."""
    return types_pb2.Receipt(
        replays=receipt.engine.replays,
        timing=types_pb2.Timing(**{name: getattr(receipt.timing, name) for name in _TIMES}),
        **{name: getattr(receipt.engine, name) for name in _COUNTS},
        **{name: getattr(receipt, name) for name in _SERVED},
    )


def receipt_of(message: types_pb2.Receipt) -> ServedReceipt:
    """The receipt of a message."""
    times = {name: getattr(message.timing, name) for name in _TIMES if message.timing.HasField(name)}
    return ServedReceipt(
        engine=Receipt(replays=tuple(message.replays), **{name: getattr(message, name) for name in _COUNTS}),
        timing=Timing(**times),
        **{name: getattr(message, name) for name in _SERVED},
    )


def _logprob_lists(logprobs: Sequence[Logprob]) -> dict[str, Any]:
    """The fields ``logprobs`` and ``top``; the latter only where others than the tokens themselves are there."""
    lists: dict[str, Any] = {"logprobs": [entry.logprob for entry in logprobs]}
    if any(entry.top for entry in logprobs):
        lists["top"] = [
            types_pb2.TopLogprobs(
                token_ids=[token for token, _ in entry.top], logprobs=[logprob for _, logprob in entry.top]
            )
            for entry in logprobs
        ]
    return lists


def _logprobs(tokens: Sequence[int], message: Any) -> tuple[Logprob, ...]:
    values, tops = message.logprobs, message.top
    if len(values) != len(tokens) or len(tops) not in (0, len(tokens)):
        raise ContractError(f"{len(tokens)} tokens have {len(values)} logprobs and {len(tops)} top")
    if any(len(top.token_ids) != len(top.logprobs) for top in tops):
        raise ContractError("top has lists of different lengths")
    pairs = [tuple(zip(top.token_ids, top.logprobs, strict=True)) for top in tops] or [()] * len(tokens)
    return tuple(Logprob(*entry) for entry in zip(tokens, values, pairs, strict=True))
