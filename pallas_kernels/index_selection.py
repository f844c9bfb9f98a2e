"""Index selection: which compressed entries a query attends, and the candidate blocks that bound later selections.

Scores are ReLU dot products of index queries and index keys, weighted per head (model specification, 7.2 to 7.4). All
orders are total: a larger score first, the lower index among equals; NaN never arises from finite visible inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.implementation import choose
from pallas_kernels.ranking import Ranking


class Selection(NamedTuple):
    """``entries``: int32 ``[tiles rows top_k]``, ascending, -1 in unused places at the end.

    ``candidates``: int32 ``[tiles rows blocks]``, ascending block ids, -1 in unused places; None unless published.
    """

    entries: Int[Array, "tiles rows top_k"]
    candidates: Int[Array, "tiles rows blocks"] | None


def index_selection(
    queries: Float[Array, "tiles rows index_heads index_dim"],
    weights: Float[Array, "tiles rows index_heads"],
    keys: Float[Array, "tiles entries index_dim"],
    visible: Int[Array, "tiles rows"],
    *,
    top_k: int,
    block_size: int = 0,
    publish_blocks: int = 0,
    candidates: Int[Array, "tiles rows blocks"] | None = None,
    implementation: str | None = None,
) -> Selection:
    """Select the ``top_k`` best entries of each query.

    Args:
      queries, weights: rotated index queries and their signed head weights.
      keys: index keys of each tile's sequence in entry order; entries beyond every ``visible`` may hold anything.
      visible: number of entries each query may see: entries ``[0, visible)``; 0 selects nothing.
      block_size: entries per candidate block; needed with ``publish_blocks`` or ``candidates``.
      publish_blocks: how many candidate blocks to publish, 0 for none. A block's value is its best visible score; the
        newest, possibly partial block always counts as the best.
      candidates: restrict the selection to these blocks.
      implementation: "reference" (jnp, every platform) or None.

    Returns:
      The selection. With fewer than ``top_k`` eligible entries the rest is -1; a filler is never selected.
    """
    return choose("index_selection", implementation, {"reference": _reference}, "reference")(
        queries, weights, keys, visible, top_k, block_size, publish_blocks, candidates
    )


def index_scores(
    queries: Float[Array, "tiles rows index_heads index_dim"],
    weights: Float[Array, "tiles rows index_heads"],
    keys: Float[Array, "tiles entries index_dim"],
) -> Float[Array, "tiles rows entries"]:
    """Score of every entry for every query, float32, without regard to visibility."""
    dots = jnp.einsum("trhd,ted->trhe", queries, keys, preferred_element_type=jnp.float32, precision="highest")
    return jnp.einsum("trhe,trh->tre", jax.nn.relu(dots), weights.astype(jnp.float32), precision="highest")


def block_scores(
    scores: Float[Array, "*batch entries"], visible: Int[Array, "*batch"], *, block_size: int
) -> Float[Array, "*batch blocks"]:
    """The value of each block of ``block_size`` entries: its best visible score, -inf for none.

    The newest block, which holds entry ``visible - 1``, is worth more than any score.
    """
    entries = scores.shape[-1]
    total = -(-entries // block_size)
    masked = jnp.where(_number(scores) < visible[..., None], scores, -jnp.inf)
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, total * block_size - entries)]
    padded = jnp.pad(masked, padding, constant_values=-jnp.inf)
    best = padded.reshape(*scores.shape[:-1], total, block_size).max(axis=-1)
    newest = (visible[..., None] - 1) // block_size
    return jnp.where((_number(best) == newest) & (visible[..., None] > 0), jnp.inf, best)


def candidate_blocks(
    scores: Float[Array, "*batch entries"], visible: Int[Array, "*batch"], *, block_size: int, blocks: int
) -> Int[Array, "*batch kept"]:
    """The ``blocks`` best blocks of ``block_size`` entries, ascending, -1 for none; see :func:`block_scores`.

    The newest block is always kept and counts as one. Ties keep the lower block.
    """
    return Ranking.of(block_scores(scores, visible, block_size=block_size), blocks).ascending()


def candidate_entries(
    candidates: Int[Array, "*batch kept"], *, block_size: int, entries: int
) -> Bool[Array, "*batch entries"]:
    """Whether each entry lies in one of the candidate blocks; -1, or a block behind the entries, is none."""
    total = -(-entries // block_size)
    kept = jnp.zeros((*candidates.shape[:-1], total + 1), bool)
    places = jnp.minimum(jnp.where(candidates >= 0, candidates, total), total)
    kept = jnp.put_along_axis(kept, places, True, axis=-1, inplace=False)
    return jnp.repeat(kept[..., :total], block_size, axis=-1)[..., :entries]


def _number(items: Float[Array, "*batch items"]) -> Int[Array, "*batch items"]:
    """The position of each item along the last axis."""
    return jax.lax.broadcasted_iota(jnp.int32, items.shape, items.ndim - 1)


def _reference(
    queries: Float[Array, "tiles rows index_heads index_dim"],
    weights: Float[Array, "tiles rows index_heads"],
    keys: Float[Array, "tiles entries index_dim"],
    visible: Int[Array, "tiles rows"],
    top_k: int,
    block_size: int,
    publish_blocks: int,
    candidates: Int[Array, "tiles rows blocks"] | None,
) -> Selection:
    entries = keys.shape[1]
    scores = index_scores(queries, weights, keys)
    published = None
    if publish_blocks:
        published = candidate_blocks(scores, visible, block_size=block_size, blocks=publish_blocks)
    eligible = _number(scores) < visible[..., None]
    if candidates is not None:
        eligible &= candidate_entries(candidates, block_size=block_size, entries=entries)
    return Selection(Ranking.of(jnp.where(eligible, scores, -jnp.inf), top_k).ascending(), published)
