"""What every call of the protocol goes through on its server, before and after its handler.

Requests are decoded, deadlines demanded and exceptions turned into statuses here, calls counted and logged, new work
refused while the server is draining, and what runs refused at its end. A cancelled call stays cancelled: its exception
is never swallowed, since gRPC would leak what belongs to the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from serving.errors import ServingError, bad_field, error_of, refusal
from serving.refusals import refusal_of
from serving.served_call import REQUEST_ID, ServedCall
from serving.status import trailers_of

_log = logging.getLogger("serving.calls")
_PROTOCOL = "/deepinfer.v1."
_QUESTIONS = frozenset({"GetLoad", "GetModelInfo"})

Behaviour = Callable[[Any, ServedCall], Any]


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Wraps the handlers of the protocol; health and reflection pass untouched.

    A handler is called with the request and a :class:`ServedCall`. It returns the response of a unary call; of a stream
    it writes the messages to the call. It raises ``ServingError`` or what :func:`refusal_of` knows.
    """

    def __init__(self, worker: str = "", refused_while_draining: frozenset[str] = frozenset()) -> None:
        """Must be called in the event loop that will run the server.

        Args:
          worker: name of the server, for details of errors.
          refused_while_draining: full names of the methods that begin new work.
        """
        self._worker, self._refused = worker, refused_while_draining
        self._draining = False
        self._running = 0
        self._limits: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        """Whether new work is refused."""
        return self._draining

    @property
    def running(self) -> int:
        """Calls whose handlers run."""
        return self._running

    def drain(self) -> None:
        """Refuse new work from now on; what runs goes on."""
        self._draining = True

    def end(self) -> None:
        """Refuse what runs too, wherever it is."""
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)

    async def idle(self) -> None:
        """Wait until no handler runs."""
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Called by gRPC for every call; see :class:`grpc.aio.ServerInterceptor`."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or not method.startswith(_PROTOCOL):
            return handler
        if handler.request_streaming:
            raise NotImplementedError(f"{method} takes a stream of requests")
        decode, encode = handler.request_deserializer, handler.response_serializer
        # Requests are left as bytes until the guard decodes them: gRPC would fail on bad ones without a status of ours.
        if handler.response_streaming:
            stream = self._guarded(handler.unary_stream, method, decode)
            return grpc.unary_stream_rpc_method_handler(stream, None, encode)
        return grpc.unary_unary_rpc_method_handler(self._guarded(handler.unary_unary, method, decode), None, encode)

    def _guarded(self, behaviour: Behaviour, method: str, decode: Callable[[bytes], Any]) -> Any:
        async def guarded(content: bytes, context: Any) -> Any:
            message = _decoded(decode, content)
            call = ServedCall.of(context, method, message, draining=self._draining)
            context.set_trailing_metadata(((REQUEST_ID, call.request_id),))
            begin, error = time.monotonic(), None
            with self._counted():
                try:
                    self._admit(call)
                    if message is None:
                        accepted = "a message of the protocol"
                        raise bad_field("request", f"{len(content)} bytes that cannot be decoded", accepted)
                    return await self._until_the_end(behaviour(message, call))
                except asyncio.CancelledError:
                    error = refusal("CALL_CANCELLED", "the call was cancelled")
                    raise
                except Exception as raised:
                    error = self._named(refusal_of(raised), call)
                    if error.reason == "ENGINE_FAULT":
                        _log.exception("call failed", extra={"request_id": call.request_id, "method": method})
                    trailers = ((REQUEST_ID, call.request_id), *trailers_of(error))
                    await context.abort(error.code, error.message, trailers)
                finally:
                    _report(call, error, time.monotonic() - begin)

        return guarded

    async def _until_the_end(self, answer: Awaitable[Any]) -> Any:
        """Wait for an answer, which :meth:`end` cancels."""
        try:
            # Tells its own end from the caller's cancellation, which passes.
            async with asyncio.timeout(None) as limit:
                self._limits.add(limit)
                return await answer
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise _shutting_down() from error
        finally:
            self._limits.discard(limit)

    def _admit(self, call: ServedCall) -> None:
        if self._draining and call.method in self._refused:
            raise _shutting_down()
        # Demands that there is a deadline.
        _ = call.remaining

    def _named(self, error: ServingError, call: ServedCall) -> ServingError:
        known = {"request_id": call.request_id} | ({"worker": self._worker} if self._worker else {})
        return error_of(error.code, error.message, error.reason, known | dict(error.metadata), error.retry_after)

    @contextlib.contextmanager
    def _counted(self) -> Any:
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()


def _shutting_down() -> ServingError:
    return refusal("DRAINING", "the server is shutting down")


def _decoded(decode: Callable[[bytes], Any], content: bytes) -> Any:
    """The request; None where it is none."""
    try:
        return decode(content)
    except DecodeError:
        return None


def _report(call: ServedCall, error: ServingError | None, seconds: float) -> None:
    code = "OK" if error is None else error.code.name
    fields = {"method": call.method, "request_id": call.request_id, "code": code, "seconds": seconds}
    if call.traceparent:
        fields["traceparent"] = call.traceparent
    # Gateways ask for these all the time.
    level = logging.DEBUG if error is None and call.method.rpartition("/")[2] in _QUESTIONS else logging.INFO
    _log.log(level, "call", extra=fields | {"reason": "" if error is None else error.reason})
