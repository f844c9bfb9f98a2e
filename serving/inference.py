"""The service of tokens over one engine of this process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from deepinfer_jax.async_engine import AsyncEngine, EngineClosedError
from deepinfer_jax.request import Output, Receipt
from serving.acceptance import check_acceptable
from serving.answer_events import AnswerEvents
from serving.answer_stream import AnswerWriter
from serving.arrivals import Arrivals, Arrived
from serving.errors import ServingError, bad_field, refusal
from serving.events import Event, Finished
from serving.generate_call import GenerateCall
from serving.leases import Leases
from serving.news_box import DEFAULT_UNREAD_TOKENS, NewsBox
from serving.proto.deepinfer.v1 import inference_pb2, inference_pb2_grpc
from serving.request_messages import RequestLimits, check_id, parse_generate
from serving.served_call import ServedCall
from serving.server import Service

NAME = "deepinfer.v1.Inference"


@dataclasses.dataclass
class _Running:
    """A request of this server: whether it was aborted, and where it is.

    ``fetching`` is there while its state is fetched; ``number`` is its own in the engine, once it is queued there.
    """

    aborted: bool = False
    fetching: asyncio.Timeout | None = None
    number: int | None = None


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """``deepinfer.v1.Inference``: computes prompts, or goes on behind state that others computed.

    Handlers run behind a ``CallGuard``.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        info: inference_pb2.ModelInfo,
        *,
        unread_tokens: int = DEFAULT_UNREAD_TOKENS,
        arrivals: Arrivals | None = None,
        held: Leases[Any] | None = None,
    ) -> None:
        """Serve an engine, which is closed by whoever made it.

        Args:
          engine: computes.
          info: what is served, as :func:`serving.model_info.model_info` describes it.
          unread_tokens: tokens that may wait for a reader before its request ends.
          arrivals: brings states; None serves no ``KvHandle``.
          held: states that wait for others, which count as load.
        """
        self._arrivals, self._held = arrivals, held
        self._engine, self._info, self._unread = engine, info, unread_tokens
        self._limits = RequestLimits(info.vocabulary, info.max_context)
        self._running: dict[str, _Running] = {}

    def service(self) -> Service:
        """As a part of a server."""
        return Service(NAME, self, inference_pb2_grpc.add_InferenceServicer_to_server, ("Generate",))

    async def Generate(self, request: inference_pb2.GenerateRequest, call: ServedCall) -> None:
        """See the protocol."""
        asked = parse_generate(request, self._limits)
        self._check_served(asked)
        request_id = asked.request_id or call.request_id
        if request_id in self._running:
            accepted = "an id that no running request has"
            raise bad_field("request_id", request_id, accepted, "REQUEST_ID_IN_USE")
        running = self._running[request_id] = _Running()
        try:
            await self._answer(asked, request_id, running, call)
        finally:
            del self._running[request_id]

    async def Abort(self, request: inference_pb2.AbortRequest, call: ServedCall) -> inference_pb2.AbortResponse:
        """See the protocol."""
        check_id("request_id", request.request_id)
        running = self._running.get(request.request_id)
        if running is not None:
            running.aborted = True
            if running.fetching is not None:
                running.fetching.reschedule(0.0)
            if running.number is not None:
                self._engine.abort(running.number)
        return inference_pb2.AbortResponse(found=running is not None)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, call: ServedCall
    ) -> inference_pb2.ModelInfo:
        """See the protocol."""
        return self._info

    async def GetLoad(self, request: inference_pb2.GetLoadRequest, call: ServedCall) -> inference_pb2.Load:
        """See the protocol."""
        try:
            load = await self._engine.call(lambda engine: engine.load())
        except EngineClosedError as error:
            raise _stopped() from error
        shards = [
            inference_pb2.ShardLoad(
                shard=number,
                running_requests=shard.running_requests,
                slots=shard.slots,
                cache_tokens=shard.cache_tokens,
                prefill_tokens=shard.prefill_tokens,
                used_pages=shard.used_blocks,
                pages=shard.blocks,
            )
            for number, shard in enumerate(load.shards)
        ]
        # States on the host belong to no shard.
        if self._held is not None:
            shards[0].held_requests, shards[0].held_tokens = len(self._held), self._held.tokens
        if self._arrivals is not None:
            shards[0].read_backlog_bytes = self._arrivals.backlog
        return inference_pb2.Load(
            shards=shards,
            queued_requests=load.waiting_requests,
            queued_tokens=load.waiting_tokens,
            draining=call.draining,
        )

    def _check_served(self, asked: GenerateCall) -> None:
        """Refuse what the protocol has and this service has not."""
        check_acceptable(asked, self._info)
        if asked.kv is not None and self._arrivals is None:
            raise bad_field("kv", "present", "absent, as this server computes prompts itself", "NOT_SUPPORTED")

    async def _answer(self, asked: GenerateCall, request_id: str, running: _Running, call: ServedCall) -> None:
        writer = AnswerWriter()
        async with contextlib.AsyncExitStack() as stack:
            arrived, answered = None, len(asked.answer)
            if asked.kv is not None:
                arrived = await self._receive(asked, running, call, stack)
                answered = 0 if arrived is None else len(arrived.answer)
            answer = AnswerEvents(len(asked.prompt), request_id, self._info.worker, answered=answered)
            if asked.kv is not None and arrived is None:
                for event in answer.events([self._given_up(asked)]):
                    for message in writer.messages(event):
                        await call.write(message)
                return
            box = NewsBox(self._unread)
            # It fills the box whether the reader reads or not, so that waiting for one never delays the engine's news.
            filling = asyncio.create_task(box.fill(self._news(asked, arrived, running, call)))
            try:
                while not answer.ended:
                    news = await box.take()
                    if arrived is not None:
                        arrived.inserted()
                    for event in answer.events(news):
                        for message in writer.messages(_signed(event, arrived)):
                            await call.write(message)
            except EngineClosedError as error:
                raise _stopped() from error
            finally:
                # Leaving the engine's stream early aborts the request there.
                filling.cancel()
                await asyncio.wait((filling,))

    async def _receive(
        self, asked: GenerateCall, running: _Running, call: ServedCall, stack: contextlib.AsyncExitStack
    ) -> Arrived | None:
        """The state of a request, in a context that the stack leaves; None where the request was aborted meanwhile."""
        assert self._arrivals is not None
        try:
            async with asyncio.timeout(None) as running.fetching:
                return await stack.enter_async_context(self._arrivals.receive(asked, call.remaining))
        except TimeoutError:
            return None
        finally:
            running.fetching = None

    def _news(
        self, asked: GenerateCall, arrived: Arrived | None, running: _Running, call: ServedCall
    ) -> AsyncGenerator[Output, None]:
        def submitted_as(number: int) -> None:
            running.number = number
            if running.aborted:
                self._engine.abort(number)

        request = asked.engine_request(call.remaining)
        if arrived is None:
            return self._engine.stream(request, submitted_as)
        request = dataclasses.replace(request, answer=arrived.answer)
        return self._engine.stream(request, submitted_as, arrival=arrived.arrival)

    def _given_up(self, asked: GenerateCall) -> Output:
        """The news of a request that never reached the engine."""
        receipt = Receipt(asked.params.seed or 0, 0, 0, 0, (), 0, 0, 0, self._info.fingerprint)
        return Output(0, 0, finish_reason="abort", receipt=receipt)


def _signed(event: Event, arrived: Arrived | None) -> Event:
    if arrived is None or not isinstance(event, Finished):
        return event
    return dataclasses.replace(event, receipt=arrived.sign(event.receipt))


def _stopped() -> ServingError:
    return refusal("ENGINE_STOPPED", "the engine of this server has ended")
