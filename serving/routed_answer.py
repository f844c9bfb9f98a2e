"""One request on its way through workers: placed, computed, handed over, answered, and moved on when workers fail."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from serving.configuration import GatewaySection
from serving.decode_run import DecodeRun
from serving.errors import OverloadedError, ServingError, StateError, explained, refusal
from serving.event_messages import delta_event, finished_event, receipt_of
from serving.events import Delta, Finished, PromptLogprobs, ServedReceipt, Started
from serving.gateway_metrics import GatewayMetrics
from serving.generate_call import GenerateCall
from serving.joined_receipt import empty_receipt
from serving.prefill_run import PrefillRun
from serving.status import Metadata
from serving.transcript import Transcript
from serving.worker import Worker
from serving.workers import Place, Workers

_log = logging.getLogger("serving.gateway")

_MODES = {"full": "PREFILL_MODE_FULL", "encoder_only": "PREFILL_MODE_ENCODER_ONLY"}
# Another worker may do better then.
_ELSEWHERE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.CANCELLED,
    }
)
# A decode worker that refuses a request, or is gone, has not given the state back.
_LEAVES_STATE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
# A reader that is too slow for one worker is too slow for all.
_NOWHERE = frozenset({"READER_TOO_SLOW"})


@dataclasses.dataclass(frozen=True)
class Route:
    """What all requests of a gateway share.

    Attributes:
        workers: to choose from.
        settings: of the gateway.
        metrics: of the gateway.
        later: runs what no request waits for.
    """

    workers: Workers
    settings: GatewaySection
    metrics: GatewayMetrics
    later: Callable[[Coroutine[Any, Any, None]], None]


@dataclasses.dataclass(frozen=True)
class Envelope:
    """What a request is besides what it asks for.

    Attributes:
        request_id: the client's.
        attempt_id: names it on workers, where every attempt has an id of its own.
        metadata: of the calls of workers.
        remaining: seconds until its deadline; raises behind it.
    """

    request_id: str
    attempt_id: str
    metadata: Metadata
    remaining: Callable[[], float]


class RoutedAnswer:
    """A request between its admission and its end.

    A worker that fails is left for another one, and the answer goes on behind the tokens that have come: the client
    sees one stream. State that was computed and is still held is used again.
    """

    def __init__(self, call: GenerateCall, envelope: Envelope, route: Route, transcript: Transcript) -> None:
        """Describe a request.

        Args:
          call: what is asked for, its seed drawn; without stop strings where the transcript watches for them.
          envelope: what it is besides.
          route: what requests share.
          transcript: passes the answer on.
        """
        self._call, self._envelope, self._route, self._transcript = call, envelope, route, transcript
        self._news = asyncio.Event()
        self._place: Place | None = None
        self._prefill: PrefillRun | None = None
        self._decode: DecodeRun | None = None
        self._prefilled: ServedReceipt | None = None
        self._failed_prefill, self._failed_decode, self._lost_state = set[str](), set[str](), set[str]()
        self._prefill_error: ServingError | None = None
        self._decode_error: ServingError | None = None
        self._calls = self._failures = self._failovers = 0
        self._aborted = False
        self._fingerprint = ""

    @property
    def failovers(self) -> int:
        """How often the answer went on with another worker."""
        return self._failovers

    async def run(self) -> Finished:
        """Get it answered. Returns how it ended, which the transcript has passed on.

        Raises:
          ServingError: it cannot be answered; the reason is that of the last worker that was tried.
        """
        try:
            while True:
                try:
                    return await self._attempt()
                except ServingError as error:
                    if self._aborted:
                        return await self._finish("cancelled")
                    self._recover(error)
        finally:
            self._drop_decode()
            self._drop_prefill()

    async def abort(self) -> None:
        """End it from outside: its stream ends with ``Finished`` and reason ``cancelled``."""
        self._aborted = True
        decode, prefill = self._decode, self._prefill
        if decode is not None:
            await decode.abort(self._route.settings.call_seconds)
        if prefill is not None:
            prefill.close()
        self._news.set()

    # One attempt.

    async def _attempt(self) -> Finished:
        """Run on workers that there are now, as far as it goes."""
        if self._transcript.full:
            # Only the word that it ended was lost.
            return await self._finish("length")
        place = self._place = await self._decode_place()
        if self._prefill is None and self._wants_prefill(place):
            self._prefill = self._begin_prefill()
        if self._prefill is None:
            self._begin_decode(place)
        else:
            finished = await self._compute(self._prefill, place)
            if finished is not None:
                return finished
        assert self._decode is not None
        return await self._answer(self._decode)

    async def _compute(self, prefill: PrefillRun, place: Place) -> Finished | None:
        """Wait for the prompt's state, which the decode worker fetches meanwhile. Gives the end, if that is all."""
        transcript = self._transcript
        while True:
            self._news.clear()
            self._check_aborted()
            if prefill.handle is not None and self._decode is None:
                self._begin_decode(place, prefill)
            for run in (prefill, self._decode):
                if run is not None and run.error is not None:
                    raise run.error
            if prefill.cached is not None:
                await transcript.start(prefill.cached, place.worker.name, self._fingerprint)
                for scores in prefill.prompt_logprobs():
                    await transcript.scores(scores)
            if prefill.done is not None:
                break
            await self._news.wait()
        done = prefill.done
        self._prefilled = receipt_of(done.receipt)
        if done.HasField("first") and not transcript.fresh:
            await transcript.delta(delta_event(done.first))
        if transcript.stopped is not None:
            return await self._finish("stop", transcript.stopped, self._prefilled)
        if done.HasField("finished"):
            finished = finished_event(done.finished)
            return await self._finish(finished.reason, finished.matched, self._prefilled)
        return None

    async def _answer(self, decode: DecodeRun) -> Finished:
        """Pass the answer on until it ends."""
        transcript = self._transcript
        started = await decode.started()
        await transcript.start(started.cached_tokens, decode.place.worker.name, self._fingerprint)
        while True:
            event = await decode.event()
            assert not isinstance(event, Started)
            if isinstance(event, PromptLogprobs):
                await transcript.scores(event)
                continue
            if isinstance(event, Delta) or event.reason != "cancelled":
                # State that was handed over has arrived, and was given back where it came from.
                self._drop_prefill(arrived=True)
            if isinstance(event, Delta):
                await transcript.delta(event)
                if transcript.stopped is not None:
                    return await self._finish("stop", transcript.stopped, await self._cut(decode), self._prefilled)
            else:
                receipt, failovers = event.receipt, self._failovers
                finished = await transcript.finish(event, receipt, self._prefilled, failovers, self._fingerprint)
                await decode.end(self._route.settings.call_seconds)
                return finished

    async def _cut(self, decode: DecodeRun) -> ServedReceipt | None:
        """End the worker's part. Gives its receipt, if that comes soon."""
        seconds = self._route.settings.call_seconds
        try:
            async with asyncio.timeout(seconds):
                await decode.abort(seconds)
                while not isinstance(event := await decode.event(), Finished):
                    continue
                await decode.end(seconds)
                return event.receipt
        except (ServingError, TimeoutError):
            return None

    async def _finish(
        self,
        reason: str,
        matched: str | int | None = None,
        last: ServedReceipt | None = None,
        prefill: ServedReceipt | None = None,
    ) -> Finished:
        end = Finished(reason, 0, empty_receipt(0, self._fingerprint), matched)
        return await self._transcript.finish(end, last, prefill, self._failovers, self._fingerprint)

    def _check_aborted(self) -> None:
        if self._aborted:
            raise refusal("CALL_CANCELLED", "the request was aborted")

    # Places.

    async def _decode_place(self) -> Place:
        settings, loop = self._route.settings, asyncio.get_running_loop()
        end = loop.time() + settings.return_seconds
        while (place := self._find_decode_place()) is None:
            if not self._transcript.fresh or loop.time() >= end:
                message = "no worker of role decode or all can be reached"
                raise explained(self._decode_error or refusal("NO_WORKER", message))
            # An answer that has begun is worth waiting until workers are asked again.
            self._failed_decode.clear()
            await asyncio.sleep(min(settings.poll_seconds, self._timeout()))
            self._check_aborted()
        assert place.worker.info is not None
        self._fingerprint = place.worker.info.fingerprint
        return place

    def _find_decode_place(self) -> Place | None:
        call, tokens = self._call, self._transcript.tokens
        # Once there are tokens, those that follow must come from the same weights.
        fingerprint = self._fingerprint if self._transcript.fresh else ""
        return self._route.workers.decode_place(
            len(call.prompt) + len(tokens), len(call.prompt) + call.params.max_tokens, self._failed_decode, fingerprint
        )

    def _wants_prefill(self, place: Place) -> bool:
        """Whether the prompt shall be computed by another worker than the one that answers."""
        params, info, way = self._call.params, place.worker.info, self._route.settings.prefill
        assert info is not None
        if way == "none" or place.worker.role == "all" or not info.kv_handles:
            return False
        # What exists of an answer is computed with the prompt, by who goes on with it.
        if self._transcript.tokens or not params.max_tokens:
            return False
        return way == "full" or (params.prompt_logprobs is None and len(self._call.prompt) > info.keep)

    def _begin_prefill(self) -> PrefillRun | None:
        """Send the prompt to a worker; None where the one that answers has to compute it."""
        settings, seconds = self._route.settings, self._timeout()
        place = self._route.workers.prefill_place(len(self._call.prompt), self._failed_prefill)
        if place is None:
            # Where prefill workers have too much to do, decode workers must not get it on top of theirs.
            if not settings.prefill_fallback or isinstance(self._prefill_error, OverloadedError):
                message = "no worker of role prefill can be reached"
                raise explained(self._prefill_error or refusal("NO_WORKER", message))
            self._route.metrics.unassisted.inc()
            return None
        # Whoever has a place leaves it: nothing may fail in between.
        call, metadata = self._worker_call(), self._envelope.metadata
        return PrefillRun(place, call, _MODES[settings.prefill], seconds, metadata, self._news.set)

    def _begin_decode(self, place: Place, prefill: PrefillRun | None = None) -> None:
        self._check_aborted()
        call, tokens = self._worker_call(), tuple(self._transcript.tokens)
        if prefill is None:
            call = dataclasses.replace(call, answer=tokens)
        else:
            # Log-probabilities of the prompt come from where it is computed.
            params = dataclasses.replace(call.params, prompt_logprobs=None)
            first = tokens[0] if tokens else None
            call = dataclasses.replace(call, params=params, kv=prefill.handle, first_token=first)
        self._decode = DecodeRun(place, call, self._timeout(), self._envelope.metadata, self._news.set)

    def _worker_call(self) -> GenerateCall:
        self._calls += 1
        return dataclasses.replace(self._call, request_id=f"{self._envelope.attempt_id}-{self._calls}")

    def _timeout(self) -> float:
        seconds = self._envelope.remaining() - self._route.settings.deadline_margin
        if seconds <= 0:
            raise refusal("DEADLINE_PASSED", "the deadline is too close for a worker to answer")
        return seconds

    # Failures.

    def _recover(self, error: ServingError) -> None:
        """Make ready for another attempt, or raise the error."""
        decode, prefill = self._decode, self._prefill
        if prefill is not None and prefill.error is error:
            side, worker = "prefill", prefill.place.worker
        elif decode is not None and decode.error is error:
            side, worker = "decode", decode.place.worker
        else:
            raise error
        if error.code not in _ELSEWHERE or error.reason in _NOWHERE:
            # It comes from the request, its deadline or its reader, and would come everywhere.
            raise explained(error)
        self._note(error, side, worker)
        self._failures += 1
        if self._failures >= self._route.settings.attempts:
            raise explained(error)
        self._route.metrics.repeats.labels(side).inc()
        if self._transcript.fresh:
            self._failovers += 1
            self._route.metrics.failovers.inc()
        self._drop_decode()
        if side == "prefill":
            self._prefill_error = error
            self._failed_prefill.add(worker.address)
            self._drop_prefill()
        elif isinstance(error, StateError) and prefill is not None:
            # That the state is lost or damaged is not the fault of who wanted it.
            self._blame(prefill.place.worker.address, error)
            self._drop_prefill()
        else:
            self._decode_error = error
            self._failed_decode.add(worker.address)
            if error.code not in _LEAVES_STATE:
                self._drop_prefill()

    def _blame(self, address: str, error: ServingError) -> None:
        """Do without a prefill worker whose state is no good; one whose state was lost may compute it once more."""
        if error.reason != "KV_EXPIRED" or address in self._lost_state:
            self._failed_prefill.add(address)
        self._lost_state.add(address)

    def _note(self, error: ServingError, side: str, worker: Worker) -> None:
        if error.code is grpc.StatusCode.UNAVAILABLE:
            worker.lost(error.reason or f"{error.code.name}: {error.message}")
        fields = {"request_id": self._envelope.request_id, "worker": worker.name, "side": side}
        more = {"code": error.code.name, "reason": error.reason, "tokens": self._transcript.fresh}
        _log.warning("worker failed a request", extra=fields | more)

    def _drop_decode(self) -> None:
        if self._decode is not None:
            self._decode.close()
            self._decode = None
        if self._place is not None:
            self._place.leave()
            self._place = None

    def _drop_prefill(self, *, arrived: bool = False) -> None:
        """End the prefill worker's part. ``arrived``: who fetched the state has given it back there."""
        prefill, self._prefill = self._prefill, None
        if prefill is not None:
            prefill.close()
            if not arrived:
                if not self._transcript.fresh:
                    # Nothing of what it did is part of the answer.
                    self._prefilled = None
                self._route.later(prefill.release(self._route.settings.call_seconds))
