"""The engine: many requests at once over one device state, the host one step ahead of the device.

One turn of the loop plans and dispatches step N + 1, then reads step N. The host therefore corrects its books one step
late: a request that turns out to have ended runs one more row, whose result nobody uses.
"""

from __future__ import annotations

import collections
import itertools
import math
import secrets
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from pathlib import Path

from deepinfer_jax.admission import Admissions
from deepinfer_jax.arrival import Arrival, Receiver
from deepinfer_jax.assembly import Assembled, Part, assemble
from deepinfer_jax.books import Books
from deepinfer_jax.cache.records import StateFormat
from deepinfer_jax.cache.store import BlockStore
from deepinfer_jax.checkpoints import Checkpoints
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError, OverloadError
from deepinfer_jax.handover import Handover, check_handover
from deepinfer_jax.load import EngineLoad, engine_load
from deepinfer_jax.metrics import Metrics
from deepinfer_jax.preemption import packing_seconds, recomputes, suspend
from deepinfer_jax.recorder import Recorder
from deepinfer_jax.request import Completion, Output, Request
from deepinfer_jax.results import Results, StepRecord
from deepinfer_jax.runtime.batch import StepShape
from deepinfer_jax.runtime.choices import ChoiceTable
from deepinfer_jax.runtime.device import Device
from deepinfer_jax.scheduler import Room, Running, plan_step, victim
from deepinfer_jax.sequence import Sequence, branch_seed
from deepinfer_jax.settings import EngineSettings
from deepinfer_jax.store_traffic import StoreTraffic
from deepinfer_jax.text.stop_strings import StopMatcher
from deepinfer_jax.text.tokenizer import TextStream, Tokenizer
from deepinfer_jax.tracing import Tracer

_SEED_BITS = 63


class Engine:
    """Requests in, news of them out. Not safe for use from several threads; see :mod:`deepinfer_jax.async_engine`."""

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        settings: EngineSettings,
        *,
        blocks: int,
        form: StateFormat,
        costs: Mapping[StepShape, float],
        store: BlockStore | None = None,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Use :func:`deepinfer_jax.engine_build.build_engine`, which makes all of this from a model.

        Args:
          device: warmed up, or not: then steps are compiled when they are first needed.
          config, settings: of the model and of the engine.
          blocks: of each shard's pools.
          form: how the state is cut into records when it leaves the device, and its fingerprint.
          costs: seconds of each step shape, as far as they are known.
          store: where finished blocks go and prefix hits continue.
          tokenizer: for texts and stop strings.
          clock: seconds, steady.
        """
        self.config, self.settings = config, settings
        self.metrics, self.recorder = Metrics(), Recorder(settings.recorded_steps)
        self.books = Books(
            slots=settings.slots,
            blocks=blocks,
            block_tokens=settings.block_tokens,
            tables_width=settings.tables_width(config),
            n_shards=settings.n_shards,
            fingerprint=form.fingerprint,
        )
        fill = math.nan if settings.poison else 0.0
        self.receiver = Receiver(form, device.rings, device.token_map, fill)
        self._device, self._tokenizer, self._clock, self._costs = device, tokenizer, clock, costs
        self._table = ChoiceTable(settings.n_shards * settings.slots)
        self._checkpoints = Checkpoints(settings.window_checkpoints)
        self._traffic = StoreTraffic(device, self.books, settings, self.metrics, clock, store, form)
        self._admissions = Admissions(
            device,
            self.books,
            self._table,
            self._checkpoints,
            config,
            settings,
            self.metrics,
            self._traffic,
            self.receiver,
        )
        self._results = Results(
            device, self.books, self._checkpoints, settings, self.metrics, self._traffic, form.fingerprint, clock
        )
        self._packing_seconds = packing_seconds(form)
        self._running: dict[int, Sequence] = {}
        self._ids, self._requests = itertools.count(), itertools.count()
        self._flying: StepRecord | None = None
        self._tracer = Tracer()
        self._steps = 0
        # Steps behind which nothing was to run when they were read.
        self.drained_steps: set[int] = set()

    # Requests.

    def submit(
        self,
        request: Request,
        *,
        arrival: Arrival | None = None,
        handover: Handover | None = None,
        encoder_only: bool = False,
    ) -> int:
        """Queue a request. Returns its number, which its news carry.

        Args:
          request: what is asked for.
          arrival: its state so far, as :attr:`receiver` opened it.
          handover: where its state goes; the request ends with its first token then.
          encoder_only: hand over before the first row that decoder layers keep; no token comes.

        Raises:
          InputError: the request cannot be served by this model or engine, or the state is not the request's.
          OverloadError: too many requests wait.
        """
        self.check(request)
        params, replay = request.params, self.settings.replay
        cut = check_handover(request, replay, handover, encoder_only=encoder_only, half=self.settings.encoder_only)
        if arrival is not None:
            arrival.check(request, bounded=replay.mode == "bounded")
        if self._admissions.count + params.n > self.settings.max_waiting:
            accepted = f"at most max_waiting {self.settings.max_waiting}"
            raise OverloadError("waiting requests", self._admissions.count + params.n, accepted, "try again later")
        number, now = next(self._requests), self._clock()
        seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed
        ends = params.stop_ids if params.ignore_eos else params.stop_ids | {self.config.eos_token_id}
        branches = []
        for branch in range(params.n):
            sequence = Sequence(
                id=next(self._ids),
                request_id=number,
                branch=branch,
                request=request,
                seed=branch_seed(seed, branch),
                arrival=now,
                ends=frozenset(ends),
                tokens=[*request.prompt, *request.answer],
                handover=handover,
                cut=cut,
            )
            if self._tokenizer is not None:
                sequence.stream, sequence.matcher = TextStream(self._tokenizer), StopMatcher(params.stop)
                sequence.matcher.push(sequence.stream.push(request.answer))
            if arrival is not None:
                arrival.begin(sequence, self.settings.block_tokens)
            branches.append(sequence)
        self._admissions.add(branches)
        return number

    def check(self, request: Request) -> None:
        """Refuse what cannot be served, before anything is queued.

        Raises:
          InputError: names the value and what is accepted.
        """
        request.check(self.config)
        params = request.params
        if params.stop and self._tokenizer is None:
            raise InputError("stop", params.stop, "no stop strings, as this engine has no tokenizer", "use stop_ids")
        self.settings.check(request, self.config)
        total = len(request.prompt) + params.max_tokens
        if self.books.blocks_for(total) > self.books.pool.blocks:
            room = self.books.pool.blocks * self.settings.block_tokens
            raise InputError("prompt and new tokens", total, f"at most {room}, all the pages there are")

    def abort(self, request_id: int, reason: str = "abort") -> None:
        """End all branches of a request, wherever they are; their last news come with the next step."""
        for sequence in [*self._admissions.sequences(), *self._running.values()]:
            if sequence.request_id == request_id and sequence.finish_reason is None:
                self._results.end(sequence, reason)

    def generate(
        self, requests: Items[Request], *, progress: Callable[[int], None] = lambda tokens: None
    ) -> list[list[Completion]]:
        """Run requests to their end. Returns, per request, the answer of each branch.

        One that ends in an error does not touch the others: its answer says so. ``progress`` is told how many tokens
        came with every step.

        Raises:
          InputError: one of the requests cannot be served; none is queued then.
          OverloadError: the requests are more than may wait.
        """
        for request in requests:
            self.check(request)
        numbers = [self.submit(request) for request in requests]
        answers: dict[tuple[int, int], list[Output]] = collections.defaultdict(list)
        try:
            while self.busy:
                news = self.step()
                for output in news:
                    answers[output.request_id, output.branch].append(output)
                progress(sum(len(output.tokens) for output in news))
        except BaseException:
            for number in numbers:
                self.abort(number)
            raise
        return [
            [Completion.of(answers[number, branch]) for branch in range(request.params.n)]
            for number, request in zip(numbers, requests, strict=True)
        ]

    @property
    def busy(self) -> bool:
        """Whether anything waits, runs or is on its way to a caller; blocks may still be on theirs to the store."""
        return bool(self._admissions.count or self._running or self._flying or self._results.pending)

    def load(self) -> EngineLoad:
        """How busy it is between two steps."""
        return engine_load(self._admissions.sequences(), self._running.values(), self.books)

    def flush(self) -> None:
        """Wait until the blocks of everything that was read have reached the store."""
        self._traffic.flush()

    def trace(self, directory: Path, steps: int) -> None:
        """Write a profile of the next ``steps`` steps to a directory, in the format of ``jax.profiler``.

        It ends early where the engine has nothing more to do, or is closed.

        Raises:
          InputError: fewer steps than one, or the trace before has not ended.
        """
        self._tracer.want(directory, steps)

    def close(self) -> None:
        """End the store's thread, which gives up what it has not done, and a trace. The engine can go on.

        See :meth:`flush`.
        """
        self._traffic.close()
        self._tracer.end()

    # The loop.

    def step(self) -> list[Output]:
        """One turn: dispatch the next step, then read the one before. Returns what became known."""
        begin = time.thread_time()
        if self.busy:
            self._tracer.begin(self._steps + 1)
        self._expire()
        for sequence in self._admissions.admit(self._running.values()):
            self._running[sequence.id] = sequence
        assembled = self._plan()
        if assembled is not None and self._flying is not None and not self._device.ready(assembled.shape):
            # A compilation would hold back what is on its way already.
            assembled = None
        following = None if assembled is None else self._dispatch(assembled)
        if self._flying is not None:
            if following is None:
                self.drained_steps.add(self._flying.number)
            self.recorder.read(self._flying.number, self._results.take(self._flying))
            # Blocks must be on their way off the device before others may have them.
            self._traffic.turn(idle=following is None)
            self._tracer.read(self._flying.number)
        self._flying = following
        for sequence in self._results.ended():
            self._leave(sequence)
        self._admissions.settle()
        self._observe(time.thread_time() - begin)
        if self._flying is None and not self._running and not self._results.pending:
            self._traffic.rest()
        if self._flying is None and not self._running and not self._admissions.count:
            self._tracer.idle()
        return self._results.news()

    def _expire(self) -> None:
        now = self._clock()
        for sequence in [*self._admissions.sequences(), *self._running.values()]:
            deadline = sequence.request.deadline
            if deadline is not None and now - sequence.arrival > deadline and sequence.finish_reason is None:
                self._results.end(sequence, "deadline")

    def _plan(self) -> Assembled | None:
        self._make_room()
        running = [
            Running(
                sequence.id,
                sequence.shard,
                sequence.computed,
                max(sequence.stop, sequence.computed),
                sequence.served,
                sequence.request.priority,
            )
            for sequence in self._running.values()
            if sequence.wants_step
        ]
        settings = self.settings
        decode_rows = 0 if settings.encoder_only else settings.decode_rows[-1]
        room = Room(decode_rows, settings.prefill_tiles[-1], settings.rows_per_tile)
        parts = [self._part(self._running[piece.id], piece.start, piece.count) for piece in plan_step(running, room)]
        if not parts:
            return None
        return assemble(
            parts,
            self._device.shapes,
            self.books,
            self._table,
            fixed=self._device.settings,
        )

    @staticmethod
    def _part(sequence: Sequence, start: int, count: int) -> Part:
        last = start + count == sequence.length
        return Part(sequence, start, count, last and sequence.generated < sequence.limit)

    def _make_room(self) -> None:
        """Blocks for every running sequence's next row; where there are none, one gives way."""
        order = sorted(self._running.values(), key=lambda sequence: (-sequence.request.priority, sequence.id))
        for sequence in order:
            while sequence.wants_step and not self.books.grow(sequence, sequence.stop):
                rivals = [
                    Running(other.id, other.shard, other.computed, other.length, other.served, other.request.priority)
                    for other in self._running.values()
                    if other.finish_reason is None
                ]
                loser = victim(rivals, sequence.shard)
                assert loser is not None
                self._preempt(self._running[loser.id])

    def _preempt(self, sequence: Sequence) -> None:
        settings = self.settings
        if recomputes(sequence, settings.replay, settings.preemption, *self._rates()):
            sequence.computed = sequence.confirmed = 0
            way = "recompute"
        else:
            sequence.suspended = suspend(sequence, self._device, self.books)
            way = "snapshot"
        sequence.preemptions += 1
        self.metrics.preemptions.labels(way).inc()
        self._unseat(sequence)
        del self._running[sequence.id]
        self._admissions.return_to(sequence)

    def _rates(self) -> tuple[float, float]:
        """Seconds of a prefill row, and of a block's way to the host and back; 0 where they were not measured."""
        if not self._costs:
            return 0.0, 0.0
        prefill = max(self._costs, key=lambda shape: shape.rows)
        return self._costs[prefill] / prefill.rows, self._device.block_seconds + self._packing_seconds

    def _dispatch(self, assembled: Assembled) -> StepRecord:
        self._steps += 1
        self.recorder.dispatched(self._steps, assembled.shape, assembled.step, assembled.choices)
        with self._tracer.step(self._steps):
            flight = self._device.dispatch(assembled.shape, assembled.step, assembled.choices)
        record, now = StepRecord(self._steps, assembled, flight), self._clock()
        self._results.prepare(record)
        for entry in assembled.entries:
            sequence = entry.sequence
            sequence.begun = now if sequence.begun is None else sequence.begun
            sequence.computed, sequence.served = entry.start + entry.count, self._steps
            sequence.on_way, sequence.source = sequence.on_way + (entry.place is not None), entry.source
            self._admissions.passed(sequence)
        self.metrics.steps.inc()
        return record

    def _leave(self, sequence: Sequence) -> None:
        """Give back everything of a sequence that ended."""
        self._admissions.drop(sequence)
        if sequence.slot is not None:
            self._unseat(sequence)
        self._running.pop(sequence.id, None)

    def _unseat(self, sequence: Sequence) -> None:
        slot, freed = self.books.unseat(sequence)
        if self.settings.poison:
            self._device.poison(freed, [slot])

    def _observe(self, host_seconds: float) -> None:
        metrics = self.metrics
        metrics.host_seconds.observe(host_seconds)
        metrics.waiting.set(self._admissions.count)
        metrics.running.set(len(self._running))
        metrics.used_blocks.set(self.books.used_blocks)
        metrics.used_slots.set(self.books.used_slots)
        metrics.held_windows.set(len(self._checkpoints))
        metrics.recompiles.inc(self._device.new_compiles())
