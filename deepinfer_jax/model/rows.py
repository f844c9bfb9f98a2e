"""Rows: the tokens of one step, flat, each knowing its request slot and absolute position."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Shaped

# (tiles, rows per tile): consecutive rows that attend together.
TileShape = tuple[int, int]


@struct.dataclass
class Rows:
    """Step input of the model; one entry per row.

    Rows of a request are consecutive, with consecutive positions; a padding row has position -1 and contributes
    nothing. ``tiles`` cuts the rows, in order, into groups of equal tiles; a tile holds rows of one request, then
    padding, and a request that needs several tiles has them one after the other.
    """

    tokens: Int[Array, " rows"]
    slots: Int[Array, " rows"]
    positions: Int[Array, " rows"]
    floors: Int[Array, " rows"]  # lowest visible window position (replay), one per request; 0 for exact computation
    held: Int[Array, " rows"]  # entries of tokens below it are in the pages already and stay as they are
    image: Bool[Array, " rows"]  # any token of an image span: start, image, newline, end
    image_embeddings: Float[Array, "rows hidden"] | None  # replaces the token embedding where ``image``
    first_row: Int[Array, " rows"]  # index of the request's first row in this step
    last_row: Int[Array, " rows"]
    tiles: tuple[TileShape, ...] = struct.field(pytree_node=False)

    @classmethod
    def of(
        cls,
        tokens: Int[Array, " rows"],
        slots: Int[Array, " rows"],
        positions: Int[Array, " rows"],
        tiles: tuple[TileShape, ...],
        floors: Int[Array, " rows"] | None = None,
        image: Bool[Array, " rows"] | None = None,
        image_embeddings: Float[Array, "rows hidden"] | None = None,
        held: Int[Array, " rows"] | None = None,
    ) -> Rows:
        """Complete the step input: defaults for text rows, and where each row's request begins and ends."""
        count = tokens.shape[0]
        index = jnp.arange(count, dtype=jnp.int32)
        continues = (slots[1:] == slots[:-1]) & (positions[1:] == positions[:-1] + 1) & (positions[:-1] >= 0)
        begins = jnp.concatenate([jnp.ones((1,), bool), ~continues])
        ends = jnp.concatenate([~continues, jnp.ones((1,), bool)])
        return cls(
            tokens=tokens,
            slots=slots,
            positions=positions,
            floors=jnp.zeros_like(positions) if floors is None else floors,
            held=jnp.zeros_like(positions) if held is None else held,
            image=jnp.zeros((count,), bool) if image is None else image,
            image_embeddings=image_embeddings,
            first_row=jax.lax.cummax(jnp.where(begins, index, 0)),
            last_row=jax.lax.cummin(jnp.where(ends, index, count), reverse=True),
            tiles=tiles,
        )

    @property
    def valid(self) -> Bool[Array, " rows"]:
        """False for padding rows."""
        return self.positions >= 0

    def visible_entries(self, ratio: int) -> Int[Array, " rows"]:
        """Compressed entries each row may see: ``floor((position + 1) / ratio)``; 0 for padding rows."""
        return (self.positions + 1) // ratio

    def tile_starts(self) -> list[tuple[slice, TileShape, Int[Array, " tiles"]]]:
        """For each tile group: its slice of the rows, its shape, and the first row index of every tile."""
        groups, start = [], 0
        for tiles, tile_rows in self.tiles:
            stop = start + tiles * tile_rows
            groups.append((slice(start, stop), (tiles, tile_rows), jnp.arange(start, stop, tile_rows, dtype=jnp.int32)))
            start = stop
        return groups


@struct.dataclass
class Kept:
    """The rows of a step that run through the decoder layers: the end of each request's rows, or all of them.

    ``index``: the number of each kept row among the step's rows, -1 for padding. ``rows``: the kept rows themselves, in
    tiles of their own, with the floors that hold in decoder layers; their entries are in the pages before these run.
    """

    index: Int[Array, " kept"]
    rows: Rows

    @classmethod
    def of(
        cls,
        rows: Rows,
        index: Int[Array, " kept"],
        floors: Int[Array, " rows"],
        tiles: tuple[TileShape, ...],
    ) -> Kept:
        """The rows with these numbers; ``floors`` are those of all rows in decoder layers."""
        place = jnp.maximum(index, 0)
        kept = Rows.of(
            tokens=rows.tokens[place],
            slots=jnp.where(index < 0, 0, rows.slots[place]),
            positions=jnp.where(index < 0, -1, rows.positions[place]),
            tiles=tiles,
            floors=floors[place],
            image=rows.image[place] & (index >= 0),
        )
        return cls(index, dataclasses.replace(kept, held=kept.positions + 1))


def sequence_rows(tokens: Int[Array, "sequences length"], tile_rows: int) -> Rows:
    """Whole sequences as rows: every sequence is a request of its own, padded to a multiple of ``tile_rows``.

    Row ``s * padded_length + t`` is token t of sequence s.
    """
    sequences, length = tokens.shape
    tiles = -(-length // tile_rows)
    pad = tiles * tile_rows - length
    positions = jnp.where(jnp.arange(length + pad) < length, jnp.arange(length + pad), -1).astype(jnp.int32)
    return Rows.of(
        tokens=jnp.pad(tokens, ((0, 0), (0, pad))).reshape(-1),
        slots=jnp.repeat(jnp.arange(sequences, dtype=jnp.int32), length + pad),
        positions=jnp.tile(positions, sequences),
        tiles=((sequences * tiles, tile_rows),),
    )


def padded_sequence_rows(tokens: Int[Array, " rows"], length: Int[Array, ""], tile_rows: int) -> Rows:
    """One whole sequence of ``length`` tokens, in rows that are a multiple of ``tile_rows``; the rest is padding."""
    count = tokens.shape[0]
    positions = jnp.arange(count, dtype=jnp.int32)
    return Rows.of(
        tokens=tokens,
        slots=jnp.zeros_like(positions),
        positions=jnp.where(positions < length, positions, -1),
        tiles=((count // tile_rows, tile_rows),),
    )


def at_positions(
    values: Shaped[Array, "rows *item"], rows: Rows, request: Int[Array, " tiles"], positions: Int[Array, "tiles keys"]
) -> tuple[Shaped[Array, "tiles keys *item"], Bool[Array, "tiles keys"]]:
    """This step's row values of a request at absolute positions, and whether the step holds such a row.

    ``request`` names each tile's request by any of its rows. Where the step has no such row the value is arbitrary
    but taken from an existing row.
    """
    first, last = rows.first_row[request], rows.last_row[request]
    begin, end = rows.positions[first], rows.positions[last]
    present = (positions >= begin[:, None]) & (positions <= end[:, None]) & (begin >= 0)[:, None]
    index = jnp.clip(first[:, None] + positions - begin[:, None], first[:, None], last[:, None])
    return values[index], present
