"""What a step gave, one step later: tokens, ends, log-probabilities and pages that others may use."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from prometheus_client import Counter

from deepinfer_jax.assembly import Assembled, Entry
from deepinfer_jax.books import Books
from deepinfer_jax.checkpoints import Checkpoints
from deepinfer_jax.errors import InputError
from deepinfer_jax.metrics import Metrics
from deepinfer_jax.preemption import describe
from deepinfer_jax.request import Logprob, Output
from deepinfer_jax.runtime.device import Device
from deepinfer_jax.runtime.inflight import InFlight
from deepinfer_jax.runtime.transfer import batches
from deepinfer_jax.sequence import Sequence
from deepinfer_jax.settings import EngineSettings
from deepinfer_jax.store_traffic import StoreTraffic


@dataclasses.dataclass
class StepRecord:
    """A dispatched step: what ran, and what is on its way.

    By sequence, ``windows`` are those held at a boundary, and ``handed`` what is handed over.
    """

    number: int
    assembled: Assembled
    stepped: InFlight
    scores: InFlight | None = None
    windows: dict[int, tuple[int, InFlight]] = dataclasses.field(default_factory=dict)
    handed: dict[int, Handed] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Handed:
    """``count`` blocks on their way out of the device, and the slot where the state is complete."""

    count: int
    blocks: list[InFlight]
    slot: InFlight | None


class Results:
    """Turns results into news, and corrects the books by them."""

    def __init__(
        self,
        device: Device,
        books: Books,
        checkpoints: Checkpoints,
        settings: EngineSettings,
        metrics: Metrics,
        traffic: StoreTraffic,
        fingerprint: bytes,
        clock: Callable[[], float],
    ) -> None:
        self._device, self._books, self._checkpoints = device, books, checkpoints
        self._settings, self._metrics, self._fingerprint, self._clock = settings, metrics, fingerprint, clock
        self._traffic = traffic
        self._news: list[Output] = []
        self._ended: list[Sequence] = []
        self._last_read: float | None = None

    @property
    def pending(self) -> bool:
        """Whether there is news that nobody took."""
        return bool(self._news)

    def news(self) -> list[Output]:
        """Take the news."""
        news, self._news = self._news, []
        return news

    def ended(self) -> list[Sequence]:
        """Take the sequences that ended."""
        ended, self._ended = self._ended, []
        return ended

    def prepare(self, record: StepRecord) -> None:
        """Dispatch what goes with a step: scores of prompts, and windows at block boundaries."""
        assembled = record.assembled
        scored = [entry for entry in assembled.entries if self._scores(entry)]
        if scored:
            rows = self._device.settings.rows(assembled.shape)
            targets = np.zeros(self._settings.n_shards * rows, np.int32)
            for entry in scored:
                begin = entry.last_row - entry.count + 1
                following = entry.sequence.tokens[entry.start + 1 : entry.start + 1 + entry.count]
                targets[begin : begin + len(following)] = following
            record.scores = self._device.score(assembled.shape, targets)
        ran: collections.Counter[Counter] = collections.Counter()
        for entry in assembled.entries:
            sequence, stop = entry.sequence, entry.start + entry.count
            if self._holds_windows(sequence, stop):
                record.windows[sequence.id] = (stop, self._device.read_slot(self._books.number(sequence)))
            if sequence.handover is not None:
                record.handed[sequence.id] = self._handed(entry)
            self._count_rows(entry, ran)
        # A counter costs more than the rest of a row's books.
        for counter, count in ran.items():
            counter.inc(count)

    def take(self, record: StepRecord) -> Any:
        """Read a step and act on it. Returns what it sampled."""
        stepped = record.stepped.read()
        sampled = stepped.sampled
        scores = None if record.scores is None else record.scores.read()
        now = self._clock()
        if self._last_read is not None:
            self._metrics.step_seconds.observe(now - self._last_read)
        self._last_read = now
        for entry in record.assembled.entries:
            sequence = entry.sequence
            if entry.place is not None:
                sequence.on_way -= 1
            if sequence.finish_reason is not None:
                self._metrics.wasted_rows.inc(entry.count)
                continue
            refused = _not_finite(entry, stepped)
            if refused is not None:
                self.end(sequence, "error", error=refused)
                continue
            # One that gave way by recomputation begins anew, without a slot.
            if sequence.slot is not None or sequence.suspended is not None:
                sequence.confirmed = max(sequence.confirmed, entry.start + entry.count)
            if scores is not None and self._scores(entry):
                self._collect(entry, scores)
            handed = record.handed.get(sequence.id)
            if handed is not None and handed.slot is None and sequence.handover is not None:
                blocks = [part.read() for part in handed.blocks]
                sequence.handover.add(blocks, handed.count, sequence.hit_tokens)
            if entry.place is not None:
                self._accept(sequence, entry.place, sampled, now, handed)
            elif handed is not None and handed.slot is not None:
                self._complete(sequence, handed)
                self.end(sequence, "handover")
            elif sequence.request.params.max_tokens == 0 and entry.start + entry.count == sequence.prompt_length:
                self.end(sequence, "length")
            if sequence.slot is not None:
                self._publish(sequence, record)
        return sampled

    def end(
        self,
        sequence: Sequence,
        reason: str,
        *,
        tokens: tuple[int, ...] = (),
        text: str = "",
        logprobs: tuple[Logprob, ...] = (),
        matched: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """End a sequence, with its last news."""
        sequence.finish_reason = reason
        if sequence.handover is not None:
            sequence.handover.fail(reason)
        if sequence.matcher is not None and sequence.stream is not None and sequence.matcher.found is None:
            text += sequence.matcher.push(sequence.stream.finish()) + sequence.matcher.finish()
        self._metrics.finished.labels(reason).inc()
        self._ended.append(sequence)
        self._news.append(
            Output(
                request_id=sequence.request_id,
                branch=sequence.branch,
                tokens=tokens,
                text=text,
                logprobs=logprobs,
                prompt_logprobs=self._prompt_logprobs(sequence),
                finish_reason=reason,
                matched=matched,
                error=error,
                receipt=sequence.receipt(self._fingerprint.hex()),
                queue_seconds=sequence.queue_seconds,
            )
        )

    def _accept(self, sequence: Sequence, place: int, sampled: Any, now: float, handed: Handed | None) -> None:
        token, params = int(sampled.tokens[place]), sequence.request.params
        first = sequence.last_token is None
        self._time(sequence, now)
        if token in sequence.ends:
            self.end(sequence, "stop", matched=token)
            return
        text = ""
        if sequence.stream is not None and sequence.matcher is not None:
            try:
                text = sequence.matcher.push(sequence.stream.push([token]))
            except InputError as refused:
                # The vocabulary of the model may be larger than that of its tokenizer.
                self.end(sequence, "error", error=str(refused))
                return
        sequence.tokens.append(token)
        self._metrics.generated_tokens.inc()
        logprobs: tuple[Logprob, ...] = ()
        if params.logprobs is not None:
            logprobs = (_logprob(token, place, sampled, params.logprobs),)
        if sequence.matcher is not None and sequence.matcher.found is not None:
            found = sequence.matcher.found
            self.end(sequence, "stop", tokens=(token,), text=text, logprobs=logprobs, matched=found)
        elif len(sequence.tokens) - sequence.prompt_length == params.max_tokens:
            self.end(sequence, "length", tokens=(token,), text=text, logprobs=logprobs)
        elif sequence.handover is not None:
            assert handed is not None
            self._complete(sequence, handed)
            self.end(sequence, "handover", tokens=(token,), text=text, logprobs=logprobs)
        else:
            self._news.append(
                Output(
                    sequence.request_id,
                    sequence.branch,
                    (token,),
                    text,
                    logprobs,
                    self._prompt_logprobs(sequence),
                    receipt=sequence.receipt(self._fingerprint.hex()) if first else None,
                    queue_seconds=sequence.queue_seconds if first else None,
                )
            )

    def _complete(self, sequence: Sequence, handed: Handed) -> None:
        """Give away what makes a state complete."""
        assert sequence.handover is not None
        assert handed.slot is not None
        sequence.handover.computed()
        blocks, meta = [part.read() for part in handed.blocks], describe(sequence, self._fingerprint)
        sequence.handover.complete(blocks, handed.count, meta, handed.slot.read())

    def _handed(self, entry: Entry) -> Handed:
        """Begin to read the blocks that a step completes, and at the last token everything else."""
        sequence, stop = entry.sequence, entry.start + entry.count
        paged, last = max(stop, sequence.restart.held), entry.place is not None or stop == sequence.cut
        full = self._books.blocks_for(paged) if last else paged // self._books.block_tokens
        blocks = sequence.blocks[sequence.handed : full]
        sequence.handed = max(sequence.handed, full)
        numbers = self._books.block_numbers(sequence.shard, blocks)
        return Handed(
            len(blocks),
            [self._device.read_blocks(part) for part in batches(numbers)],
            self._device.read_slot(self._books.number(sequence)) if last else None,
        )

    def _time(self, sequence: Sequence, now: float) -> None:
        if sequence.last_token is None:
            self._metrics.first_token_seconds.observe(now - sequence.arrival)
        else:
            self._metrics.token_seconds.observe(now - sequence.last_token)
        sequence.last_token = now

    def _publish(self, sequence: Sequence, record: StepRecord) -> None:
        self._traffic.save(sequence.shard, self._books.publish(sequence))
        boundary, windows = record.windows.get(sequence.id, (0, None))
        count = boundary // self._books.block_tokens
        if windows is not None and len(sequence.keys) >= count:
            self._checkpoints.keep(sequence.keys[count - 1], sequence.restart.replays, windows)

    def _holds_windows(self, sequence: Sequence, stop: int) -> bool:
        """At the last block boundary that the sequence has so far; behind its hit, where windows are whole."""
        size = self._books.block_tokens
        last = sequence.length // size * size
        return self._settings.window_checkpoints > 0 and stop == last and stop >= sequence.restart.held and stop > 0

    @staticmethod
    def _scores(entry: Entry) -> bool:
        """Whether an entry has prompt tokens whose log-probabilities are asked for and not known yet."""
        sequence = entry.sequence
        asked = sequence.request.params.prompt_logprobs is not None and sequence.branch == 0
        return asked and not sequence.scores_given and entry.start + 1 < sequence.prompt_length

    def _collect(self, entry: Entry, scores: Any) -> None:
        sequence, (logprobs, top_tokens, top_logprobs) = entry.sequence, scores
        most = sequence.request.params.prompt_logprobs
        assert most is not None
        begin = entry.last_row - entry.count + 1
        for offset in range(min(entry.count, sequence.prompt_length - 1 - entry.start)):
            position = entry.start + offset + 1
            row = begin + offset
            top = tuple(zip(top_tokens[row, :most].tolist(), top_logprobs[row, :most].tolist(), strict=True))
            sequence.prompt_scores[position] = Logprob(sequence.tokens[position], float(logprobs[row]), top)

    @staticmethod
    def _prompt_logprobs(sequence: Sequence) -> tuple[Logprob, ...] | None:
        """Once, when all are there."""
        scores = sequence.prompt_scores
        if sequence.scores_given or len(scores) != sequence.prompt_length - 1:
            return None
        if sequence.request.params.prompt_logprobs is None or sequence.branch:
            return None
        sequence.scores_given = True
        return tuple(scores[position] for position in range(1, sequence.prompt_length))

    def _count_rows(self, entry: Entry, ran: collections.Counter[Counter]) -> None:
        sequence, stop = entry.sequence, entry.start + entry.count
        replayed = max(0, min(stop, sequence.restart.held) - entry.start)
        sequence.computed_rows += entry.count
        sequence.replayed_rows += replayed
        ran[self._metrics.replayed_rows] += replayed
        decodes = entry.start >= sequence.prompt_length
        ran[self._metrics.decode_rows if decodes else self._metrics.prefill_rows] += entry.count
        kept = entry.count
        if self._settings.replay.decoder == "compact":
            kept = min(entry.count, max(0, stop - sequence.restart.decoder_floor))
        ran[self._metrics.decoder_rows] += kept


def _not_finite(entry: Entry, stepped: Any) -> str | None:
    """What a step gave for a sequence that must not be used. NaN in the pages need not show in any score."""
    if not stepped.finite[entry.first_row : entry.first_row + entry.count].all():
        return "the model's cached keys are not finite"
    if entry.place is not None and not stepped.sampled.finite[entry.place]:
        return "the model's scores are not finite"
    return None


def _logprob(token: int, place: int, sampled: Any, most: int) -> Logprob:
    top = zip(sampled.top_tokens[place, :most].tolist(), sampled.top_logprobs[place, :most].tolist(), strict=True)
    return Logprob(token, float(sampled.logprobs[place]), tuple(top))
