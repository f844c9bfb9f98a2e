"""Sparse attention: every query attends the pool rows that its own index list names.

The rows are compressed key/value entries (model specification, 5.3 and 5.4), shared by all heads as key and value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.attention_partial import EMPTY_MAXIMUM, AttentionPartial
from pallas_kernels.implementation import choose
from pallas_kernels.row_formats import CachedRows

# Gathered keys of one loop step of the reference stay within about this many elements, so that they fit a CPU cache.
_GATHERED_ELEMENTS = 1 << 19


def sparse_attention(
    queries: Float[Array, "rows heads head_dim"],
    pool: Shaped[Array, "pool_rows head_dim"] | CachedRows,
    indices: Int[Array, "rows selected"],
    *,
    scale: float,
    implementation: str | None = None,
) -> AttentionPartial:
    """Attend ``pool[indices]`` with each query.

    Args:
      queries: rotated queries.
      pool: key/value rows; uint16 holds bfloat16 bits. Rows that no list names may hold anything, NaN included.
      indices: pool rows per query; -1 is no row, anywhere in the list. A row named twice counts twice.
      scale: factor of the dot products.
      implementation: "reference" (jnp, every platform) or None.

    Returns:
      The partial result, float32, leading axis ``[rows]``; an empty list gives zeros and EMPTY_MAXIMUM.
    """
    return choose("sparse_attention", implementation, {"reference": _reference}, "reference")(
        queries, pool, indices, scale
    )


def gather_rows(
    pool: Shaped[Array, "pool_rows width"] | CachedRows, indices: Int[Array, "*batch"], dtype: DTypeLike
) -> Float[Array, "*batch width"]:
    """``pool[indices]`` with -1 giving zero rows.

    uint16 pools are read as bfloat16 bits, rows of a released cache format in ``dtype``.
    """
    present = jnp.maximum(indices, 0)
    if isinstance(pool, CachedRows):
        rows = pool.take(present).values(dtype)
    else:
        rows = jnp.take(pool, present, axis=0, mode="clip")
        if pool.dtype == jnp.uint16:
            rows = jax.lax.bitcast_convert_type(rows, jnp.bfloat16)
    return jnp.where((indices >= 0)[..., None], rows, jnp.zeros((), rows.dtype))


def _reference(
    queries: Float[Array, "rows heads head_dim"],
    pool: Shaped[Array, "pool_rows head_dim"] | CachedRows,
    indices: Int[Array, "rows selected"],
    scale: float,
) -> AttentionPartial:
    rows, heads, head_dim = queries.shape
    block = max(1, _GATHERED_ELEMENTS // (indices.shape[1] * head_dim))
    if rows <= block:
        return _attend(queries, pool, indices, scale)
    blocks = -(-rows // block)
    pad = blocks * block - rows
    padded_queries = jnp.pad(queries, ((0, pad), (0, 0), (0, 0))).reshape(blocks, block, heads, head_dim)
    padded_indices = jnp.pad(indices, ((0, pad), (0, 0)), constant_values=-1).reshape(blocks, block, -1)
    partial = jax.lax.map(lambda part: _attend(part[0], pool, part[1], scale), (padded_queries, padded_indices))
    return AttentionPartial(*(leaf.reshape(blocks * block, *leaf.shape[2:])[:rows] for leaf in partial))


def _attend(
    queries: Float[Array, "rows heads head_dim"],
    pool: Shaped[Array, "pool_rows head_dim"] | CachedRows,
    indices: Int[Array, "rows selected"],
    scale: float,
) -> AttentionPartial:
    keys = gather_rows(pool, indices, queries.dtype)
    visible = (indices >= 0)[:, None, :]
    scores = jnp.einsum("rhd,rkd->rhk", queries, keys, preferred_element_type=jnp.float32, precision="highest") * scale
    scores = jnp.where(visible, scores, EMPTY_MAXIMUM)
    maximum = scores.max(axis=-1)
    probabilities = jnp.where(visible, jnp.exp(scores - maximum[..., None]), 0.0)
    accumulator = jnp.einsum(
        "rhk,rkd->rhd", probabilities.astype(keys.dtype), keys, preferred_element_type=jnp.float32, precision="highest"
    )
    return AttentionPartial(accumulator, maximum, probabilities.sum(axis=-1))
