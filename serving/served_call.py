"""One call on its server: what its handler knows of it besides the request."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Mapping
from typing import Any

import grpc

from serving.errors import refusal

REQUEST_ID = "x-request-id"
TRACEPARENT = "traceparent"

# What other systems put there may be anything; it goes into logs and trailers.
_FIT_ID = re.compile(r"[!-~]{1,128}")
_FIT_TRACE = re.compile(r"[!-~]{1,256}")


@dataclasses.dataclass(frozen=True)
class ServedCall:
    """A call whose deadline and metadata were looked at.

    Attributes:
        context: gRPC's own, which is no ``grpc.aio.ServicerContext`` but has its methods.
        method: full name, ``/deepinfer.v1.Inference/Generate``.
        request_id: the caller's, from the metadata or else the request; or one that was drawn here.
        traceparent: W3C trace context, likewise; empty where none came.
        draining: whether the server takes no new work.
    """

    context: Any
    method: str
    request_id: str
    traceparent: str = ""
    draining: bool = False

    @classmethod
    def of(cls, context: Any, method: str, message: Any = None, *, draining: bool = False) -> ServedCall:
        """The call of a context; ``message``: the request, None where it cannot be decoded."""
        metadata: Mapping[str, Any] = dict(context.invocation_metadata() or ())
        inner = getattr(message, "request", message)
        ids = (metadata.get(REQUEST_ID, ""), getattr(inner, "request_id", ""), secrets.token_hex(16))
        traces = (metadata.get(TRACEPARENT, ""), getattr(inner, "traceparent", ""))
        request_id, traceparent = next(filter(_FIT_ID.fullmatch, ids)), next(filter(_FIT_TRACE.fullmatch, traces), "")
        return cls(context, method, request_id, traceparent, draining)

    @property
    def remaining(self) -> float:
        """Seconds until its deadline.

        Raises:
          InvalidRequestError: it has none.
          DeadlineError: it has passed.
        """
        seconds = self.context.time_remaining()
        if seconds is None:
            raise refusal("DEADLINE_MISSING", "the call has no deadline; set one", field="deadline")
        if seconds <= 0:
            raise refusal("DEADLINE_PASSED", "the deadline passed before the call began")
        return seconds

    async def write(self, message: Any) -> None:
        """Send the next message of a stream; waits while the caller does not read.

        Raises:
          DeadlineError, CallCancelledError: the call ended while the message waited.
        """
        try:
            await self.context.write(message)
        except grpc.aio.InternalError as error:
            reason = "CALL_CANCELLED" if (self.context.time_remaining() or 0) > 0 else "DEADLINE_PASSED"
            raise refusal(reason, "the call ended while a message waited for its reader") from error
