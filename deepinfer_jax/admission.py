"""Requests on their way to a slot: prefix hits, restarts, branches and those that gave way before."""

from __future__ import annotations

import collections
from collections.abc import Iterable

import numpy as np

from deepinfer_jax.arrival import Arrival, Receiver, insert
from deepinfer_jax.books import Books
from deepinfer_jax.cache.blocks import Hit
from deepinfer_jax.checkpoints import Checkpoints, Fork
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.metrics import Metrics
from deepinfer_jax.preemption import Leaving
from deepinfer_jax.replay import Replay, restart
from deepinfer_jax.runtime.choices import ChoiceTable
from deepinfer_jax.runtime.device import Device
from deepinfer_jax.runtime.transfer import batches
from deepinfer_jax.scheduler import Waiting, admit
from deepinfer_jax.sequence import Sequence
from deepinfer_jax.settings import EngineSettings
from deepinfer_jax.store_traffic import StoreTraffic


class Admissions:
    """Waiting sequences, and everything that happens when one gets a slot."""

    def __init__(
        self,
        device: Device,
        books: Books,
        table: ChoiceTable,
        checkpoints: Checkpoints,
        config: ModelConfig,
        settings: EngineSettings,
        metrics: Metrics,
        traffic: StoreTraffic,
        receiver: Receiver,
    ) -> None:
        self._device, self._books, self._table, self._checkpoints = device, books, table, checkpoints
        self._receiver = receiver
        self._config, self._settings, self._metrics, self._traffic = config, settings, metrics, traffic
        self._waiting: dict[int, Sequence] = {}
        # Branches of a request wait for the end of its prompt, which the first one runs.
        self._branches: dict[int, list[Sequence]] = {}
        self._forks: dict[int, Fork] = {}

    @property
    def count(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting) + sum(map(len, self._branches.values()))

    def sequences(self) -> list[Sequence]:
        """All sequences without a slot."""
        return [*self._waiting.values(), *(branch for held in self._branches.values() for branch in held)]

    def add(self, branches: list[Sequence]) -> None:
        """Queue a new request."""
        first, *others = branches
        self._waiting[first.id] = first
        if first.suspended is None:
            self._traffic.ask(first)
        if others:
            self._branches[first.request_id] = others

    def return_to(self, sequence: Sequence) -> None:
        """Queue a sequence that gave way."""
        self._waiting[sequence.id] = sequence

    def settle(self) -> None:
        """Bring what gave way to the host; the device has run everything before it by now."""
        for sequence in self._waiting.values():
            if isinstance(sequence.suspended, Leaving):
                sequence.suspended = sequence.suspended.pack(sequence, self._receiver.form)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that ended. Branches whose prompt nobody runs any more run it themselves."""
        self._traffic.forget(sequence)
        if self._waiting.pop(sequence.id, None) is not None:
            self._begun(sequence)
        held = self._branches.get(sequence.request_id, [])
        if sequence in held:
            held.remove(sequence)
        elif sequence.branch == 0:
            for branch in self._branches.pop(sequence.request_id, []):
                self._waiting[branch.id] = branch
                self._traffic.ask(branch)

    def passed(self, sequence: Sequence) -> None:
        """A step with a sequence's rows is on its way: at the end of the prompt its other branches may begin."""
        if sequence.computed < sequence.prompt_length or sequence.request_id not in self._branches:
            return
        branches = [branch for branch in self._branches.pop(sequence.request_id) if branch.finish_reason is None]
        if not branches:
            return
        full = (sequence.prompt_length - 1) // self._books.block_tokens
        shared = sequence.blocks[:full]
        self._books.pool.retain(sequence.shard, shared)
        (last,) = batches(self._books.block_numbers(sequence.shard, [sequence.blocks[full]]))
        fork = Fork(
            shard=sequence.shard,
            blocks=shared,
            windows=self._device.read_slot(self._books.number(sequence)),
            last=self._device.read_blocks(last),
            waiting=len(branches),
        )
        for branch in branches:
            branch.restart, branch.published = sequence.restart, full
            self._waiting[branch.id], self._forks[branch.id] = branch, fork

    def admit(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Give slots to waiting sequences as the policy says. Returns those that got one."""
        if not self._waiting:
            return []
        waiting = [
            self._describe(sequence)
            for sequence in self._waiting.values()
            if sequence.finish_reason is None and not self._traffic.waits(sequence)
        ]
        seated = []
        for admission in admit(waiting, self._books.shards(running)):
            sequence = self._waiting[admission.id]
            if self._seat(sequence, admission.shard):
                del self._waiting[sequence.id]
                seated.append(sequence)
        if seated:
            latest = max(sequence.id for sequence in seated)
            for sequence in self._waiting.values():
                sequence.passed += sequence.id < latest
        return seated

    def _describe(self, sequence: Sequence) -> Waiting:
        blocks, shard = self._books.blocks_for(sequence.stop), None
        fork = self._forks.get(sequence.id)
        if fork is not None:
            blocks, shard = blocks - len(fork.blocks), fork.shard
        return Waiting(
            sequence.id,
            blocks,
            len(sequence.tokens),
            sequence.id,
            sequence.request.priority,
            sequence.passed,
            shard,
        )

    def _seat(self, sequence: Sequence, shard: int) -> bool:
        if sequence.suspended is not None:
            seated = self._resume(sequence, shard)
        elif sequence.id in self._forks:
            seated = self._branch_off(sequence)
        else:
            seated = self._begin(sequence, shard)
        if seated:
            self._load(sequence)
        return seated

    def _resume(self, sequence: Sequence, shard: int) -> bool:
        """Where it gave way, here or in another engine."""
        if not self._books.seat(sequence, shard, [], self._books.blocks_for(sequence.stop)):
            return False
        state = sequence.suspended
        insert(sequence, state if isinstance(state, Arrival) else self._receiver.open(state), self._device, self._books)
        sequence.suspended = None
        return True

    def _branch_off(self, sequence: Sequence) -> bool:
        """At the prompt's last token, which is run again for this branch's own first token."""
        fork = self._forks[sequence.id]
        self._books.pool.retain(fork.shard, fork.blocks)
        if not self._books.seat(sequence, fork.shard, fork.blocks, self._books.blocks_for(sequence.prompt_length)):
            self._books.pool.release(fork.shard, fork.blocks)
            return False
        self._device.write_slot(self._books.number(sequence), fork.windows.on_device)
        (last,) = batches(self._books.block_numbers(fork.shard, [sequence.blocks[len(fork.blocks)]]))
        self._device.write_blocks(last, fork.last.on_device)
        sequence.computed = sequence.prompt_length - 1
        sequence.confirmed = len(fork.blocks) * self._books.block_tokens
        sequence.hit_tokens = sequence.confirmed
        self._begun(sequence)
        return True

    def _begun(self, sequence: Sequence) -> None:
        """A branch begins, or never will: its fork is freed with the last one."""
        fork = self._forks.pop(sequence.id, None)
        if fork is not None:
            fork.waiting -= 1
            if fork.waiting == 0:
                self._books.pool.release(fork.shard, fork.blocks)

    def _begin(self, sequence: Sequence, shard: int) -> bool:
        """From the start, or behind a prefix hit, which the store may continue."""
        books, request = self._books, sequence.request
        replay = self._settings.replay
        adopts = request.read_cache and request.params.prompt_logprobs is None
        if sequence.preemptions and replay.mode == "bounded":
            adopts = False
        hit = books.find(sequence, shard, bounded=replay.mode == "bounded") if adopts else Hit((), ())
        if not books.seat(sequence, shard, list(hit.blocks), books.blocks_for(sequence.stop)):
            books.pool.release(shard, hit.blocks)
            return False
        stored = self._traffic.behind(sequence, hit)
        self._traffic.adopt(sequence, len(hit.blocks), stored)
        self._traffic.forget(sequence)
        count, replays = len(hit.blocks) + len(stored), stored[-1].replays if stored else hit.replays
        tokens = count * books.block_tokens
        windows = self._checkpoints.find(sequence.keys[count - 1], replays) if tokens else None
        if request.params.prompt_logprobs is not None:
            replay = Replay()
        begin = restart(
            replay,
            self._config,
            tokens,
            replays,
            sequence.prompt_length,
            windows_held=windows is not None,
        )
        if windows is not None and begin.start == tokens:
            self._device.write_slot(books.number(sequence), windows.on_device)
        elif begin.start:
            self._look_back(sequence, begin.start)
        sequence.restart, sequence.computed, sequence.confirmed = begin, begin.start, tokens
        sequence.published = count
        if not sequence.preemptions:
            sequence.hit_tokens, sequence.stored_tokens = tokens, len(stored) * books.block_tokens
            self._metrics.prompt_tokens.inc(sequence.prompt_length)
            self._metrics.hit_tokens.inc(tokens)
            self._metrics.stored_tokens.inc(sequence.stored_tokens)
        return True

    def _look_back(self, sequence: Sequence, start: int) -> None:
        back = self._device.lookback
        if not back:
            return
        positions = np.arange(start - back, start)
        image = np.zeros(back, bool)
        for span in sequence.request.images:
            image |= (positions >= span.start) & (positions < span.stop)
        tokens = np.asarray(sequence.tokens, np.int32)[np.maximum(positions, 0)]
        self._device.seed_history(self._books.number(sequence), tokens, image, positions.astype(np.int32))

    def _load(self, sequence: Sequence) -> None:
        """How the slot's tokens are chosen, and what penalties know."""
        slot, params = self._books.number(sequence), sequence.request.params
        ends = sorted(sequence.ends) if params.min_tokens else []
        self._table.set(slot, params, sequence.seed, ends, sequence.prompt_length)
        if params.penalised:
            vocabulary = self._config.vocab_size
            generated = np.zeros(vocabulary, np.int32)
            for token, count in collections.Counter(sequence.tokens[sequence.prompt_length :]).items():
                generated[token] = count
            in_prompt = np.zeros(vocabulary, bool)
            in_prompt[list(sequence.request.prompt)] = True
            self._device.load_counts(slot, generated, in_prompt)
