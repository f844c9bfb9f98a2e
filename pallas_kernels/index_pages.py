"""Index keys in pages: which rows of a pool are those of a request, in entry order."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.row_formats import CachedRows
from pallas_kernels.sparse_attention import gather_rows


@dataclasses.dataclass(frozen=True)
class IndexPages:
    """Where the index keys of each tile's request lie.

    ``pool``: ``[pool_rows index_dim]``, uint16 holds bfloat16 bits; rows that no query sees may hold anything.
    ``first_rows``: per tile and block, the pool row of the block's first entry; blocks stand in entry order, and those
    behind a request's last one may be any. ``block_entries``: entries of a block, which lie in consecutive rows.
    """

    pool: Shaped[Array, "pool_rows index_dim"] | CachedRows
    first_rows: Int[Array, "tiles blocks"]
    block_entries: int

    @property
    def entries(self) -> int:
        """Entries that a request can have."""
        return self.first_rows.shape[1] * self.block_entries

    def keys(
        self, tiles: Int[Array, " lanes"], entries: Int[Array, "lanes entries"], dtype: jnp.dtype
    ) -> Float[Array, "lanes entries index_dim"]:
        """Keys of some entries of some tiles; zeros for negative ones, anything for those behind the last block.

        ``dtype`` is that of keys in a released format; others have their own.
        """
        blocks = jnp.clip(entries // self.block_entries, 0, self.first_rows.shape[1] - 1)
        rows = self.first_rows[tiles[:, None], blocks] + entries % self.block_entries
        return gather_rows(self.pool, jnp.where(entries >= 0, rows, -1), dtype)

    def all_keys(self, dtype: jnp.dtype) -> Float[Array, "tiles entries index_dim"]:
        """Keys of every tile's request in entry order."""
        inside = jnp.arange(self.block_entries, dtype=jnp.int32)
        rows = self.first_rows[..., None] + inside[None, None]
        return gather_rows(self.pool, rows.reshape(rows.shape[0], -1), dtype)
