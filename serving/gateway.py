"""The gateway's service of tokens: admits requests, and has workers answer them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import secrets
from collections.abc import Coroutine, Iterator
from typing import Any

from deepinfer_jax.text.tokenizer import Tokenizer
from serving.acceptance import check_acceptable
from serving.answer_stream import AnswerWriter
from serving.configuration import GatewaySection
from serving.entrance import Entrance
from serving.errors import ServingError, bad_field, refusal
from serving.events import Event, Finished
from serving.gateway_metrics import GatewayMetrics
from serving.generate_call import GenerateCall
from serving.proto.deepinfer.v1 import inference_pb2, inference_pb2_grpc
from serving.request_messages import RequestLimits, check_id, parse_generate
from serving.routed_answer import Envelope, Route, RoutedAnswer
from serving.served_call import REQUEST_ID, TRACEPARENT, ServedCall
from serving.server import Service
from serving.stop_strings import StopStrings
from serving.transcript import Transcript
from serving.workers import Workers

NAME = "deepinfer.v1.Inference"
_log = logging.getLogger("serving.gateway")

_SEED_BITS = 63


class GatewayService(inference_pb2_grpc.InferenceServicer):
    """``deepinfer.v1.Inference`` over workers. It knows nothing of users, and keeps nothing behind a request's end.

    Handlers run behind a ``CallGuard``.
    """

    def __init__(
        self,
        workers: Workers,
        settings: GatewaySection,
        *,
        name: str = "",
        role: str = "gateway",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Serve workers, which are started and closed by whoever made them.

        Args:
          workers: to choose from.
          settings: of the gateway.
          name: of this process.
          role: gateway, or all where the workers belong to the same process.
          tokenizer: for stop strings; None leaves them to the workers.
        """
        self.metrics = GatewayMetrics()
        self._workers, self._settings = workers, settings
        self._name, self._role, self._tokenizer = name, role, tokenizer
        self._entrance = Entrance(settings.max_requests, settings.max_prompt_tokens)
        self._running: dict[str, RoutedAnswer] = {}
        self._later: set[asyncio.Task[None]] = set()
        self._route = Route(workers, settings, self.metrics, self._run_later)
        self.metrics.open.set_function(lambda: self._entrance.requests)
        self.metrics.waiting_tokens.set_function(lambda: self._entrance.prompt_tokens)
        self.metrics.placed.set_function(lambda: sum(worker.account.open_requests for worker in self._workers))
        for one in ("all", "prefill", "decode"):
            self.metrics.workers.labels(one).set_function(functools.partial(self._count, one))

    def service(self) -> Service:
        """As a part of a server."""
        return Service(NAME, self, inference_pb2_grpc.add_InferenceServicer_to_server, ("Generate",))

    async def close(self) -> None:
        """Wait for what no request waited for."""
        if self._later:
            await asyncio.wait(self._later)

    async def Generate(self, request: inference_pb2.GenerateRequest, call: ServedCall) -> None:
        """See the protocol."""
        with self._counted():
            info = self._info()
            asked = parse_generate(request, RequestLimits(info.vocabulary, info.max_context))
            if asked.kv is not None:
                raise bad_field("kv", "present", "absent, as a gateway finds state itself", "NOT_SUPPORTED")
            check_acceptable(asked, info)
            request_id = asked.request_id or call.request_id
            if request_id in self._running:
                accepted = "an id that no running request has"
                raise bad_field("request_id", request_id, accepted, "REQUEST_ID_IN_USE")
            with self._entrance.enter(len(asked.prompt)) as first_token:
                writer = AnswerWriter()

                async def write(event: Event) -> None:
                    for message in writer.messages(event):
                        await call.write(message)

                stops, asked = self._stops(asked), _seeded(asked)
                transcript = Transcript(asked, request_id, write, stops, first_token)
                if stops is not None:
                    asked = dataclasses.replace(asked, params=dataclasses.replace(asked.params, stop=()))
                answer = RoutedAnswer(asked, _envelope(asked, request_id, call), self._route, transcript)
                self._running[request_id] = answer
                try:
                    self._report(request_id, transcript, await answer.run())
                finally:
                    del self._running[request_id]

    async def Abort(self, request: inference_pb2.AbortRequest, call: ServedCall) -> inference_pb2.AbortResponse:
        """See the protocol."""
        check_id("request_id", request.request_id)
        answer = self._running.get(request.request_id)
        if answer is not None:
            await answer.abort()
        return inference_pb2.AbortResponse(found=answer is not None)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, call: ServedCall
    ) -> inference_pb2.ModelInfo:
        """See the protocol."""
        return self._info()

    async def GetLoad(self, request: inference_pb2.GetLoadRequest, call: ServedCall) -> inference_pb2.Load:
        """See the protocol. Shards are those of all workers that answer."""
        load = inference_pb2.Load(draining=call.draining)
        for worker in self._workers:
            if worker.available:
                said = worker.account.said
                load.queued_requests += said.queued_requests
                load.queued_tokens += said.queued_tokens
                for shard in said.shards:
                    load.shards.add().CopyFrom(shard)
                    load.shards[-1].shard = len(load.shards) - 1
        return load

    def _info(self) -> inference_pb2.ModelInfo:
        decoders = self._workers.decoders()
        if not decoders:
            raise refusal("NO_WORKER", "no worker that answers can be reached")
        infos = [worker.info for worker in decoders if worker.info is not None]
        info = inference_pb2.ModelInfo()
        info.CopyFrom(infos[0])
        info.max_context = min(one.max_context for one in infos)
        info.max_logprobs = min(one.max_logprobs for one in infos)
        info.max_running = sum(one.max_running for one in infos)
        info.max_waiting = self._settings.max_requests
        info.stop_strings = self._tokenizer is not None or all(one.stop_strings for one in infos)
        info.kv_handles = False
        info.worker, info.role = self._name, self._role
        return info

    def _stops(self, asked: GenerateCall) -> StopStrings | None:
        if self._tokenizer is None or not asked.params.stop:
            return None
        return StopStrings(self._tokenizer, asked.params.stop)

    def _count(self, role: str) -> int:
        return sum(worker.serves(role) for worker in self._workers)

    def _run_later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except ServingError as error:
            self.metrics.failed.labels(error.reason or error.code.name).inc()
            raise
        except asyncio.CancelledError:
            self.metrics.failed.labels("CALL_CANCELLED").inc()
            raise

    def _report(self, request_id: str, transcript: Transcript, finished: Finished) -> None:
        """Count an answer, and say in the log what went where."""
        metrics, receipt = self.metrics, finished.receipt
        metrics.finished.labels(finished.reason).inc()
        metrics.prompt_tokens.inc(transcript.prompt_tokens)
        metrics.hit_tokens.inc(receipt.engine.hit_tokens)
        metrics.generated_tokens.inc(transcript.fresh)
        metrics.handed_over_bytes.inc(receipt.handed_over_bytes)
        metrics.request_seconds.observe(transcript.seconds)
        first = transcript.seconds_to_first_token
        if first is not None:
            metrics.first_token_seconds.observe(first)
        fields = {
            "request_id": request_id,
            "finish_reason": finished.reason,
            "prompt_tokens": transcript.prompt_tokens,
            "hit_tokens": receipt.engine.hit_tokens,
            "completion_tokens": finished.completion_tokens,
            "worker": receipt.worker,
            "prefill_worker": receipt.prefill_worker,
            "handed_over_bytes": receipt.handed_over_bytes,
            "transport": receipt.transport,
            "failovers": receipt.failovers,
            "first_token_seconds": first,
            "seconds": transcript.seconds,
        }
        _log.info("answered", extra=fields)


def _seeded(asked: GenerateCall) -> GenerateCall:
    """With a seed: every worker that the request comes to must draw the same noise."""
    if asked.params.seed is not None:
        return asked
    seed = secrets.randbits(_SEED_BITS)
    return dataclasses.replace(asked, params=dataclasses.replace(asked.params, seed=seed))


def _envelope(asked: GenerateCall, request_id: str, call: ServedCall) -> Envelope:
    trace = asked.traceparent or call.traceparent
    metadata: tuple[tuple[str, str], ...] = ((REQUEST_ID, request_id),)
    if trace:
        metadata += ((TRACEPARENT, trace),)
    return Envelope(request_id, secrets.token_hex(16), metadata, lambda: call.remaining)
