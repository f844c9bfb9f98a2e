"""How parameters are put together from stored matrices, block by block.

A parameter may consist of many stored pieces: experts behind each other, w1 above w3. A *block* is a rectangular part
of one of its arrays, given by bounds ``(start, stop)`` per axis; it is filled piece by piece straight into its place,
so that memory is bounded by the block whatever the parameter's size.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from deepinfer_jax.model.params import SCALE_COLUMNS, Parameter, Stored
from deepinfer_jax.quant import dequantise_fp4_rows, dequantise_fp8_blocks, dequantise_fp8_rows

Bounds = tuple[tuple[int, int], ...]
"""First index and index after the last, per axis."""

Rows = Callable[[int, int], np.ndarray]
"""Rows ``start`` up to ``stop`` of a stored array, as they are stored."""


class Plane(enum.Enum):
    """Which array of a parameter: its values, or the two arrays it is packed in."""

    VALUES = "values"
    DATA = "data"
    SCALE = "scale"

    def shape(self, item: Parameter, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of this array for a parameter, or a piece of it, of logical ``shape``."""
        if self is Plane.VALUES:
            return shape
        return item.data_shape(shape) if self is Plane.DATA else item.scale_shape(shape)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A matrix or vector as it is stored: rows of a parameter that were written, and quantised, together.

    ``shape`` is logical (unpacked). ``scale`` is None where the values are stored plain. ``origin`` says what is stored
    and where, for errors.
    """

    name: str
    shape: tuple[int, ...]
    origin: str
    weight: Rows
    scale: Rows | None

    def read(self, item: Parameter, plane: Plane, rows: tuple[int, int], rest: tuple[slice, ...]) -> np.ndarray:
        """Rows, and of these the columns ``rest``, of one array of this piece."""
        if plane is Plane.SCALE:
            assert self.scale is not None
            return self.scale(*rows).view(np.uint8)[:, *rest]
        if plane is Plane.DATA:
            return self.weight(*rows).view(np.uint8)[:, *rest]
        if self.scale is None:
            return self.weight(*rows)[:, *rest]
        return self._dequantised(item, rows, *rest)

    def _dequantised(self, item: Parameter, rows: tuple[int, int], columns: slice) -> np.ndarray:
        """Whole tiles are decoded and then cut, since a tile shares one scale."""
        assert self.scale is not None
        top, bottom = _widened(rows, item.scale_rows, self.shape[0])
        left, right = _widened((columns.start, columns.stop), SCALE_COLUMNS, self.shape[1])
        per_byte = 2 if item.stored is Stored.FP4_ROWS else 1
        weight = self.weight(top, bottom).view(np.uint8)[:, left // per_byte : right // per_byte]
        scale_bounds = top // item.scale_rows, -(-bottom // item.scale_rows)
        scale = self.scale(*scale_bounds).view(np.uint8)[:, left // SCALE_COLUMNS : -(-right // SCALE_COLUMNS)]
        dequantise = {
            Stored.FP8_BLOCKS: dequantise_fp8_blocks,
            Stored.FP8_ROWS: dequantise_fp8_rows,
            Stored.FP4_ROWS: dequantise_fp4_rows,
        }[item.stored]
        values = dequantise(weight, scale)
        return values[rows[0] - top : rows[1] - top, columns.start - left : columns.stop - left]


@runtime_checkable
class Storage(Protocol):
    """A checkpoint as a source of pieces."""

    def pieces(self, item: Parameter, stack: int) -> Sequence[Piece]:
        """The pieces of a parameter, or of its ``stack``-th stacked matrix, from the top down.

        Raises:
          CheckpointError: a piece is missing or misshapen; names the tensor, its file and what was expected.
        """


def fill(out: np.ndarray, storage: Storage, item: Parameter, plane: Plane, bounds: Bounds) -> None:
    """Read the block ``bounds`` of one array of a parameter into ``out``, which has the block's shape."""
    if not item.stacked:
        _fill_matrix(out, storage.pieces(item, 0), item, plane, bounds)
        return
    (first, last), *inner = bounds
    for stack in range(first, last):
        _fill_matrix(out[stack - first], storage.pieces(item, stack), item, plane, tuple(inner))


def _fill_matrix(out: np.ndarray, pieces: Sequence[Piece], item: Parameter, plane: Plane, bounds: Bounds) -> None:
    (first, last), *others = bounds
    rest = tuple(slice(*other) for other in others)
    top = 0
    for piece in pieces:
        bottom = top + plane.shape(item, piece.shape)[0]
        start, stop = max(first, top), min(last, bottom)
        if start < stop:
            out[start - first : stop - first] = piece.read(item, plane, (start - top, stop - top), rest)
        top = bottom


def whole(shape: tuple[int, ...]) -> Bounds:
    """The bounds of a whole array."""
    return tuple((0, length) for length in shape)


def lengths(bounds: Bounds) -> tuple[int, ...]:
    """The shape of a block."""
    return tuple(stop - start for start, stop in bounds)


def _widened(bounds: tuple[int, int], multiple: int, length: int) -> tuple[int, int]:
    start, stop = bounds
    return start - start % multiple, min(length, -(-stop // multiple) * multiple)
