"""Errors as gRPC carries them: a status code and sentence, and ``google.rpc.Status`` with the details in a trailer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from serving.errors import ServingError, error_of

DOMAIN = "deepinfer"
DETAILS_KEY = "grpc-status-details-bin"
# Read by gRPC's own retries, in milliseconds.
PUSHBACK_KEY = "grpc-retry-pushback-ms"

Metadata = tuple[tuple[str, str | bytes], ...]


def trailers_of(error: ServingError) -> Metadata:
    """The trailers that carry an error's details; the call is then ended with its code and message."""
    status = Status(code=error.code.value[0], message=error.message)
    if error.reason:
        status.details.add().Pack(ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))
    trailers: Metadata = ()
    if error.retry_after is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after * 1e9))
        status.details.add().Pack(RetryInfo(retry_delay=delay))
        trailers = ((PUSHBACK_KEY, str(round(error.retry_after * 1000))),)
    return (*trailers, (DETAILS_KEY, status.SerializeToString()))


def error_from(call: grpc.RpcError) -> ServingError:
    """The typed error of a call that failed, of either of gRPC's two Python interfaces."""
    reason, metadata, retry_after = "", dict[str, str](), None
    # Another server's details may be anything.
    with contextlib.suppress(DecodeError):
        for detail in _details(call.trailing_metadata() or ()):
            info, retry = ErrorInfo(), RetryInfo()
            if detail.Unpack(info) and info.domain == DOMAIN:
                reason, metadata = info.reason, dict(info.metadata)
            elif detail.Unpack(retry):
                retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    return error_of(call.code(), call.details() or call.code().name, reason, metadata, retry_after)


def _details(trailers: Iterable[tuple[str, str | bytes]]) -> list[Any]:
    found = [value for key, value in trailers if key == DETAILS_KEY and isinstance(value, bytes)]
    return list(Status.FromString(found[0]).details) if found else []
