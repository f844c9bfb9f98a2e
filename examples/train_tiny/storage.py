"""Parameters as a released checkpoint will store them, during training: rounded forwards, untouched backwards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from deepinfer_jax.model.params import Parameter, Stored, Tree
from pallas_kernels import pack_weight


def as_stored(described: Tree, params: Tree) -> Tree:
    """Every parameter at its stored precision; gradients pass as if nothing had been rounded (straight-through)."""
    return jax.tree.map(_as_stored, described, params, is_leaf=lambda item: isinstance(item, Parameter))


def _as_stored(item: Parameter, values: Array) -> Array:
    if item.stored in (Stored.F32, Stored.DERIVED):
        return values
    return values + jax.lax.stop_gradient(stored_values(item, values) - values)


def stored_values(item: Parameter, values: Array) -> Array:
    """The float32 values that the stored form of a parameter holds."""
    if not item.has_scale:
        return values.astype(jnp.bfloat16).astype(jnp.float32)
    packed = pack_weight(values, fp4=item.stored is Stored.FP4_ROWS, scale_rows=item.scale_rows)
    return packed.values(jnp.dtype(jnp.float32))
