"""The host side of a step's input: chunks of requests packed into flat rows of a fixed shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from deepinfer_jax.errors import InputError
from deepinfer_jax.model.rows import Kept, Rows, TileShape

PADDING_POSITION = -1


@dataclasses.dataclass(frozen=True)
class StepShape:
    """Static shape of a step: ``decode_rows`` single rows, then ``prefill_tiles`` tiles of ``tile_rows`` rows.

    ``kept_tiles``: how many tiles of prefill rows run through the decoder layers, beside all decode rows; None where
    every row does.
    """

    decode_rows: int
    prefill_tiles: int = 0
    tile_rows: int = 0
    kept_tiles: int | None = None

    @property
    def rows(self) -> int:
        """All rows of the step."""
        return self.decode_rows + self.prefill_tiles * self.tile_rows

    @property
    def samples(self) -> int:
        """Tokens that a step can sample: one behind each decode row, one behind each tile."""
        return self.decode_rows + self.prefill_tiles

    @property
    def tiles(self) -> tuple[TileShape, ...]:
        """The tile groups of the rows."""
        return _groups(self.decode_rows, self.prefill_tiles, self.tile_rows)

    @property
    def kept(self) -> tuple[TileShape, ...] | None:
        """The tile groups of the rows that run through the decoder layers; None where all do."""
        return None if self.kept_tiles is None else _groups(self.decode_rows, self.kept_tiles, self.tile_rows)

    @property
    def kept_rows(self) -> int:
        """Rows that run through the decoder layers."""
        tiles = self.prefill_tiles if self.kept_tiles is None else self.kept_tiles
        return self.decode_rows + tiles * self.tile_rows


def _groups(decode_rows: int, tiles: int, tile_rows: int) -> tuple[TileShape, ...]:
    return tuple((count, rows) for count, rows in ((decode_rows, 1), (tiles, tile_rows)) if count and rows)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one request that a step runs: ``tokens`` at positions ``start ..``.

    ``image`` marks image-type tokens and ``image_embeddings`` gives the embeddings of those (rows that are not marked
    are not read); both cover exactly the chunk. ``floor`` is the lowest window position its queries see,
    ``decoder_floor`` that in decoder layers, which rows below it need not enter. Entries of tokens below ``held`` are
    in the pages already. ``source`` is the place, among the tokens sampled by the step before, of a one-token chunk's
    token that the host does not know yet; -1 where ``tokens`` are what they are.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    floor: int = 0
    held: int = 0
    decoder_floor: int = 0
    source: int = -1
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

    Leaves are host arrays, or abstract arrays of the same shapes: ``tokens``, ``slots``, ``positions``, ``floors``,
    ``held``, ``sources`` and ``decoder_floors`` int32 ``[rows]``, ``image`` bool ``[rows]``, ``image_embeddings`` float
    ``[rows hidden]``; ``kept`` int32 ``[kept_rows]`` numbers the rows that run through the decoder layers, -1 for
    padding. What is None is not asked for.
    """

    tokens: Any
    slots: Any
    positions: Any
    floors: Any
    image: Any
    image_embeddings: Any
    tiles: tuple[TileShape, ...] = struct.field(pytree_node=False)
    held: Any = None
    sources: Any = None
    decoder_floors: Any = None
    kept: Any = None
    kept_tiles: tuple[TileShape, ...] = struct.field(pytree_node=False, default=())

    def to_rows(self, previous: Int[Array, " samples"] | None = None) -> Rows:
        """The model's view of the batch; ``previous`` are the tokens sampled by the step before."""
        embeddings = self.image_embeddings
        tokens = jnp.asarray(self.tokens)
        if self.sources is not None and previous is not None:
            sources = jnp.asarray(self.sources)
            tokens = jnp.where(sources >= 0, previous[jnp.maximum(sources, 0)], tokens)
        return Rows.of(
            tokens,
            jnp.asarray(self.slots),
            jnp.asarray(self.positions),
            self.tiles,
            jnp.asarray(self.floors),
            jnp.asarray(self.image),
            None if embeddings is None else jnp.asarray(embeddings),
            None if self.held is None else jnp.asarray(self.held),
        )

    def to_kept(self, rows: Rows) -> Kept | None:
        """Which of the rows run through the decoder layers, and what they see there; None for all, unchanged."""
        if self.decoder_floors is None:
            return None
        floors = jnp.asarray(self.decoder_floors)
        if self.kept is None:
            return Kept.of(rows, jnp.arange(rows.tokens.shape[0], dtype=jnp.int32), floors, self.tiles)
        return Kept.of(rows, jnp.asarray(self.kept), floors, self.kept_tiles)


_INTEGERS = ("tokens", "slots", "positions", "floors", "held", "decoder_floors", "sources")


class Packed(NamedTuple):
    """A packed step. ``starts``: the row of each chunk's first token.

    ``ends``: the number of each chunk's last token among the rows that run through all layers, -1 if it does not.
    """

    batch: Batch
    starts: list[int]
    ends: list[int]


def pack(chunks: Sequence[Chunk], shape: StepShape, *, narrowed: bool = False, embedded: int = 0) -> Packed:
    """Pack chunks into a step: one-token chunks into decode rows while there are any, the others into prefill tiles.

    All arrays are fresh: a device may read them until the step is done.

    Args:
      chunks: what the step runs.
      shape: its shape.
      narrowed: decoder layers see less, or fewer rows (decoder replay): ``decoder_floors`` are part of the batch.
      embedded: width of image embeddings that the step takes even if no chunk brings any.

    Raises:
      InputError: the chunks do not fit the shape.
    """
    fields = {name: np.zeros(shape.rows, np.int32) for name in _INTEGERS}
    fields["positions"][:] = PADDING_POSITION
    fields["sources"][:] = -1
    image = np.zeros(shape.rows, bool)
    brought = next((chunk.image_embeddings for chunk in chunks if chunk.image_embeddings is not None), None)
    embeddings = None
    if embedded or brought is not None:
        width, dtype = (embedded, np.float32) if brought is None else (brought.shape[1], brought.dtype)
        embeddings = np.zeros((shape.rows, width), dtype)
    starts = _place(chunks, shape)
    for chunk, start in zip(chunks, starts, strict=True):
        span = slice(start, start + len(chunk.tokens))
        fields["tokens"][span] = chunk.tokens
        fields["slots"][span] = chunk.slot
        fields["positions"][span] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
        fields["floors"][span] = chunk.floor
        fields["held"][span] = chunk.held
        fields["decoder_floors"][span] = max(chunk.decoder_floor, chunk.floor)
        fields["sources"][span] = chunk.source
        if chunk.image is not None:
            image[span] = chunk.image
        if embeddings is not None and chunk.image_embeddings is not None:
            embeddings[span] = chunk.image_embeddings
    kept, ends = _keep(chunks, starts, shape)
    if not narrowed:
        del fields["decoder_floors"]
    batch = Batch(
        **fields,
        image=image,
        image_embeddings=embeddings,
        tiles=shape.tiles,
        kept=kept,
        kept_tiles=shape.kept or (),
    )
    return Packed(batch, starts, ends)


def kept_tokens(chunk: Chunk) -> int:
    """How many tokens of a chunk run through the decoder layers: those from its decoder floor on."""
    return min(len(chunk.tokens), max(0, chunk.start + len(chunk.tokens) - chunk.decoder_floor))


def _keep(chunks: Sequence[Chunk], starts: Sequence[int], shape: StepShape) -> tuple[np.ndarray | None, list[int]]:
    """The rows that run through the decoder layers, and where each chunk ends among them."""
    last = [start + len(chunk.tokens) - 1 for chunk, start in zip(chunks, starts, strict=True)]
    if shape.kept_tiles is None:
        return None, last
    kept = np.full(shape.kept_rows, -1, np.int32)
    kept[: shape.decode_rows] = np.arange(shape.decode_rows)
    ends, used = [], 0
    for chunk, end in zip(chunks, last, strict=True):
        count = kept_tokens(chunk)
        if end < shape.decode_rows:
            ends.append(end)
        elif count == 0:
            ends.append(-1)
        else:
            begin = shape.decode_rows + used * shape.tile_rows
            used += -(-count // shape.tile_rows)
            if used > shape.kept_tiles:
                raise InputError("step", f"{used} kept tiles or more", f"what fits {shape}", "choose a larger shape")
            kept[begin : begin + count] = np.arange(end + 1 - count, end + 1)
            ends.append(begin + count - 1)
    return kept, ends


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
