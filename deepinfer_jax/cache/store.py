"""Stores of blocks by content: what one worker computed, another need not compute again.

A store maps keys to values, both bytes, and may lose any of them at any time: that costs recomputation and nothing
else. The value of a block holds the pages of all groups, and opens under the block's own key alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from deepinfer_jax.cache.blocks import EXACT, ChainKey, Replays
from deepinfer_jax.cache.records import BlockPlanes, StateFormat
from deepinfer_jax.cache.sections import open_section, seal, split
from deepinfer_jax.errors import SnapshotError

_EXACT_SUFFIX, _BOUNDED_SUFFIX = b"e", b"b"
_CHECKSUM_BYTES = 8
_HIT_LENGTH = struct.Struct("<Q")


@runtime_checkable
class BlockStore(Protocol):
    """Values by key, in batches. Calls may come from any thread. What is missing, late or damaged is not there."""

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has a value; it may be gone when it is asked for."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, None where there is none."""

    def put_many(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Keep values by key, as far as there is room; a key's later value replaces its earlier one."""


@dataclasses.dataclass(frozen=True)
class StoreCounters:
    """What a store has done: values found and not found, given up for room, found damaged; and what it holds now."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    damaged: int = 0
    values: int = 0
    bytes: int = 0


class MemoryStore:
    """A store in this process's memory that gives up the values least recently used; safe to use from any thread."""

    def __init__(self, capacity_bytes: int) -> None:
        """``capacity_bytes``: most bytes of keys and values together."""
        if capacity_bytes < 0:
            raise ValueError(f"a capacity of {capacity_bytes} bytes")
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._values: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
        self._bytes = self._hits = self._misses = self._evictions = self._damaged = 0

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._values for key in keys]

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self._get(key) for key in keys]

    def put_many(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        for key, value in items:
            checksum = _checksum(key, value)
            with self._lock:
                self._drop(key)
                size = len(key) + len(value)
                if size > self.capacity_bytes:
                    continue
                while self._bytes + size > self.capacity_bytes:
                    self._drop(next(iter(self._values)))
                    self._evictions += 1
                self._values[key] = (value, checksum)
                self._bytes += size

    def counters(self) -> StoreCounters:
        """What happened so far."""
        with self._lock:
            return StoreCounters(
                self._hits, self._misses, self._evictions, self._damaged, len(self._values), self._bytes
            )

    def _get(self, key: bytes) -> bytes | None:
        with self._lock:
            kept = self._values.get(key)
            if kept is not None:
                self._values.move_to_end(key)
        # Hashing a value is the long part; others need not wait for it.
        sound = kept is not None and _checksum(key, kept[0]) == kept[1]
        with self._lock:
            self._hits += sound
            self._misses += not sound
            if kept is not None and not sound:
                self._damaged += 1
                if self._values.get(key) is kept:
                    self._drop(key)
        return kept[0] if kept is not None and sound else None

    def _drop(self, key: bytes) -> None:
        kept = self._values.pop(key, None)
        if kept is not None:
            self._bytes -= len(key) + len(kept[0])


def _checksum(key: bytes, value: bytes) -> bytes:
    digest = hashlib.blake2b(value, digest_size=_CHECKSUM_BYTES)
    digest.update(key)
    return digest.digest()


def store_key(chain: ChainKey, *, bounded: bool) -> bytes:
    """The key of a block: its identity and its provenance, exact or from a history with bounded replays."""
    return chain + (_BOUNDED_SUFFIX if bounded else _EXACT_SUFFIX)


@dataclasses.dataclass(frozen=True)
class StoredBlock:
    """The content of one block, planes of length 1, and the replays that it descends from."""

    planes: BlockPlanes
    replays: Replays


def pack_block(key: bytes, planes: Any, place: int, form: StateFormat, replays: Replays = EXACT) -> bytes:
    """The value of a full block.

    Args:
      key: see :func:`store_key`.
      planes: ``BlockPlanes`` read from a device; the block is number ``place`` of them.
      place: see ``planes``.
      form: how the model's state is cut into records.
      replays: bounded replays that it descends from.
    """
    history = b"".join(map(_HIT_LENGTH.pack, replays))
    sections = [seal(_name(key, None), form.fingerprint, history, _HIT_LENGTH.size)]
    for group, ratio in enumerate(form.layout.ratios):
        content = form.page(planes, place, group, form.layout.block_tokens // ratio)
        sections.append(seal(_name(key, group), form.fingerprint, content, form.page_record))
    return b"".join(sections)


def unpack_block(key: bytes, value: bytes | memoryview, form: StateFormat) -> StoredBlock:
    """What :func:`pack_block` put into a value.

    Raises:
      SnapshotError: it is cut short or damaged, belongs to another key, or is of another fingerprint.
    """
    sections = split(value)
    if len(sections) != 1 + len(form.layout.ratios):
        accepted = f"{1 + len(form.layout.ratios)} sections, the replays and a page of each group"
        raise SnapshotError(f"block {key.hex()}", f"{len(sections)} sections", accepted)
    history = open_section(_name(key, None), form.fingerprint, sections[0])
    if history.record_bytes != _HIT_LENGTH.size:
        raise SnapshotError(_name(key, None), f"{history.record_bytes} bytes each", f"{_HIT_LENGTH.size} bytes each")
    planes = form.empty_blocks(1)
    for group, (ratio, content) in enumerate(zip(form.layout.ratios, sections[1:], strict=True)):
        section = open_section(_name(key, group), form.fingerprint, content)
        wanted = (form.page_record, form.layout.block_tokens // ratio)
        if (section.record_bytes, section.records) != wanted:
            found = f"{section.records} records of {section.record_bytes} bytes"
            raise SnapshotError(_name(key, group), found, f"{wanted[1]} records of {wanted[0]} bytes")
        form.read_page(section.payload, planes, 0, group)
    return StoredBlock(planes, tuple(hit for (hit,) in _HIT_LENGTH.iter_unpack(history.payload)))


def _name(key: bytes, group: int | None) -> str:
    return f"{key.hex()} {'replays' if group is None else f'page({group})'}"
