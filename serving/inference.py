"""The service of tokens over one engine of this process."""

from __future__ import annotations

import asyncio
import dataclasses

from deepinfer_jax.async_engine import AsyncEngine, EngineClosedError
from serving.answer_events import AnswerEvents
from serving.answer_stream import AnswerWriter
from serving.errors import ServingError, bad_field, refusal
from serving.generate_call import GenerateCall
from serving.news_box import DEFAULT_UNREAD_TOKENS, NewsBox
from serving.proto.deepinfer.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from serving.request_messages import RequestLimits, parse_generate
from serving.served_call import ServedCall
from serving.server import Service

NAME = "deepinfer.v1.Inference"


@dataclasses.dataclass
class _Running:
    """A request of this server: its number in the engine once it is queued there, and whether it was aborted."""

    number: int | None = None
    aborted: bool = False


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """``deepinfer.v1.Inference`` without hand-over: prompts are computed where their answers are.

    Handlers run behind a ``CallGuard``.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        info: inference_pb2.ModelInfo,
        *,
        unread_tokens: int = DEFAULT_UNREAD_TOKENS,
    ) -> None:
        """Serve an engine, which is closed by whoever made it.

        Args:
          engine: computes.
          info: what is served, as :func:`serving.model_info.model_info` describes it.
          unread_tokens: tokens that may wait for a reader before its request ends.
        """
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
        running = self._running.get(request.request_id)
        if running is not None:
            running.aborted = True
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
        return inference_pb2.Load(
            shards=shards,
            queued_requests=load.waiting_requests,
            queued_tokens=load.waiting_tokens,
            draining=call.draining,
        )

    def _check_served(self, asked: GenerateCall) -> None:
        """Refuse what the protocol has and this service has not."""
        if asked.kv is not None:
            raise bad_field("kv", "present", "absent, as this server computes prompts itself", "NOT_SUPPORTED")
        if not asked.write_cache:
            raise bad_field("cache.write", False, "true, as this server keeps all blocks", "NOT_SUPPORTED")
        if asked.replay == "exact" and self._info.replay_mode == types_pb2.REPLAY_MODE_BOUNDED:
            raise bad_field("cache.replay_mode", "exact", "bounded, this server's mode", "NOT_SUPPORTED")

    async def _answer(self, asked: GenerateCall, request_id: str, running: _Running, call: ServedCall) -> None:
        def submitted_as(number: int) -> None:
            running.number = number
            if running.aborted:
                self._engine.abort(number)

        box, writer = NewsBox(self._unread), AnswerWriter()
        answer = AnswerEvents(len(asked.prompt), request_id, self._info.worker, answered=len(asked.answer))
        news = self._engine.stream(asked.engine_request(call.remaining), submitted_as)
        # It fills the box whether the reader reads or not, so that waiting for one never delays the engine's news.
        filling = asyncio.create_task(box.fill(news))
        try:
            while not answer.ended:
                for event in answer.events(await box.take()):
                    for message in writer.messages(event):
                        await call.write(message)
        except EngineClosedError as error:
            raise _stopped() from error
        finally:
            # Leaving the engine's stream early aborts the request there.
            filling.cancel()
            await asyncio.wait((filling,))


def _stopped() -> ServingError:
    return refusal("ENGINE_STOPPED", "the engine of this server has ended")
