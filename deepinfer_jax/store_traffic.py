"""The engine's traffic with a block store: finished blocks go there, and prefix hits continue with what it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from deepinfer_jax.books import Books
from deepinfer_jax.cache.blocks import ChainKey, Hit, Replays
from deepinfer_jax.cache.records import BlockPlanes, StateFormat, map_rows
from deepinfer_jax.cache.store import BlockStore, StoredBlock
from deepinfer_jax.metrics import Metrics
from deepinfer_jax.runtime.device import Device
from deepinfer_jax.runtime.host_planes import block_planes
from deepinfer_jax.runtime.inflight import InFlight
from deepinfer_jax.runtime.transfer import BLOCKS_AT_ONCE, batches
from deepinfer_jax.sequence import Sequence
from deepinfer_jax.settings import EngineSettings
from deepinfer_jax.store_worker import Lookup, StoreWorker, Unsaved

# Most seconds that an engine with nothing else to do waits at a time.
_REST = 0.002


@dataclasses.dataclass(frozen=True)
class _Named:
    """A block of the device, numbered over all shards, and what its content is."""

    number: int
    key: ChainKey
    replays: Replays


class StoreTraffic:
    """What an engine saves to a store and what it hopes to get from one; without a store, nothing.

    A block is saved once the step that filled it has been read and found finite.
    """

    def __init__(
        self,
        device: Device,
        books: Books,
        settings: EngineSettings,
        metrics: Metrics,
        clock: Callable[[], float],
        store: BlockStore | None = None,
        form: StateFormat | None = None,
    ) -> None:
        """``form``: of the blocks; needed where there is a ``store``."""
        self._device, self._books, self._settings = device, books, settings
        self._metrics, self._clock = metrics, clock
        self._worker: StoreWorker | None = None
        if store is not None:
            if form is None:
                raise ValueError("a store without the format of its blocks")
            self._worker = StoreWorker(
                store,
                form,
                metrics,
                bounded=settings.replay.mode == "bounded",
                most_unsaved=settings.store_queue,
                most_found=books.n_shards * books.pool.blocks,
            )
        self._lookups: dict[int, tuple[Lookup, float]] = {}
        self._finite: list[_Named] = []
        self._flying: list[tuple[list[_Named], InFlight]] = []

    # From the store.

    def ask(self, sequence: Sequence) -> None:
        """Look for the full blocks of a new sequence that reads the cache; its last token is always computed."""
        request = sequence.request
        if self._worker is None or not request.read_cache or request.params.prompt_logprobs is not None:
            return
        keys = self._books.identify(sequence)[: (sequence.stop - 1) // self._books.block_tokens]
        if keys:
            lookup = self._worker.look_up(keys)
            self._lookups[sequence.id] = lookup, self._clock() + self._settings.store_patience

    def waits(self, sequence: Sequence) -> bool:
        """Whether a sequence's answer is still worth waiting for."""
        lookup, until = self._lookups.get(sequence.id, (None, 0.0))
        return lookup is not None and not lookup.done and self._clock() < until

    def behind(self, sequence: Sequence, hit: Hit) -> list[StoredBlock]:
        """The blocks with which the store continues a hit of the device, up to the first that is missing.

        Histories continue as in :meth:`deepinfer_jax.cache.blocks.BlockPool.match`.
        """
        lookup, _ = self._lookups.get(sequence.id, (None, 0.0))
        if lookup is None:
            return []
        bounded = self._settings.replay.mode == "bounded"
        taken: list[StoredBlock] = []
        replays = hit.replays
        for place in range(len(hit.blocks), len(lookup.keys)):
            histories = [replays, (*replays, place * self._books.block_tokens)] if bounded else [()]
            # The thread may still be adding content.
            fitting = [block for block in tuple(lookup.found.get(place, ())) if block.replays in histories]
            if not fitting:
                break
            taken.append(min(fitting, key=lambda block: len(block.replays)))
            replays = taken[-1].replays
        return taken

    def adopt(self, sequence: Sequence, first: int, stored: list[StoredBlock]) -> None:
        """Write content into a seated sequence's blocks from number ``first`` on, and let others find it."""
        if not stored:
            return
        blocks = sequence.blocks[first : first + len(stored)]
        planes = BlockPlanes(
            map_rows(_joined, *(block.planes.main for block in stored)),
            map_rows(_joined, *(block.planes.index for block in stored)),
        )
        numbers = self._books.block_numbers(sequence.shard, blocks)
        for part, content in block_planes(numbers, planes, self._device.block_planes):
            self._device.write_blocks(part, content)
        for place, (number, block) in enumerate(zip(blocks, stored, strict=True), first):
            self._books.pool.publish(sequence.shard, number, sequence.keys[place], block.replays)

    def forget(self, sequence: Sequence) -> None:
        """Nothing more is needed for a sequence: it has begun, or never will."""
        lookup, _ = self._lookups.pop(sequence.id, (None, 0.0))
        if lookup is not None and self._worker is not None:
            self._worker.release(lookup)

    def rest(self) -> None:
        """Let an engine that has nothing else to do wait a moment for an answer."""
        lookups = [lookup for lookup, _ in self._lookups.values()]
        if self._worker is not None and lookups:
            self._worker.wait(lookups, _REST)

    # To the store.

    def save(self, shard: int, named: list[tuple[int, ChainKey, Replays]]) -> None:
        """Blocks of a shard that have just been named, whose content is finite."""
        if self._worker is None:
            return
        for block, key, replays in named:
            (number,) = self._books.block_numbers(shard, [block])
            self._finite.append(_Named(number, key, replays))

    def turn(self, *, idle: bool) -> None:
        """Behind a step that was read: take the blocks read from the device, and begin to read those just confirmed.

        ``idle``: no other step is on its way, so that nothing is gained by waiting for the next turn.
        """
        self._collect()
        finite, self._finite = self._finite, []
        for begin in range(0, len(finite), BLOCKS_AT_ONCE):
            part = finite[begin : begin + BLOCKS_AT_ONCE]
            (numbers,) = batches([named.number for named in part])
            self._flying.append((part, self._device.read_blocks(numbers)))
        if idle:
            self._collect()

    def flush(self) -> None:
        """Wait until every confirmed block has reached the store or was given up."""
        self.turn(idle=True)
        if self._worker is not None:
            self._worker.flush()

    def close(self) -> None:
        """End the store's thread; nothing is asked or saved any more."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None
        self._lookups.clear()

    def _collect(self) -> None:
        flying, self._flying = self._flying, []
        for part, planes in flying:
            if self._worker is not None:
                content = planes.read()
                blocks = [Unsaved(named.key, named.replays, content, place) for place, named in enumerate(part)]
                self._worker.save(blocks)


def _joined(*planes: np.ndarray) -> np.ndarray:
    return np.concatenate(planes)
