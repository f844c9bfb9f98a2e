"""The service of prompts: computes them, and holds their state for whoever goes on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

from deepinfer_jax.async_engine import AsyncEngine, EngineClosedError
from deepinfer_jax.cache.snapshot import snapshot_bytes
from deepinfer_jax.request import Output
from deepinfer_jax.settings import EngineSettings
from serving.acceptance import check_acceptable
from serving.answer_stream import AnswerWriter
from serving.errors import bad_field, refusal
from serving.event_messages import delta_message, finished_message, receipt_message
from serving.events import Delta, Finished, PromptLogprobs, ServedReceipt, Timing
from serving.generate_call import GenerateCall
from serving.held_state import HeldState, SectionStorage
from serving.kv_sections import StatePlan
from serving.leases import Leases
from serving.proto.deepinfer.v1 import inference_pb2, prefill_pb2, prefill_pb2_grpc, types_pb2
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvEndpoint, KvHandle
from serving.request_messages import RequestLimits, check_id, parse_generate
from serving.served_call import ServedCall
from serving.server import Service

NAME = "deepinfer.v1.Prefill"
FULL, ENCODER_ONLY = types_pb2.PREFILL_MODE_FULL, types_pb2.PREFILL_MODE_ENCODER_ONLY

_NO_STATE = {"stop", "length"}


class _Job(NamedTuple):
    """One prompt that is computed: what was asked for, its state, and when it came."""

    asked: GenerateCall
    mode: int
    kv_id: str
    state: HeldState
    arrival: float


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """``deepinfer.v1.Prefill`` over one engine of this process. Handlers run behind a ``CallGuard``."""

    def __init__(
        self,
        engine: AsyncEngine,
        settings: EngineSettings,
        info: inference_pb2.ModelInfo,
        leases: Leases[HeldState],
        *,
        storage: Callable[[], SectionStorage],
        sealer: Executor,
    ) -> None:
        """Serve an engine, which is closed by whoever made it.

        Args:
          engine: computes.
          settings: the engine's.
          info: what is served.
          leases: where states are held.
          storage: makes room for the sections of one state.
          sealer: runs their sealing.
        """
        self._engine, self._settings, self._info, self._leases = engine, settings, info, leases
        self._storage, self._sealer = storage, sealer
        self._form = engine.receiver.form
        self._limits = RequestLimits(info.vocabulary, info.max_context)
        self._endpoints: tuple[KvEndpoint, ...] = ()

    def service(self) -> Service:
        """As a part of a server."""
        return Service(NAME, self, prefill_pb2_grpc.add_PrefillServicer_to_server, ("Prefill",))

    def advertise(self, uris: Sequence[str]) -> None:
        """Say where ``KvTransfer`` of the same table is served, as receivers reach it; before the first call."""
        self._endpoints = tuple(KvEndpoint(uri=uri) for uri in uris)

    async def Prefill(self, request: prefill_pb2.PrefillRequest, call: ServedCall) -> None:
        """See the protocol."""
        arrival = time.monotonic()
        asked, mode = self._parse(request)
        length = len(asked.prompt)
        computed = self._settings.replay.decoder_floor(length) if mode == ENCODER_ONLY else length
        plan = await asyncio.get_running_loop().run_in_executor(
            self._sealer, StatePlan.of, self._form, computed, length + 1
        )
        size = plan.most_bytes
        if size > self._leases.most_bytes:
            accepted = f"prompts whose state is at most {self._leases.most_bytes} bytes"
            raise bad_field("request.prompt_token_ids", f"{length} tokens", accepted, "CONTEXT_TOO_LONG")
        state: HeldState | None = None

        def make() -> HeldState:
            nonlocal state
            state = HeldState(self._form, plan, self._storage(), self._sealer)
            return state

        kv_id = self._leases.open(make, tokens=computed, size=size)
        assert state is not None
        held = False
        try:
            held = await self._run(_Job(asked, mode, kv_id, state, arrival), call)
        finally:
            if not held:
                self._leases.drop(kv_id, "its computation ended without it")

    async def ReleaseKv(self, request: prefill_pb2.ReleaseKvRequest, call: ServedCall) -> prefill_pb2.ReleaseKvResponse:
        """See the protocol."""
        check_id("kv_id", request.kv_id)
        return prefill_pb2.ReleaseKvResponse(released=self._leases.release(request.kv_id))

    def _parse(self, request: prefill_pb2.PrefillRequest) -> tuple[GenerateCall, int]:
        modes = [ENCODER_ONLY] if self._settings.encoder_only else [FULL]
        if self._settings.replay.decoder == "compact" and not self._settings.encoder_only:
            modes.append(ENCODER_ONLY)
        names = {FULL: "1 (full)", ENCODER_ONLY: "2 (encoder only)"}
        if request.mode not in modes:
            reason = "NOT_SUPPORTED" if request.mode in names else "INVALID_FIELD"
            raise bad_field("mode", request.mode, ", ".join(names[mode] for mode in modes), reason)
        message = request.request
        for field in ("kv", "first_token"):
            if message.HasField(field):
                raise bad_field(f"request.{field}", "present", "absent, as the prompt is computed here")
        asked = parse_generate(message, self._limits)
        check_acceptable(asked, self._info)
        if asked.answer:
            accepted = f"absent or {len(message.prompt_token_ids)}, as all ids are the prompt"
            raise bad_field("request.prompt_len", len(asked.prompt), accepted)
        return asked, request.mode

    async def _run(self, job: _Job, call: ServedCall) -> bool:
        """Compute a prompt and tell the caller. Returns whether its state is under a lease now."""
        submitted = asyncio.Event()
        news = self._engine.stream(
            job.asked.engine_request(call.remaining),
            lambda number: submitted.set(),
            handover=job.state.handover,
            encoder_only=job.mode == ENCODER_ONLY,
        )
        computing = asyncio.create_task(_last(news))
        try:
            await _first_of(computing, submitted.wait())
            # A prompt that caches hold may be done by now.
            if submitted.is_set():
                expires = time.time() + call.remaining + self._leases.seconds
                handle = self._handle(job, job.state.plan.most_bytes, expires)
                await call.write(prefill_pb2.PrefillEvent(accepted=prefill_pb2.PrefillAccepted(kv=handle)))
            await self._follow(job, computing, call)
            return await self._finish(job, await computing, call)
        except EngineClosedError as error:
            raise refusal("ENGINE_STOPPED", "the engine of this server has ended") from error
        finally:
            # Leaving the engine's stream early aborts the request there.
            computing.cancel()
            await asyncio.wait((computing,))

    async def _follow(self, job: _Job, computing: asyncio.Task[Output], call: ServedCall) -> None:
        """Tell how far a computation is until it ends."""
        told = 0
        while not computing.done():
            await _first_of(computing, job.state.changed())
            # Who goes on with it may have all of it before the engine's step is over.
            if job.state.ended is not None and not job.state.received:
                raise refusal("CALL_CANCELLED", f"the state was given up: {job.state.ended}")
            if not computing.done() and job.state.computed_tokens > told:
                told = job.state.computed_tokens
                cached = job.state.handover.hit_tokens
                progress = prefill_pb2.PrefillProgress(computed_tokens=told, cached_tokens=cached)
                await call.write(prefill_pb2.PrefillEvent(progress=progress))

    async def _finish(self, job: _Job, last: Output, call: ServedCall) -> bool:
        reason, meta = last.finish_reason, job.state.handover.meta
        if reason == "deadline":
            raise refusal("DEADLINE_PASSED", "the deadline passed")
        if reason == "abort":
            raise refusal("CALL_CANCELLED", "the request was aborted")
        if reason not in _NO_STATE and meta is None:
            raise refusal("ENGINE_FAULT", last.error or f"the engine ended the request: {reason}")
        if last.prompt_logprobs:
            for message in AnswerWriter().messages(PromptLogprobs(1, last.prompt_logprobs)):
                await call.write(prefill_pb2.PrefillEvent(prompt_logprobs=message.prompt_logprobs))
        receipt = self._receipt(last, job)
        done = prefill_pb2.PrefillDone(receipt=receipt_message(receipt))
        if last.tokens:
            done.first.CopyFrom(delta_message(Delta(last.tokens, last.logprobs), 0))
        if meta is not None:
            size = snapshot_bytes(meta, self._form)
            seconds = self._leases.complete(job.kv_id, size)
            if seconds is None and not job.state.received:
                raise refusal("CALL_CANCELLED", f"the state was given up: {job.state.ended}")
            done.kv.CopyFrom(self._handle(job, size, time.time() + (seconds or 0.0)))
        else:
            assert reason is not None
            finished = Finished(reason, len(last.tokens), receipt, last.matched)
            done.finished.CopyFrom(finished_message(finished))
        await call.write(prefill_pb2.PrefillEvent(done=done))
        return meta is not None

    def _handle(self, job: _Job, size: int, expires: float) -> KvHandle:
        own, plan = job.state.endpoint, job.state.plan
        handle = KvHandle(
            kv_id=job.kv_id,
            endpoints=(*(() if own is None else (own,)), *self._endpoints),
            fingerprint=self._form.fingerprint.hex(),
            bytes=size,
            pages=self._form.layout.blocks_for(plan.computed),
            mode=types_pb2.PrefillMode.Name(job.mode),
            computed_tokens=plan.computed,
            worker=self._info.worker,
        )
        handle.lease_expires.FromNanoseconds(round(expires * 1e9))
        return handle

    def _receipt(self, last: Output, job: _Job) -> ServedReceipt:
        assert last.receipt is not None
        total, queue = time.monotonic() - job.arrival, last.queue_seconds
        timing = Timing(queue=queue, prefill=None if queue is None else max(0.0, total - queue), total=total)
        worker = self._info.worker
        return ServedReceipt(last.receipt, worker=worker, prefill_worker=worker, timing=timing)


async def _last(news: AsyncGenerator[Output, None]) -> Output:
    """The one output of a request that hands over."""
    async with contextlib.aclosing(news):
        async for output in news:
            if output.finish_reason is not None:
                return output
    raise refusal("ENGINE_FAULT", "the engine ended the request without a word")


async def _first_of(task: asyncio.Task[Output], other: Coroutine[Any, Any, Any]) -> None:
    """Wait until a task has ended or something else has happened; both are left as they are."""
    waiting = asyncio.create_task(other)
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
