"""Errors of calls, on both ends: what a server refuses a call with, and what a client raises for it.

A reason is a name of the protocol's ``ErrorReason``, which says what each one means; its status code is here. Servers
raise what :func:`refusal` gives, and clients meet an error of the same class with the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import grpc

CODES: Mapping[str, grpc.StatusCode] = MappingProxyType(
    {
        "INVALID_FIELD": grpc.StatusCode.INVALID_ARGUMENT,
        "BAD_TOKEN_ID": grpc.StatusCode.INVALID_ARGUMENT,
        "CONTEXT_TOO_LONG": grpc.StatusCode.INVALID_ARGUMENT,
        "CONSTRAINT_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
        "DEADLINE_MISSING": grpc.StatusCode.INVALID_ARGUMENT,
        "NOT_SUPPORTED": grpc.StatusCode.INVALID_ARGUMENT,
        "REQUEST_ID_IN_USE": grpc.StatusCode.ALREADY_EXISTS,
        "QUEUE_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "KV_POOL_EXHAUSTED": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "READER_TOO_SLOW": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "DRAINING": grpc.StatusCode.UNAVAILABLE,
        "NO_WORKER": grpc.StatusCode.UNAVAILABLE,
        "ENGINE_STOPPED": grpc.StatusCode.UNAVAILABLE,
        "KV_EXPIRED": grpc.StatusCode.FAILED_PRECONDITION,
        "KV_LAYOUT_MISMATCH": grpc.StatusCode.FAILED_PRECONDITION,
        "KV_DAMAGED": grpc.StatusCode.DATA_LOSS,
        "DEADLINE_PASSED": grpc.StatusCode.DEADLINE_EXCEEDED,
        "CALL_CANCELLED": grpc.StatusCode.CANCELLED,
        "ENGINE_FAULT": grpc.StatusCode.INTERNAL,
    }
)
"""Status codes by reason."""

RETRY_SECONDS: Mapping[str, float] = MappingProxyType(
    {"QUEUE_FULL": 1.0, "KV_POOL_EXHAUSTED": 1.0, "DRAINING": 1.0, "NO_WORKER": 1.0}
)
"""Least delay before the same call may be repeated, by reason; the other reasons say that repeating it is no use."""


class ServingError(Exception):
    """A call that failed; base of every error that servers refuse with and clients raise.

    Attributes:
        code: gRPC status code.
        message: a sentence for people.
        reason: a name of ``ErrorReason``; empty where no server of ours said anything, as when none was reached.
        metadata: ``field``, ``value``, ``accepted``, ``request_id``, ``worker``, as far as they are known.
        retry_after: seconds after which the same call may be repeated; None where that is no use.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(code, message, reason, dict(metadata or {}), retry_after)
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata: Mapping[str, str] = dict(metadata or {})
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.reason or self.code.name}: {self.message}"


class InvalidRequestError(ServingError):
    """The request itself is wrong; it fails everywhere."""


class OverloadedError(ServingError):
    """The server has too much to do."""


class UnavailableError(ServingError):
    """No server was reached, or it takes nothing new."""


class StateError(ServingError):
    """State that another worker computed cannot be had, does not fit, or arrived damaged."""


class DeadlineError(ServingError):
    """The deadline passed."""


class CallCancelledError(ServingError):
    """The call was cancelled."""


class ServerFaultError(ServingError):
    """Something failed in the server; also every status that nothing of ours ends with."""


class ContractError(ServingError):
    """A server broke the contract of its stream: messages are missing, doubled or out of order."""

    def __init__(self, message: str) -> None:
        super().__init__(grpc.StatusCode.INTERNAL, message)

    def __reduce__(self) -> tuple[type[ContractError], tuple[str]]:
        return type(self), (self.message,)


_CLASSES: Mapping[grpc.StatusCode, type[ServingError]] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
        grpc.StatusCode.ALREADY_EXISTS: InvalidRequestError,
        grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
        grpc.StatusCode.UNAVAILABLE: UnavailableError,
        grpc.StatusCode.FAILED_PRECONDITION: StateError,
        grpc.StatusCode.DATA_LOSS: StateError,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
        grpc.StatusCode.CANCELLED: CallCancelledError,
    }
)


def error_of(
    code: grpc.StatusCode,
    message: str,
    reason: str = "",
    metadata: Mapping[str, str] | None = None,
    retry_after: float | None = None,
) -> ServingError:
    """An error of the class that belongs to a status code."""
    return _CLASSES.get(code, ServerFaultError)(code, message, reason, metadata, retry_after)


def refusal(reason: str, message: str, **metadata: str) -> ServingError:
    """The error with which a server refuses a call, ready to be raised.

    Args:
      reason: a key of :data:`CODES`.
      message: a sentence for people, without anything of the prompt.
      metadata: see :class:`ServingError`.
    """
    return error_of(CODES[reason], message, reason, metadata, RETRY_SECONDS.get(reason))


# Of what gRPC alone has reported. Nobody has cancelled the client's own call.
_UNEXPLAINED: Mapping[grpc.StatusCode, tuple[str, str]] = MappingProxyType(
    {
        grpc.StatusCode.DEADLINE_EXCEEDED: ("DEADLINE_PASSED", "the deadline passed before the answer was complete"),
        grpc.StatusCode.UNAVAILABLE: ("NO_WORKER", "the worker was lost"),
        grpc.StatusCode.CANCELLED: ("NO_WORKER", "the worker was lost"),
    }
)


def explained(error: ServingError) -> ServingError:
    """What the client of a gateway is told of a worker's failure: that failure, or a refusal where it has no reason."""
    if error.reason:
        return error
    reason, sentence = _UNEXPLAINED.get(error.code, ("ENGINE_FAULT", "a worker failed"))
    return refusal(reason, f"{sentence}: {error.message}")


def bad_field(field: str, value: object, accepted: str, reason: str = "INVALID_FIELD") -> ServingError:
    """The refusal of one field's value.

    Args:
      field: as spelled in the message, with the path to it.
      value: what was there; long ones are cut.
      accepted: a phrase that completes "accepted: ...".
      reason: a key of :data:`CODES`.
    """
    shown = repr(value)
    if len(shown) > _VALUE_CHARACTERS:
        shown = f"{shown[:_VALUE_CHARACTERS]}..."
    return refusal(reason, f"{field} is {shown}; accepted: {accepted}", field=field, value=shown, accepted=accepted)


# Details travel in a trailer, and gRPC takes 8 KiB of those.
_VALUE_CHARACTERS = 120
