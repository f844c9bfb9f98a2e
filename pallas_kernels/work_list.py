"""Work of uneven tiles, shared out evenly: a flat list of (tile, chunk) pairs that lanes go through side by side.

The list has the chunks of the first tile in order, then those of the second, and so on. Lanes take equal parts of it,
one after the other, whatever the length of a tile. A lane's stay at a tile is a *run*: what is found there is kept
apart, and the runs of a tile, which lie in neighbouring lanes, are put together in the end. All shapes follow from the
number of tiles and lanes; only how often the lanes turn depends on the lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class Place(NamedTuple):
    """Where each lane stands: its tile, the chunk in it, and its run, which is out of range behind the list's end."""

    tile: Int[Array, " lanes"]
    chunk: Int[Array, " lanes"]
    run: Int[Array, " lanes"]


class WorkList(NamedTuple):
    """``begins``, ``ends``: the pairs of each tile are numbers ``[begins, ends)``. ``share``: pairs of a lane."""

    begins: Int[Array, " tiles"]
    ends: Int[Array, " tiles"]
    share: Int[Array, ""]
    lanes: int

    @classmethod
    def of(cls, chunks: Int[Array, " tiles"], lanes: int) -> WorkList:
        """The list of tiles with so many chunks each, possibly none, over ``lanes`` lanes."""
        ends = jnp.cumsum(chunks)
        # Places are quotients by the share, also where there is no work at all.
        return cls(ends - chunks, ends, jnp.maximum(1, -(-ends[-1] // lanes)), lanes)

    @property
    def runs(self) -> int:
        """How many runs there may be. Tile and lane never fall along the list, so their sum is a run's own number."""
        return self.ends.shape[0] + self.lanes

    def at(self, turn: Int[Array, ""]) -> Place:
        """Where the lanes stand in a turn, of which there are ``share``."""
        lane = jnp.arange(self.lanes, dtype=jnp.int32)
        pair = lane * self.share + turn
        before = (self.ends[None] <= pair[:, None]).sum(axis=1, dtype=jnp.int32)
        tile = jnp.minimum(before, self.ends.shape[0] - 1)
        return Place(tile, pair - self.begins[tile], jnp.where(pair < self.ends[-1], lane + tile, self.runs))

    def runs_of_tiles(self) -> tuple[Int[Array, " tiles"], Int[Array, " tiles"]]:
        """The first run of each tile, and how many follow it; a tile without chunks has one that nothing was put in."""
        first = self.begins // self.share
        further = jnp.where(self.ends > self.begins, (self.ends - 1) // self.share - first, 0)
        return first + jnp.arange(first.shape[0], dtype=jnp.int32), further
