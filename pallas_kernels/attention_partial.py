"""Unnormalised attention over a part of the keys, and the merge of parts with the attention sink.

Window attention and sparse attention each see a part of a query's visible keys. Each returns an online-softmax partial
result, and :func:`merge_partials` joins them: V4.1's sink enters the denominator only (model specification, 5.4).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

# Finite stand-in for minus infinity: exp(EMPTY_MAXIMUM - anything reasonable) is exactly 0, and no inf - inf arises.
EMPTY_MAXIMUM = -1e30


class AttentionPartial(NamedTuple):
    """Softmax numerator and denominator over some keys, relative to ``maximum``.

    ``accumulator``: float32 ``[... heads head_dim]``, sum of exp(score - maximum) * key.
    ``maximum``: float32 ``[... heads]``, largest score; :data:`EMPTY_MAXIMUM` when no key was visible.
    ``denominator``: float32 ``[... heads]``, sum of exp(score - maximum); 0 when no key was visible.
    """

    accumulator: Float[Array, "*batch heads head_dim"]
    maximum: Float[Array, "*batch heads"]
    denominator: Float[Array, "*batch heads"]


def merge_partials(
    partials: tuple[AttentionPartial, ...], sink: Float[Array, " heads"]
) -> Float[Array, "*batch heads head_dim"]:
    """Normalise the union of the partials' keys with a sink logit per head in the denominator.

    Returns float32 ``[... heads head_dim]``; a row without any visible key is exactly 0.
    """
    sinks = jnp.broadcast_to(sink, partials[0].maximum.shape)
    maximum = sinks
    for partial in partials:
        maximum = jnp.maximum(maximum, partial.maximum)
    denominator = jnp.exp(sinks - maximum)
    accumulator = jnp.zeros_like(partials[0].accumulator)
    for partial in partials:
        weight = jnp.exp(partial.maximum - maximum)
        denominator = denominator + weight * partial.denominator
        accumulator = accumulator + weight[..., None] * partial.accumulator
    return accumulator / denominator[..., None]
