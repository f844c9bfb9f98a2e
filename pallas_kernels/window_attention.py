"""Window attention: tiles of queries over the contiguous keys around them.

One key serves as key and as value, shared by all heads (model specification, 5.2 to 5.4). Queries come in tiles that
share their keys; visibility is a range of positions per query, so that causal windows, replay floors and the
bidirectional draft block are the same operation.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_partial import EMPTY_MAXIMUM, AttentionPartial
from pallas_kernels.implementation import choose


def window_attention(
    queries: Float[Array, "tiles rows heads head_dim"],
    keys: Float[Array, "tiles keys head_dim"],
    key_positions: Int[Array, "tiles keys"],
    first: Int[Array, "tiles rows"],
    last: Int[Array, "tiles rows"],
    *,
    scale: float,
    implementation: str | None = None,
) -> AttentionPartial:
    """Attend every key whose position lies in the query's inclusive range ``[first, last]``.

    Args:
      queries: rotated queries.
      keys: rotated keys of each tile, in any order; a key that no query of the tile sees must still be finite.
      key_positions: absolute token position of each key; -1 for an absent key, which nothing sees.
      first, last: visible positions of each query, in tokens. ``last < first`` (padding rows use -1) sees nothing.
      scale: factor of the dot products, ``head_dim ** -0.5`` in the release.
      implementation: "reference" (jnp, every platform) or None.

    Returns:
      The partial result, float32, leading axes ``[tiles rows]``; an empty set gives zeros and EMPTY_MAXIMUM.
    """
    return choose("window_attention", implementation, {"reference": _reference}, "reference")(
        queries, keys, key_positions, first, last, scale
    )


def _reference(
    queries: Float[Array, "tiles rows heads head_dim"],
    keys: Float[Array, "tiles keys head_dim"],
    key_positions: Int[Array, "tiles keys"],
    first: Int[Array, "tiles rows"],
    last: Int[Array, "tiles rows"],
    scale: float,
) -> AttentionPartial:
    positions = key_positions[:, None, :]
    visible = (positions >= jnp.maximum(first, 0)[:, :, None]) & (positions <= last[:, :, None])
    visible = visible[:, :, None, :]
    scores = (
        jnp.einsum("trhd,tkd->trhk", queries, keys, preferred_element_type=jnp.float32, precision="highest") * scale
    )
    scores = jnp.where(visible, scores, EMPTY_MAXIMUM)
    maximum = scores.max(axis=-1)
    probabilities = jnp.where(visible, jnp.exp(scores - maximum[..., None]), 0.0)
    accumulator = jnp.einsum(
        "trhk,tkd->trhd",
        probabilities.astype(keys.dtype),
        keys,
        preferred_element_type=jnp.float32,
        precision="highest",
    )
    return AttentionPartial(accumulator, maximum, probabilities.sum(axis=-1))
