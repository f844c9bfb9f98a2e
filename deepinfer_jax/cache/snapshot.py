"""A request's state as sealed sections: the form in which it leaves one engine and enters another.

| section | content |
|---|---|
| ``meta`` | token ids, and what of their state is in the snapshot |
| ``page(block, group)`` | the entries of one block of the request, complete ones only, then their index keys |
| ``slot(layer)`` | window keys by position, of backbone layers and then of draft stages; at most a window of them |
| ``pending(group)`` | the compressor's value and gate of the last token, where that one begins a pair |

Blocks are numbered in token order, not by their place in a pool, and window keys by position, not by their place in a
ring: both ends may differ in pools, slots and ring lengths. Window keys below the request's floors are left out. They
were never computed, and what stands in their place may be another request's. Engram's look-back follows from the ids.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from deepinfer_jax.cache.blocks import EXACT, Replays
from deepinfer_jax.cache.records import BlockPlanes, SlotPlanes, StateFormat, block_count, put_rows, take_rows
from deepinfer_jax.cache.sections import HEADER_BYTES, Section, open_section, seal
from deepinfer_jax.errors import SnapshotError

Snapshot = Mapping[str, bytes | memoryview]
"""Sections by name."""

META = "meta"
FINGERPRINT_BYTES = 32
IMAGE_ID = -1
"""Compressed id of image-type tokens, which blocks Engram's look-back."""

_LENGTH = struct.Struct("<I")
_NUMBERS = ("prompt_length", "computed", "floor", "decoder_floor", "held")


class ImageSpan(NamedTuple):
    """The positions ``start`` up to ``end`` of an image whose content has this digest."""

    start: int
    end: int
    digest: bytes


class Rings(NamedTuple):
    """Ring lengths of an engine's slots, in rows."""

    window: int
    pending: int
    history: int

    @classmethod
    def of(cls, slot: Any) -> Rings:
        """Those of ``SlotPlanes`` of arrays or abstract arrays."""
        window = getattr(slot.window, "scale", slot.window)
        return cls(window.shape[1], slot.pending.shape[1], slot.history.shape[0])


@dataclasses.dataclass(frozen=True)
class SnapshotMeta:
    """What a snapshot is of.

    Attributes:
        fingerprint: of the state, 32 bytes.
        tokens: token ids, prompt and generated; those behind ``computed`` were not run yet.
        prompt_length: how many of them are the prompt.
        computed: tokens that were run, and whose state is in the snapshot.
        floor: lowest window position that encoder layers see for the rest of the prompt; no key below it exists.
        decoder_floor: the same of decoder layers and draft stages.
        held: entries of tokens below it are in the pages whatever was run, since the prompt began with a hit.
        replays: bounded replays that the state descends from.
        images: image spans in order.

    Raises:
      SnapshotError: the values contradict each other.
    """

    fingerprint: bytes
    tokens: tuple[int, ...]
    prompt_length: int
    computed: int
    floor: int = 0
    decoder_floor: int = 0
    held: int = 0
    replays: Replays = EXACT
    images: tuple[ImageSpan, ...] = ()

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name in _NUMBERS:
            _check_number(name, getattr(self, name), 1 if name == "prompt_length" else 0, length)
        for hit in self.replays:
            _check_number("replays", hit, 1, length)
        behind = 0
        for span in self.images:
            _check_number("images", span.start, behind, length)
            _check_number("images", span.end, span.start + 1, length)
            behind = span.end
        if length and not (min(self.tokens) >= 0 and max(self.tokens) < 1 << 31):
            raise SnapshotError("meta tokens", min(self.tokens), "ids from 0 below 2^31")
        if len(self.fingerprint) != FINGERPRINT_BYTES:
            raise SnapshotError("meta fingerprint", self.fingerprint, f"{FINGERPRINT_BYTES} bytes")

    @property
    def paged(self) -> int:
        """Tokens whose complete entries are in the pages: more than were run while a hit's window is replayed."""
        return max(self.computed, self.held)

    def to_bytes(self) -> bytes:
        """The section ``meta``: a JSON object in one spelling, its length before it, and the ids as int32."""
        spans = [[span.start, span.end, span.digest.hex()] for span in self.images]
        fields = {name: getattr(self, name) for name in _NUMBERS}
        document = json.dumps(
            fields | {"replays": self.replays, "images": spans}, sort_keys=True, separators=(",", ":")
        ).encode("ascii")
        ids = np.asarray(self.tokens, "<i4").tobytes()
        return seal(META, self.fingerprint, _LENGTH.pack(len(document)) + document + ids)

    @classmethod
    def from_bytes(cls, content: bytes | memoryview, fingerprint: bytes) -> SnapshotMeta:
        """Read the section ``meta`` of a state of this fingerprint.

        Raises:
          SnapshotError: it does not open, or is not what :meth:`to_bytes` writes.
        """
        payload = open_section(META, fingerprint, content).payload
        try:
            (length,) = _LENGTH.unpack(payload[: _LENGTH.size])
            behind = _LENGTH.size + length
            document = json.loads(bytes(payload[_LENGTH.size : behind]))
            meta = cls(
                fingerprint=fingerprint,
                tokens=tuple(np.frombuffer(payload[behind:], "<i4").tolist()),
                replays=tuple(document.pop("replays")),
                images=tuple(
                    ImageSpan(start, end, bytes.fromhex(hexes)) for start, end, hexes in document.pop("images")
                ),
                **document,
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
            raise SnapshotError(META, repr(error), "fields as this version writes them") from error
        if meta.to_bytes() != content:
            raise SnapshotError(META, "a second spelling of the same fields", "fields as this version writes them")
        return meta


def _check_number(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise SnapshotError(f"meta {name}", value, f"a whole number, {least} to {most}")


def page_name(block: int, group: int) -> str:
    """The section of a block of the request, in token order, and a group."""
    return f"page({block}, {group})"


def slot_name(layer: int) -> str:
    """The section of a layer's window keys; draft stages follow the backbone's layers."""
    return f"slot({layer})"


def pending_name(group: int) -> str:
    """The section of a group's unfinished pair."""
    return f"pending({group})"


def section_names(meta: SnapshotMeta, form: StateFormat) -> list[str]:
    """All sections of a complete snapshot."""
    blocks, groups = range(form.layout.blocks_for(meta.paged)), range(len(form.layout.ratios))
    return [
        META,
        *(page_name(block, group) for block in blocks for group in groups),
        *(slot_name(layer) for layer in range(form.layers)),
        *(pending_name(group) for group in _open_groups(meta, form)),
    ]


def snapshot_bytes(meta: SnapshotMeta, form: StateFormat) -> int:
    """Bytes of all sections of a complete snapshot, without making them."""
    blocks, pending = form.layout.blocks_for(meta.paged), len(_open_groups(meta, form))
    entries = sum(meta.paged // ratio for ratio in form.layout.ratios)
    keys = sum(meta.computed - _window_start(meta, layer, form) for layer in range(form.layers))
    content = entries * form.page_record + keys * form.window.size + pending * form.pending.size
    headers = blocks * len(form.layout.ratios) + form.layers + pending
    return content + headers * HEADER_BYTES + len(meta.to_bytes())


def pack(meta: SnapshotMeta, blocks: Any, slot: Any, form: StateFormat) -> dict[str, bytes]:
    """A complete snapshot of what was read from a device.

    Args:
      meta: what it is of.
      blocks: ``BlockPlanes`` of the request's blocks in token order; further ones are ignored.
      slot: ``SlotPlanes`` of its slot.
      form: how the model's state is cut into records.
    """
    return {META: meta.to_bytes()} | pack_blocks(meta.paged, 0, blocks, form) | pack_slot(meta, slot, form)


def pack_blocks(paged: int, first: int, blocks: Any, form: StateFormat) -> dict[str, bytes]:
    """The page sections of consecutive blocks from the request's block ``first`` on.

    ``paged``: tokens whose entries are in the pages; ``blocks`` as in :func:`pack`.
    """
    stop = min(first + block_count(blocks), form.layout.blocks_for(paged))
    packed = {}
    for block in range(first, stop):
        for group in range(len(form.layout.ratios)):
            name, entries = page_name(block, group), _entries(paged, block, group, form)
            content = form.page(blocks, block - first, group, entries)
            packed[name] = seal(name, form.fingerprint, content, form.page_record, _first_entry(block, group, form))
    return packed


def pack_slot(meta: SnapshotMeta, slot: Any, form: StateFormat) -> dict[str, bytes]:
    """The sections of window keys and unfinished pairs; ``slot`` as in :func:`pack`."""
    rings, packed = Rings.of(slot), {}
    for layer in range(form.layers):
        start = _window_start(meta, layer, form)
        places = np.arange(start, meta.computed) % rings.window
        content = form.window.to_bytes(take_rows(slot.window, (layer, places)))
        packed[slot_name(layer)] = seal(slot_name(layer), form.fingerprint, content, form.window.size, start)
    last = meta.computed - 1
    for group in _open_groups(meta, form):
        content = form.pending.to_bytes(slot.pending[group, last % rings.pending])
        packed[pending_name(group)] = seal(pending_name(group), form.fingerprint, content, form.pending.size, last)
    return packed


def open_meta(snapshot: Snapshot, form: StateFormat) -> SnapshotMeta:
    """What a snapshot is of.

    Raises:
      SnapshotError: the section is missing or refused, or is of another fingerprint.
    """
    if META not in snapshot:
        raise SnapshotError(META, "missing", "a snapshot with this section")
    return SnapshotMeta.from_bytes(snapshot[META], form.fingerprint)


def unpack(
    snapshot: Snapshot,
    rings: Rings,
    form: StateFormat,
    token_map: Int[np.ndarray, " vocabulary"] | None = None,
    fill: float = 0.0,
) -> tuple[SnapshotMeta, BlockPlanes, SlotPlanes]:
    """Check a complete snapshot, and give its content as the receiver's device keeps it.

    Args:
      snapshot: sections by name.
      rings: ring lengths of the receiver.
      form: how the model's state is cut into records.
      token_map: compressed id of every token id, for a model with Engram.
      fill: value of rows that hold nothing; tests use NaN.

    Returns:
      What it is of, its blocks in token order, and its slot.

    Raises:
      SnapshotError: a section is missing, refused, or not one of this snapshot.
    """
    meta = open_meta(snapshot, form)
    for name in set(snapshot) - set(section_names(meta, form)):
        raise SnapshotError(name, "present", f"the sections of {meta.computed} computed and {meta.held} held tokens")
    blocks = unpack_blocks(snapshot, meta, 0, form.layout.blocks_for(meta.paged), form, fill)
    return meta, blocks, unpack_slot(snapshot, meta, rings, form, token_map, fill)


def unpack_blocks(
    snapshot: Snapshot, meta: SnapshotMeta, first: int, stop: int, form: StateFormat, fill: float = 0.0
) -> BlockPlanes:
    """The request's blocks ``first`` up to ``stop``; other sections may be missing. See :func:`unpack`."""
    planes = form.empty_blocks(stop - first, fill)
    for block in range(first, stop):
        for group in range(len(form.layout.ratios)):
            unpack_page(snapshot, meta.paged, block, group, form, planes, block - first)
    return planes


def unpack_page(
    snapshot: Snapshot, paged: int, block: int, group: int, form: StateFormat, planes: BlockPlanes, place: int
) -> None:
    """Put a page of a request of ``paged`` tokens into planes, as their block number ``place``.

    Raises:
      SnapshotError: the section is missing, refused, or not one of this request.
    """
    start, entries = _first_entry(block, group, form), _entries(paged, block, group, form)
    section = _open(snapshot, page_name(block, group), form, form.page_record, start, entries)
    form.read_page(section.payload, planes, place, group)


def unpack_slot(
    snapshot: Snapshot,
    meta: SnapshotMeta,
    rings: Rings,
    form: StateFormat,
    token_map: Int[np.ndarray, " vocabulary"] | None = None,
    fill: float = 0.0,
) -> SlotPlanes:
    """The request's rings; page sections may be missing. See :func:`unpack`."""
    window = form.window.empty((form.layers, rings.window), fill)
    for layer in range(form.layers):
        start = _window_start(meta, layer, form)
        section = _open(snapshot, slot_name(layer), form, form.window.size, start, meta.computed - start)
        places = _places(start, meta.computed, rings.window)
        put_rows(window, (layer, places), form.window.from_bytes(section.payload))
    pending = form.pending.empty((len(form.layout.ratios), rings.pending), fill)
    last = meta.computed - 1
    for group in _open_groups(meta, form):
        section = _open(snapshot, pending_name(group), form, form.pending.size, last, 1)
        put_rows(
            pending, (group, _places(last, meta.computed, rings.pending)), form.pending.from_bytes(section.payload)
        )
    return SlotPlanes(window, pending, _history(meta, rings.history, token_map))


def _open(snapshot: Snapshot, name: str, form: StateFormat, record_bytes: int, first: int, records: int) -> Section:
    if name not in snapshot:
        raise SnapshotError(name, "missing", "a snapshot with this section")
    section = open_section(name, form.fingerprint, snapshot[name])
    wanted = (record_bytes, first, records)
    if (section.record_bytes, section.first, section.records) != wanted:
        found = f"{section.records} records of {section.record_bytes} bytes from {section.first} on"
        raise SnapshotError(name, found, f"{records} records of {record_bytes} bytes from {first} on")
    return section


def _first_entry(block: int, group: int, form: StateFormat) -> int:
    return block * (form.layout.block_tokens // form.layout.ratios[group])


def _entries(paged: int, block: int, group: int, form: StateFormat) -> int:
    """Complete entries of a group in a block."""
    ratio = form.layout.ratios[group]
    return min(form.layout.block_tokens // ratio, max(0, paged // ratio - _first_entry(block, group, form)))


def _open_groups(meta: SnapshotMeta, form: StateFormat) -> list[int]:
    """Groups in which the last token has begun an entry that it did not complete."""
    # A pair that begins below ``held`` is in the pages, and may begin before anything was run.
    begun = meta.computed >= meta.held
    return [group for group, ratio in enumerate(form.layout.ratios) if begun and meta.computed % ratio]


def _window_start(meta: SnapshotMeta, layer: int, form: StateFormat) -> int:
    """The first position of a layer's window keys that exist and can still be seen."""
    floor = meta.floor if layer < form.encoder_layers else max(meta.floor, meta.decoder_floor)
    return min(meta.computed, max(0, meta.computed - form.sliding_window, floor))


def _places(start: int, stop: int, ring: int) -> np.ndarray:
    if stop - start > ring:
        raise ValueError(f"a ring of {ring} rows cannot hold {stop - start}")
    return np.arange(start, stop) % ring


def _history(meta: SnapshotMeta, ring: int, token_map: np.ndarray | None) -> np.ndarray:
    """Compressed ids of the last computed tokens; image-type where there is none."""
    history = np.full(ring, IMAGE_ID, np.int32)
    if token_map is None:
        return history
    positions = np.arange(max(0, meta.computed - ring), meta.computed)
    ids = np.asarray(token_map, np.int32)[np.asarray(meta.tokens, np.int64)[positions]]
    for span in meta.images:
        ids[(positions >= span.start) & (positions < span.end)] = IMAGE_ID
    history[positions % ring] = ids
    return history
