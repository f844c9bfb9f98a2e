"""A request on a worker that answers, as its gateway sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc

from serving.answer_stream import AnswerReader
from serving.errors import ServingError, refusal
from serving.events import Event, Started
from serving.generate_call import GenerateCall
from serving.proto.deepinfer.v1 import inference_pb2
from serving.request_messages import generate_message
from serving.status import Metadata, error_from
from serving.workers import Place


class DecodeRun:
    """One call of ``Inference.Generate``, sent when this is made. End it by :meth:`close`.

    Attributes:
        place: where it runs.
        error: how it failed; None while that is not known.
    """

    def __init__(
        self, place: Place, call: GenerateCall, timeout: float, metadata: Metadata, changed: Callable[[], None]
    ) -> None:
        """Send the call.

        Args:
          place: the worker; left at the end.
          call: what it is asked for.
          timeout: seconds until its deadline.
          metadata: of the call.
          changed: called once the first message has come, or the call has failed.
        """
        self.place, self._request_id, self._metadata = place, call.request_id, metadata
        self.error: ServingError | None = None
        self._reader = AnswerReader(call.prompt)
        self._stream = place.worker.inference.Generate(generate_message(call), timeout=timeout, metadata=metadata)
        self._beginning = asyncio.create_task(self._begin(changed))

    async def started(self) -> Started:
        """The first event.

        Raises:
          ServingError: the call failed.
        """
        event = await self._beginning
        if self.error is not None:
            raise self.error
        assert isinstance(event, Started)
        return event

    async def event(self) -> Event:
        """The next event behind :meth:`started`; none is behind ``Finished``.

        Raises:
          ServingError: the call failed, or its messages do not follow the protocol.
        """
        try:
            return await self._next()
        except ServingError as error:
            self.error = error
            raise

    async def end(self, seconds: float) -> None:
        """Let the call end by itself behind ``Finished``; whether it does so well matters to nobody any more."""
        with contextlib.suppress(ServingError, TimeoutError):
            async with asyncio.timeout(seconds):
                await self._message()

    async def abort(self, seconds: float) -> None:
        """Ask the worker to end it: ``Finished`` comes then, with the receipt. A worker that is gone fails the call."""
        request = inference_pb2.AbortRequest(request_id=self._request_id)
        try:
            await self.place.worker.inference.Abort(request, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError:
            self._stream.cancel()

    def close(self) -> None:
        """End it, wherever it is."""
        self._stream.cancel()
        self._beginning.cancel()
        self.place.leave()

    async def _begin(self, changed: Callable[[], None]) -> Event | None:
        try:
            return await self.event()
        except ServingError:
            return None
        finally:
            changed()

    async def _next(self) -> Event:
        message = await self._message()
        if message is grpc.aio.EOF:
            self._reader.end()
        return self._reader.event(message)

    async def _message(self) -> Any:
        try:
            return await self._stream.read()
        except grpc.RpcError as error:
            raise error_from(error) from error
        except asyncio.CancelledError as error:
            # gRPC raises it for a call that was cancelled here, though nobody cancels this task.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise refusal("CALL_CANCELLED", "the call of a worker was given up") from error
