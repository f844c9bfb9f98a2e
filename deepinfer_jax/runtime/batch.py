"""The host side of a step's input: chunks of requests packed into flat rows of a fixed shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from deepinfer_jax.errors import InputError
from deepinfer_jax.model.rows import Rows, TileShape

PADDING_POSITION = -1


@dataclasses.dataclass(frozen=True)
class StepShape:
    """Static shape of a step: ``decode_rows`` single rows, then ``prefill_tiles`` tiles of ``tile_rows`` rows."""

    decode_rows: int
    prefill_tiles: int = 0
    tile_rows: int = 0

    @property
    def rows(self) -> int:
        """All rows of the step."""
        return self.decode_rows + self.prefill_tiles * self.tile_rows

    @property
    def tiles(self) -> tuple[TileShape, ...]:
        """The tile groups of the rows."""
        groups = ((self.decode_rows, 1), (self.prefill_tiles, self.tile_rows))
        return tuple((tiles, rows) for tiles, rows in groups if tiles and rows)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one request that a step runs: ``tokens`` at positions ``start ..``.

    ``image`` marks image-type tokens and ``image_embeddings`` gives the embeddings of those (rows that are not marked
    are not read); both cover exactly the chunk. ``floor`` is the lowest window position its queries see.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    floor: int = 0
    image: np.ndarray | None = None
    image_embeddings: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            raise InputError("chunk", list(self.tokens), "at least one token")
        for name in ("image", "image_embeddings"):
            part = getattr(self, name)
            if part is not None and len(part) != len(self.tokens):
                raise InputError(f"chunk {name}", f"{len(part)} rows", f"one per token, {len(self.tokens)}")


@struct.dataclass
class Batch:
    """Packed step input, one entry per row; padding rows have position -1 and slot 0.

    Leaves are host arrays, or abstract arrays of the same shapes: ``tokens``, ``slots``, ``positions`` and ``floors``
    int32 ``[rows]``, ``image`` bool ``[rows]``, ``image_embeddings`` float ``[rows hidden]`` or None.
    """

    tokens: Any
    slots: Any
    positions: Any
    floors: Any
    image: Any
    image_embeddings: Any
    tiles: tuple[TileShape, ...] = struct.field(pytree_node=False)

    def to_rows(self) -> Rows:
        """The model's view of the batch."""
        embeddings = self.image_embeddings
        return Rows.of(
            jnp.asarray(self.tokens),
            jnp.asarray(self.slots),
            jnp.asarray(self.positions),
            self.tiles,
            jnp.asarray(self.floors),
            jnp.asarray(self.image),
            None if embeddings is None else jnp.asarray(embeddings),
        )


def pack(chunks: Sequence[Chunk], shape: StepShape) -> tuple[Batch, list[int]]:
    """Pack chunks into a step: one-token chunks into decode rows while there are any, the others into prefill tiles.

    Returns the batch, with fresh arrays, and the row index of every chunk's first token.

    Raises:
      InputError: the chunks do not fit the shape.
    """
    fields = {name: np.zeros(shape.rows, np.int32) for name in ("tokens", "slots", "positions", "floors")}
    fields["positions"][:] = PADDING_POSITION
    image = np.zeros(shape.rows, bool)
    embedded = [chunk.image_embeddings for chunk in chunks if chunk.image_embeddings is not None]
    embeddings = np.zeros((shape.rows, embedded[0].shape[1]), embedded[0].dtype) if embedded else None
    starts = _place(chunks, shape)
    for chunk, start in zip(chunks, starts, strict=True):
        span = slice(start, start + len(chunk.tokens))
        fields["tokens"][span] = chunk.tokens
        fields["slots"][span] = chunk.slot
        fields["positions"][span] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
        fields["floors"][span] = chunk.floor
        if chunk.image is not None:
            image[span] = chunk.image
        if embeddings is not None and chunk.image_embeddings is not None:
            embeddings[span] = chunk.image_embeddings
    return Batch(**fields, image=image, image_embeddings=embeddings, tiles=shape.tiles), starts


def _place(chunks: Sequence[Chunk], shape: StepShape) -> list[int]:
    starts = []
    decode_used, tiles_used = 0, 0
    for chunk in chunks:
        if len(chunk.tokens) == 1 and decode_used < shape.decode_rows:
            starts.append(decode_used)
            decode_used += 1
            continue
        needed = -(-len(chunk.tokens) // shape.tile_rows) if shape.tile_rows else 1
        if tiles_used + needed > shape.prefill_tiles:
            raise InputError("step", f"{len(chunks)} chunks", f"what fits {shape}", "split or postpone chunks")
        starts.append(shape.decode_rows + tiles_used * shape.tile_rows)
        tiles_used += needed
    return starts
