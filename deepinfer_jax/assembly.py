"""From the pieces that the scheduler chose to the arrays of one step, over all shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Items

import jax
import numpy as np

from deepinfer_jax.books import Books
from deepinfer_jax.runtime.batch import Chunk, StepShape, kept_tokens, pack
from deepinfer_jax.runtime.choices import ChoiceTable
from deepinfer_jax.runtime.device import StepSettings
from deepinfer_jax.runtime.sampler import Choices
from deepinfer_jax.runtime.step import StepInput
from deepinfer_jax.sequence import Sequence


@dataclasses.dataclass
class Entry:
    """A sequence's part of a step.

    ``start``, ``count``: its tokens. ``place``: where its sampled token stands among those of all shards, ``source``
    among those of its own; None where it samples none. ``last_row``: its last row among the kept rows of all shards, -1
    where none is kept. ``first_row``: its first one among all rows of all shards.
    """

    sequence: Sequence
    start: int
    count: int
    place: int | None
    source: int
    last_row: int
    first_row: int


@dataclasses.dataclass
class Assembled:
    """One step, ready to be dispatched."""

    shape: StepShape
    step: StepInput
    choices: Choices
    entries: list[Entry]


@dataclasses.dataclass(frozen=True)
class Part:
    """``count`` tokens of a sequence from ``start`` on; ``samples``: a token follows them."""

    sequence: Sequence
    start: int
    count: int
    samples: bool

    def chunk(self) -> Chunk:
        """The rows of the part. A token that is on its way is named by its place among the step before's samples."""
        sequence = self.sequence
        stop = self.start + self.count
        unknown = stop > len(sequence.tokens)
        assert not unknown or self.count == 1
        assert sequence.slot is not None
        image, embeddings = sequence.image_rows(self.start, stop)
        return Chunk(
            slot=sequence.slot,
            start=self.start,
            tokens=[0] if unknown else sequence.tokens[self.start : stop],
            floor=sequence.restart.floor,
            held=sequence.restart.held,
            decoder_floor=sequence.restart.decoder_floor,
            source=sequence.source if unknown else -1,
            image=image,
            image_embeddings=embeddings,
        )


def choose_shape(shards: Items[Items[Chunk]], shapes: Items[StepShape]) -> StepShape:
    """The smallest shape that every shard's chunks fit; shapes come in ascending order.

    The largest decode step is a shape, and so is a prefill step for every number of tiles up to the largest, or more.
    """
    for shape in sorted(shapes, key=lambda shape: (shape.rows, shape.kept_rows)):
        if all(_fits(chunks, shape) for chunks in shards):
            return shape
    raise AssertionError("the scheduler chose more than any step holds")


def _fits(chunks: Items[Chunk], shape: StepShape) -> bool:
    # Steps without tiles take no image embeddings.
    if not shape.prefill_tiles and any(chunk.image_embeddings is not None for chunk in chunks):
        return False
    singles = [chunk for chunk in chunks if len(chunk.tokens) == 1]
    tiled = [*singles[shape.decode_rows :], *(chunk for chunk in chunks if len(chunk.tokens) > 1)]
    if not tiled or not shape.tile_rows:
        return not tiled
    tiles = sum(-(-len(chunk.tokens) // shape.tile_rows) for chunk in tiled)
    kept = sum(-(-kept_tokens(chunk) // shape.tile_rows) for chunk in tiled)
    return tiles <= shape.prefill_tiles and (shape.kept_tiles is None or kept <= shape.kept_tiles)


def assemble(
    parts: Items[Part],
    shapes: Items[StepShape],
    books: Books,
    table: ChoiceTable,
    *,
    fixed: StepSettings,
) -> Assembled:
    """Pack the parts of a step. All arrays are fresh."""
    by_shard = [[part for part in parts if part.sequence.shard == shard] for shard in range(books.n_shards)]
    chunks = [[part.chunk() for part in here] for here in by_shard]
    shape = choose_shape(chunks, shapes)
    width = fixed.embedded if shape.prefill_tiles else 0
    packed = [pack(here, shape, narrowed=fixed.narrowed, embedded=width) for here in chunks]
    size, rows = fixed.samples(shape), fixed.rows(shape)
    samples = np.zeros(books.n_shards * size, np.int32)
    positions = np.full(books.n_shards * size, -1)
    slots = np.zeros(books.n_shards * size, np.int32)
    entries = []
    for shard, (here, part_of) in enumerate(zip(packed, by_shard, strict=True)):
        for part, start, end in zip(part_of, here.starts, here.ends, strict=True):
            source = start if start < shape.decode_rows else shape.decode_rows + _tile(start, shape)
            place = shard * size + source
            if part.samples:
                samples[place], positions[place] = end, part.start + part.count
                slots[place] = books.number(part.sequence)
            last_row = -1 if end < 0 else shard * rows + end
            own = place if part.samples else None
            first_row = shard * shape.rows + start
            entries.append(Entry(part.sequence, part.start, part.count, own, source, last_row, first_row))
    batch = jax.tree.map(lambda *leaves: np.concatenate(leaves), *[here.batch for here in packed])
    step = StepInput(batch=batch, block_tables=books.tables.copy(), samples=samples)
    return Assembled(shape, step, table.rows(slots, slots % books.slots, positions), entries)


def _tile(row: int, shape: StepShape) -> int:
    return (row - shape.decode_rows) // shape.tile_rows
