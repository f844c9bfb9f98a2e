"""Index selection over paged keys, at a cost that follows what the queries see and not what the pages could hold.

What the queries of a tile see is scored in chunks of a fixed number of entries, each joined with the ranking of those
before it. The chunks of all tiles are one work list, so that no shape depends on the length of a context, and a long
one costs its own chunks alone.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.implementation import choose
from pallas_kernels.index_pages import IndexPages
from pallas_kernels.index_selection import Selection, block_scores, candidate_entries, index_scores, index_selection
from pallas_kernels.ranking import Ranking
from pallas_kernels.work_list import WorkList

CHUNK_ENTRIES = 1024
# Lanes times rows of a tile, with one lane at least.
LANE_ROWS = 128


def paged_index_selection(
    queries: Float[Array, "tiles rows index_heads index_dim"],
    weights: Float[Array, "tiles rows index_heads"],
    pages: IndexPages,
    visible: Int[Array, "tiles rows"],
    *,
    top_k: int,
    block_size: int = 0,
    publish_blocks: int = 0,
    candidates: Int[Array, "tiles rows blocks"] | None = None,
    implementation: str | None = None,
) -> Selection:
    """:func:`pallas_kernels.index_selection` over pages: the same arguments, the same selection.

    Where there are candidates they are those of an earlier selection: ascending, unused places at the end.
    """
    return choose("paged_index_selection", implementation, {"reference": _reference}, "reference")(
        queries, weights, pages, visible, top_k, block_size, publish_blocks, candidates
    )


def _reference(
    queries: Float[Array, "tiles rows index_heads index_dim"],
    weights: Float[Array, "tiles rows index_heads"],
    pages: IndexPages,
    visible: Int[Array, "tiles rows"],
    top_k: int,
    block_size: int,
    publish_blocks: int,
    candidates: Int[Array, "tiles rows blocks"] | None,
) -> Selection:
    unit = max(1, block_size)
    chunk = max(1, CHUNK_ENTRIES // unit) * unit
    tiles, tile_rows = visible.shape
    if pages.entries <= chunk:
        return index_selection(
            queries,
            weights,
            pages.all_keys(queries.dtype),
            visible,
            top_k=top_k,
            block_size=block_size,
            publish_blocks=publish_blocks,
            candidates=candidates,
        )
    scoring = _Scoring(queries, weights, pages, visible, candidates, chunk, block_size, publish_blocks)
    work = WorkList.of(scoring.chunks(), max(1, min(tiles, LANE_ROWS // tile_rows)))
    places = (top_k, publish_blocks) if publish_blocks else (top_k,)

    def one_turn(turn: Array, runs: tuple[Ranking, ...]) -> tuple[Ranking, ...]:
        tile, number, run = work.at(turn)
        before = jax.tree.map(lambda leaf: leaf.at[run].get(mode="clip"), runs)
        joined = tuple(
            ranking.joined(*found) for ranking, found in zip(before, scoring.scored(tile, number), strict=True)
        )
        return jax.tree.map(lambda leaf, part: leaf.at[run].set(part, mode="drop"), runs, joined)

    empty = tuple(Ranking.empty(work.runs, tile_rows, count) for count in places)
    runs = jax.lax.fori_loop(0, work.share, one_turn, empty)
    best = [_over_runs(ranking, work).ascending() for ranking in runs]
    return Selection(best[0], best[1] if publish_blocks else None)


def _over_runs(runs: Ranking, work: WorkList) -> Ranking:
    """The ranking of each tile from those of its runs, in order."""
    first, further = work.runs_of_tiles()

    def join_next(distance: Array, best: Ranking) -> Ranking:
        later = jax.tree.map(lambda leaf: leaf.at[first + distance].get(mode="clip"), runs)
        own = (distance <= further)[:, None, None]
        return best.joined(jnp.where(own, later.scores, -jnp.inf), later.numbers)

    return jax.lax.fori_loop(1, further.max() + 1, join_next, jax.tree.map(lambda leaf: leaf[first], runs))


@dataclasses.dataclass(frozen=True)
class _Scoring:
    """The arguments of a selection, and the scores of one chunk of each lane.

    A tile of a single row inside candidates lists the entries of its candidates, and nothing else is read; rows that
    share a tile have candidates of their own each, so there every chunk is scored and masked.
    """

    queries: Float[Array, "tiles rows index_heads index_dim"]
    weights: Float[Array, "tiles rows index_heads"]
    pages: IndexPages
    visible: Int[Array, "tiles rows"]
    candidates: Int[Array, "tiles rows blocks"] | None
    largest_chunk: int
    block_size: int
    publish_blocks: int

    @property
    def chunk(self) -> int:
        """Entries of a chunk."""
        listed = self.listed
        return self.largest_chunk if listed is None else min(self.largest_chunk, listed.shape[1] * self.block_size)

    @property
    def listed(self) -> Int[Array, "tiles blocks"] | None:
        """The candidate blocks whose entries alone are scored; None where it is all that a row sees."""
        if self.candidates is None or self.visible.shape[1] > 1 or self.publish_blocks:
            return None
        return self.candidates[:, 0]

    def chunks(self) -> Int[Array, " tiles"]:
        """Chunks of each tile."""
        used = self.visible.max(axis=1)
        if self.listed is not None:
            used = (self.listed >= 0).sum(axis=1, dtype=jnp.int32) * self.block_size
        return -(-used // self.chunk)

    def scored(
        self, tile: Int[Array, " lanes"], number: Int[Array, " lanes"]
    ) -> list[tuple[Float[Array, "lanes rows items"], Int[Array, "lanes rows items"]]]:
        """Scores and numbers of the entries of chunk ``number`` of ``tile``, then those of the blocks to publish."""
        entries = self._entries(tile, number)
        keys = self.pages.keys(tile, entries, self.queries.dtype)
        scores = index_scores(self.queries[tile], self.weights[tile], keys)
        visible = self.visible[tile]
        seen = (entries >= 0)[:, None] & (entries[:, None] < visible[..., None])
        scores = jnp.where(seen, scores, -jnp.inf)
        eligible = jnp.where(self._inside(tile, number), scores, -jnp.inf)
        parts = [(eligible, entries)]
        if self.publish_blocks:
            first = number * self.chunk
            best = block_scores(scores, visible - first[:, None], block_size=self.block_size)
            parts.append((best, first[:, None] // self.block_size + jnp.arange(best.shape[-1], dtype=jnp.int32)[None]))
        return [(part, jnp.broadcast_to(numbers[:, None], part.shape)) for part, numbers in parts]

    def _entries(self, tile: Int[Array, " lanes"], number: Int[Array, " lanes"]) -> Int[Array, "lanes entries"]:
        """Entry numbers, ascending; negative where there is no candidate block."""
        if self.listed is None:
            return number[:, None] * self.chunk + jnp.arange(self.chunk, dtype=jnp.int32)[None]
        length = self.chunk // self.block_size
        places = number[:, None] * length + jnp.arange(length, dtype=jnp.int32)[None]
        blocks = self.listed.at[tile[:, None], places].get(mode="fill", fill_value=-1)
        entries = blocks[..., None] * self.block_size + jnp.arange(self.block_size, dtype=jnp.int32)[None, None]
        return entries.reshape(tile.shape[0], -1)

    def _inside(self, tile: Int[Array, " lanes"], number: Int[Array, " lanes"]) -> Bool[Array, "lanes #rows entries"]:
        """Whether each row may select each entry of its chunk."""
        if self.candidates is None or self.listed is not None:
            return jnp.ones((tile.shape[0], 1, self.chunk), bool)
        first = number[:, None, None] * (self.chunk // self.block_size)
        return candidate_entries(self.candidates[tile] - first, block_size=self.block_size, entries=self.chunk)
