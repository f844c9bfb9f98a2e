"""A thread that talks to a block store, so that nobody else waits for one: look-ups first, then blocks to save.

Whatever a store does, only blocks are missing afterwards. A look-up answers piece by piece and may be used before it is
complete.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deepinfer_jax.cache.blocks import ChainKey, Replays
from deepinfer_jax.cache.records import StateFormat
from deepinfer_jax.cache.store import BlockStore, StoredBlock, pack_block, store_key, unpack_block
from deepinfer_jax.errors import SnapshotError
from deepinfer_jax.metrics import Metrics

# Blocks in one call of the store.
_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class Unsaved:
    """A block to save: its identity, the replays that it descends from, and the planes it is number ``place`` of."""

    key: ChainKey
    replays: Replays
    planes: Any
    place: int


@dataclasses.dataclass(eq=False)
class Lookup:
    """What a store has of some blocks, as far as it has answered.

    Attributes:
        keys: identities of the blocks, in token order.
        found: sound content by place among the keys: exact content first, then that of other histories.
        done: no more will come.
        wanted: somebody still waits for it.
    """

    keys: tuple[ChainKey, ...]
    found: dict[int, list[StoredBlock]] = dataclasses.field(default_factory=dict)
    done: bool = False
    wanted: bool = True


class StoreWorker:
    """One thread over one store. Its methods never wait for the store, apart from :meth:`wait`, flush and close."""

    def __init__(
        self,
        store: BlockStore,
        form: StateFormat,
        metrics: Metrics,
        *,
        bounded: bool,
        most_unsaved: int,
        most_found: int,
    ) -> None:
        """Start with nothing to do.

        Args:
          store: may be slow, full, broken or wrong.
          form: of the blocks.
          metrics: where blocks, losses and failures are counted.
          bounded: look for content of histories with bounded replays too.
          most_unsaved: blocks that may wait to be saved; the oldest are given up for newer ones.
          most_found: blocks that all look-ups together may hold.
        """
        self._store, self._form, self._metrics = store, form, metrics
        self._provenances = (False, True) if bounded else (False,)
        self._most_unsaved, self._most_found, self._found = most_unsaved, most_found, 0
        self._lookups: collections.deque[Lookup] = collections.deque()
        self._unsaved: collections.deque[Unsaved] = collections.deque()
        self._changed = threading.Condition()
        self._active = self._closed = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="store")

    def look_up(self, keys: Sequence[ChainKey]) -> Lookup:
        """Begin to ask for blocks."""
        lookup = Lookup(tuple(keys))
        with self._changed:
            self._lookups.append(lookup)
            self._start()
            lookup.done = self._closed
        return lookup

    def release(self, lookup: Lookup) -> None:
        """Nobody needs this look-up or its blocks any more."""
        with self._changed:
            self._found -= sum(map(len, lookup.found.values()))
            lookup.found, lookup.wanted = {}, False

    def save(self, blocks: Sequence[Unsaved]) -> None:
        """Put blocks into the store some time."""
        with self._changed:
            self._unsaved.extend(blocks)
            while len(self._unsaved) > self._most_unsaved:
                self._unsaved.popleft()
                self._metrics.unsaved_blocks.inc()
            self._start()

    def wait(self, lookups: Sequence[Lookup], seconds: float) -> None:
        """Until one of some look-ups is done, for some seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: any(lookup.done for lookup in lookups), seconds)

    def flush(self) -> None:
        """Wait until nothing is left to do."""
        with self._changed:
            self._changed.wait_for(lambda: not self._active)

    def close(self) -> None:
        """End the thread, behind the store's current call; what is left to do is given up."""
        with self._changed:
            self._closed = True
            for lookup in self._lookups:
                lookup.done = True
            self._lookups.clear()
            self._unsaved.clear()
        self._executor.shutdown(wait=True)

    def _start(self) -> None:
        if not self._active and not self._closed:
            self._active = True
            self._executor.submit(self._run)

    def _run(self) -> None:
        while True:
            with self._changed:
                lookup = self._lookups.popleft() if self._lookups else None
                blocks = [] if lookup else [self._unsaved.popleft() for _ in range(min(_AT_ONCE, len(self._unsaved)))]
                if lookup is None and not blocks:
                    self._active = False
                    self._changed.notify_all()
                    return
            try:
                if lookup is not None:
                    self._fetch(lookup)
                else:
                    self._put(blocks)
            except Exception:
                # A store may be anyone's code, and none of its failures may reach a request.
                self._metrics.store_failures.inc()
            if lookup is not None:
                with self._changed:
                    lookup.done = True
                    self._changed.notify_all()

    def _fetch(self, lookup: Lookup) -> None:
        for begin in range(0, len(lookup.keys), _AT_ONCE):
            if not lookup.wanted or self._closed:
                return
            chains = lookup.keys[begin : begin + _AT_ONCE]
            asked = [
                (place, store_key(chain, bounded=bounded))
                for place, chain in enumerate(chains, begin)
                for bounded in self._provenances
            ]
            values = self._store.get_many([key for _, key in asked])
            for (place, key), value in zip(asked, values, strict=True):
                block = None if value is None else self._opened(key, value)
                if block is not None and not self._keep(lookup, place, block):
                    return

    def _opened(self, key: bytes, value: bytes) -> StoredBlock | None:
        try:
            return unpack_block(key, value, self._form)
        except SnapshotError:
            self._metrics.damaged_blocks.inc()
            return None

    def _keep(self, lookup: Lookup, place: int, block: StoredBlock) -> bool:
        with self._changed:
            if not lookup.wanted or self._found >= self._most_found:
                return False
            lookup.found.setdefault(place, []).append(block)
            self._found += 1
            return True

    def _put(self, blocks: Sequence[Unsaved]) -> None:
        items = []
        for block in blocks:
            key = store_key(block.key, bounded=bool(block.replays))
            items.append((key, pack_block(key, block.planes, block.place, self._form, block.replays)))
        self._store.put_many(items)
        self._metrics.saved_blocks.inc(len(items))
