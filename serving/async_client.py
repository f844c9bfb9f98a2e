"""The client for asyncio; see :mod:`serving.client`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any

import grpc

from deepinfer_jax.request import SamplingParams
from serving.answer_stream import AnswerReader
from serving.channels import RetryPolicy, open_async_channel
from serving.client import DEFAULT_TIMEOUT, check_timeout
from serving.events import Answer, Collector, Event
from serving.generate_call import GenerateCall
from serving.proto.deepinfer.v1 import inference_pb2
from serving.proto.deepinfer.v1.inference_pb2_grpc import InferenceStub
from serving.request_messages import generate_message
from serving.status import error_from


class AsyncClient:
    """Calls of one server, in one event loop. Use as an asynchronous context manager, or close it.

    Retries and errors are those of :class:`serving.client.Client`. Cancelling a task that waits cancels its call.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        retries: RetryPolicy | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """Arguments are those of :class:`serving.client.Client`."""
        self._timeout = check_timeout(timeout)
        self._channel = open_async_channel(target, retries or RetryPolicy(), credentials)
        self._stub = InferenceStub(self._channel)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs and end the connection."""
        await self._channel.close()

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **more: Any,
    ) -> AsyncIterator[Event]:
        """The events of an answer as they come; see :meth:`serving.client.Client.generate`.

        Leave it by ``contextlib.aclosing`` where a loop over it may end early.
        """
        call = GenerateCall(tuple(prompt), params or SamplingParams(), **more)
        return self._events(call, generate_message(call), self._seconds(timeout))

    async def complete(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **more: Any,
    ) -> Answer:
        """The whole answer; arguments as in :meth:`generate`."""
        collector = Collector()
        async for event in self.generate(prompt, params, timeout=timeout, **more):
            collector.add(event)
        return collector.answer()

    async def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """End a request, whoever reads its stream. Returns whether it ran."""
        request = inference_pb2.AbortRequest(request_id=request_id)
        return (await self._call(self._stub.Abort, request, timeout)).found

    async def model_info(self, *, timeout: float | None = None) -> inference_pb2.ModelInfo:
        """What the server serves."""
        return await self._call(self._stub.GetModelInfo, inference_pb2.GetModelInfoRequest(), timeout)

    async def load(self, *, timeout: float | None = None) -> inference_pb2.Load:
        """How busy the server is."""
        return await self._call(self._stub.GetLoad, inference_pb2.GetLoadRequest(), timeout)

    async def _events(
        self, call: GenerateCall, message: inference_pb2.GenerateRequest, timeout: float
    ) -> AsyncIterator[Event]:
        reader = AnswerReader(call.prompt)
        stream = self._stub.Generate(message, timeout=timeout, metadata=call.metadata)
        try:
            async for response in stream:
                yield reader.event(response)
            reader.end()
        except grpc.RpcError as error:
            raise error_from(error) from error
        finally:
            stream.cancel()

    async def _call(self, method: Callable[..., Any], request: Any, timeout: float | None) -> Any:
        try:
            return await method(request, timeout=self._seconds(timeout))
        except grpc.RpcError as error:
            raise error_from(error) from error

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else check_timeout(timeout)
