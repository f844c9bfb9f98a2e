"""The client: answers of a server as Python values, every call with a deadline, every failure a typed error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc

from deepinfer_jax.errors import InputError
from deepinfer_jax.request import SamplingParams
from serving.answer_stream import AnswerReader
from serving.channels import RetryPolicy, open_channel
from serving.events import Answer, Collector, Event
from serving.generate_call import GenerateCall
from serving.proto.deepinfer.v1 import inference_pb2
from serving.proto.deepinfer.v1.inference_pb2_grpc import InferenceStub
from serving.request_messages import generate_message
from serving.status import error_from

DEFAULT_TIMEOUT = 60.0
"""Seconds that a call may take where nothing else is said."""


class Client:
    """Calls of one server, from any thread. Use as a context manager, or close it.

    Calls that end with UNAVAILABLE before anything came are repeated, see :class:`RetryPolicy`. All methods raise:

    - ``ServingError``, one of its classes by what happened, when the server refuses or fails;
    - ``ContractError`` when messages are lost or out of order;
    - ``InputError`` for values that cannot be sent.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        retries: RetryPolicy | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """Nothing is sent yet, and nobody need be there.

        Args:
          target: ``HOST:PORT``, ``unix:PATH`` or another name that gRPC resolves.
          timeout: seconds that a call may take, unless it says otherwise.
          retries: how calls are repeated; None takes the defaults.
          credentials: for TLS; None is plain text.
        """
        self._timeout = check_timeout(timeout)
        self._channel = open_channel(target, retries or RetryPolicy(), credentials)
        self._stub = InferenceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs and end the connection."""
        self._channel.close()

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **more: Any,
    ) -> Iterator[Event]:
        """The events of an answer as they come. Nothing is sent before the first is asked for.

        Closing the iterator, as leaving a loop over it does in time and ``contextlib.closing`` at once, cancels the
        request.

        Args:
          prompt: token ids.
          params: sampling parameters; for several branches, make a call for each one, with ``branch``.
          timeout: seconds for all of it; None takes the client's.
          more: further fields of :class:`GenerateCall`, such as ``request_id``, ``branch``, ``salt`` or ``priority``.
        """
        call = GenerateCall(tuple(prompt), params or SamplingParams(), **more)
        return self._events(call, generate_message(call), self._seconds(timeout))

    def complete(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **more: Any,
    ) -> Answer:
        """The whole answer; arguments as in :meth:`generate`."""
        collector = Collector()
        for event in self.generate(prompt, params, timeout=timeout, **more):
            collector.add(event)
        return collector.answer()

    def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """End a request, whoever reads its stream. Returns whether it ran."""
        request = inference_pb2.AbortRequest(request_id=request_id)
        return self._call(self._stub.Abort, request, timeout).found

    def model_info(self, *, timeout: float | None = None) -> inference_pb2.ModelInfo:
        """What the server serves."""
        return self._call(self._stub.GetModelInfo, inference_pb2.GetModelInfoRequest(), timeout)

    def load(self, *, timeout: float | None = None) -> inference_pb2.Load:
        """How busy the server is."""
        return self._call(self._stub.GetLoad, inference_pb2.GetLoadRequest(), timeout)

    def _events(self, call: GenerateCall, message: inference_pb2.GenerateRequest, timeout: float) -> Iterator[Event]:
        reader = AnswerReader(call.prompt)
        stream = self._stub.Generate(message, timeout=timeout, metadata=call.metadata)
        try:
            for response in stream:
                yield reader.event(response)
            reader.end()
        except grpc.RpcError as error:
            raise error_from(error) from error
        finally:
            stream.cancel()

    def _call(self, method: Callable[..., Any], request: Any, timeout: float | None) -> Any:
        try:
            return method(request, timeout=self._seconds(timeout))
        except grpc.RpcError as error:
            raise error_from(error) from error

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else check_timeout(timeout)


def check_timeout(timeout: float) -> float:
    """``timeout`` itself.

    Raises:
      InputError: it is not a number of seconds above 0.
    """
    if not 0 < timeout < math.inf:
        raise InputError("timeout", timeout, "seconds above 0")
    return timeout
