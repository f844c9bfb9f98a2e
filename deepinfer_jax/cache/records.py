"""Rows of the caches on the host: as *planes*, the way a device keeps them, and as *records*, the way they travel.

On a device the data and the scales of a released format are separate planes. A record is one row of its own, data and
then scales; records of released shape:

| row | channels | record of a released format, bytes | in bfloat16 |
|---|---|---|---|
| main entry | 512 | 256 data + 32 scales = 288 | 1,024 |
| index key | 128 | 64 + 4 = 68 | 256 |
| window key | 512 | 512 + 16 = 528 | 1,024 |

Rows in plain floating point are their bytes, little-endian. bfloat16 may be held as its bits in uint16 on either side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from deepinfer_jax.cache.fingerprint import cache_format, state_fingerprint
from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import Numerics


class PackedRows(NamedTuple):
    """Rows in a released format: uint8 ``data`` ``[*batch bytes]`` and ``scale`` ``[*batch groups]``."""

    data: Any
    scale: Any


class BlockPlanes(NamedTuple):
    """Content of some blocks, on the host or a device: ``[blocks rows_per_block channels]``, or ``PackedRows`` of it.

    ``main`` are entries, ``index`` the index keys in the same rows.
    """

    main: Any
    index: Any


class SlotPlanes(NamedTuple):
    """Content of one slot, on the host or a device.

    ``window``: ``[layers window_ring head_dim]``, or ``PackedRows`` of it. ``pending``: float32
    ``[groups pending_ring 2 * head_dim]``. ``history``: int32 ``[history_ring]``.
    """

    window: Any
    pending: Any
    history: Any


def block_count(planes: Any) -> int:
    """How many blocks ``BlockPlanes`` of arrays are of."""
    count: int = getattr(planes.main, "scale", planes.main).shape[0]
    return count


def map_rows(function: Callable[..., Any], *rows: Any) -> Any:
    """``function`` over rows that may be packed: then over their planes, one after the other.

    Packed rows are ``PackedRows``, or whatever else has these two planes.
    """
    if hasattr(rows[0], "scale"):
        return PackedRows(function(*(one.data for one in rows)), function(*(one.scale for one in rows)))
    return function(*rows)


def take_rows(rows: Any, at: Any) -> Any:
    """Rows at an index of their leading axes."""
    return map_rows(lambda plane: plane[at], rows)


def put_rows(rows: Any, at: Any, values: Any) -> None:
    """Set host rows at an index of their leading axes."""

    def put(plane: np.ndarray, content: np.ndarray) -> None:
        plane[at] = content

    map_rows(put, rows, values)


class _Format(NamedTuple):
    """Channels in a byte of data, channels that share a byte of scale, and the scale byte that is NaN."""

    channels_per_byte: int
    group: int
    nan_scale: int


# Part of the wire format; a test compares them with those of the kernels.
FORMATS = {"fp8_32": _Format(1, 32, 0xFF), "fp4_32": _Format(2, 32, 0xFF), "fp4_16": _Format(2, 16, 0x7F)}


@dataclasses.dataclass(frozen=True)
class Record:
    """Rows of ``channels`` channels in the released format ``form``, or in ``dtype`` where that is None."""

    channels: int
    form: str | None
    dtype: np.dtype

    @property
    def widths(self) -> tuple[int, ...]:
        """Bytes of a row in each of its planes."""
        if self.form is None:
            return (self.channels * self.dtype.itemsize,)
        form = FORMATS[self.form]
        return self.channels // form.channels_per_byte, self.channels // form.group

    @property
    def size(self) -> int:
        """Bytes of one record."""
        return sum(self.widths)

    def to_bytes(self, rows: Any) -> bytes:
        """The records of all rows ``[*batch channels]``, an array or packed, in order.

        Raises:
          ValueError: the rows have another width or format.
        """
        planes = (rows.data, rows.scale) if hasattr(rows, "scale") else (rows,)
        columns = [_as_bytes(plane) for plane in planes]
        if tuple(column.shape[1] for column in columns) != self.widths:
            raise ValueError(f"rows of {[column.shape[1] for column in columns]} bytes, expected {self.widths}")
        return np.concatenate(columns, axis=1).tobytes()

    def from_bytes(self, content: bytes | memoryview) -> np.ndarray | PackedRows:
        """Rows ``[records channels]`` in new arrays; bfloat16 comes back as bfloat16."""
        records = np.frombuffer(content, np.uint8).reshape(-1, self.size)
        if self.form is not None:
            data = self.widths[0]
            return PackedRows(records[:, :data].copy(), records[:, data:].copy())
        return records.view(f"<u{self.dtype.itemsize}").astype(f"u{self.dtype.itemsize}").view(self.dtype)

    def empty(self, shape: tuple[int, ...], fill: float = 0.0) -> np.ndarray | PackedRows:
        """New rows ``[*shape channels]`` of ``fill``; NaN poisons packed rows too, anything else makes them zero."""
        if self.form is None:
            return np.full((*shape, self.channels), fill, self.dtype)
        data, scales = self.widths
        scale = FORMATS[self.form].nan_scale if fill != fill else 0
        return PackedRows(np.zeros((*shape, data), np.uint8), np.full((*shape, scales), scale, np.uint8))


def _as_bytes(plane: np.ndarray) -> np.ndarray:
    """Rows as little-endian bytes ``[rows bytes]``."""
    rows = np.ascontiguousarray(plane).reshape(-1, plane.shape[-1])
    size = plane.dtype.itemsize
    return rows.view(f"u{size}").astype(f"<u{size}", copy=False).view(np.uint8)


@dataclasses.dataclass(frozen=True)
class StateFormat:
    """What the two ends of a transfer must agree on: how a request's state is cut into records.

    Attributes:
        fingerprint: identity of everything the content depends on, see
            :func:`deepinfer_jax.cache.fingerprint.state_fingerprint`.
        layout: row arithmetic of a block.
        main, index, window, pending: the records of the caches.
        sliding_window: tokens in the window.
        layers: backbone layers and draft stages, of which the first ``encoder_layers`` are on the encoder side.
    """

    fingerprint: bytes
    layout: PageLayout
    main: Record
    index: Record
    window: Record
    pending: Record
    sliding_window: int
    layers: int
    encoder_layers: int

    @classmethod
    def of(cls, weights_id: str, config: ModelConfig, numerics: Numerics, layout: PageLayout) -> StateFormat:
        """The format of a model whose weights have this id, see :mod:`deepinfer_jax.checkpoint.digest`."""
        plain = np.dtype(np.float32)
        return cls(
            fingerprint=state_fingerprint(weights_id, config, numerics, layout.block_tokens),
            layout=layout,
            main=Record(config.head_dim, cache_format("main", numerics), numerics.dtype),
            index=Record(config.index_head_dim, cache_format("index", numerics), numerics.dtype),
            window=Record(config.head_dim, cache_format("window", numerics), numerics.dtype),
            pending=Record(2 * config.head_dim, None, plain),
            sliding_window=config.sliding_window,
            layers=config.num_hidden_layers + config.draft_stages,
            encoder_layers=config.encoder_layers,
        )

    @property
    def page_record(self) -> int:
        """Bytes of an entry with its index key."""
        return self.main.size + self.index.size

    def page(self, planes: Any, place: int, group: int, entries: int) -> bytes:
        """The first ``entries`` entries of a group in block ``place`` of ``BlockPlanes``, then their index keys."""
        offset = self.layout.group_offsets[group]
        at = (place, slice(offset, offset + entries))
        return self.main.to_bytes(take_rows(planes.main, at)) + self.index.to_bytes(take_rows(planes.index, at))

    def read_page(self, content: bytes | memoryview, planes: BlockPlanes, place: int, group: int) -> None:
        """Put what :meth:`page` gave into block ``place`` of the planes."""
        entries = len(content) // self.page_record
        offset = self.layout.group_offsets[group]
        at, cut = (place, slice(offset, offset + entries)), entries * self.main.size
        put_rows(planes.main, at, self.main.from_bytes(content[:cut]))
        put_rows(planes.index, at, self.index.from_bytes(content[cut:]))

    def empty_blocks(self, blocks: int, fill: float = 0.0) -> BlockPlanes:
        """New planes of some blocks, see :meth:`Record.empty`."""
        shape = (blocks, self.layout.rows_per_block)
        return BlockPlanes(self.main.empty(shape, fill), self.index.empty(shape, fill))
