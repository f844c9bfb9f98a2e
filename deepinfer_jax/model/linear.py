"""Matrix products and norms: float32 accumulation, one rounding to the compute dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import Weight, product


def linear(inputs: Float[Array, "*batch in"], weight: Weight) -> Float[Array, "*batch out"]:
    """``inputs @ weight.T`` in the inputs' dtype, accumulated in float32. Weights lie as released, ``[out, in]``."""
    return linear_float32(inputs, weight).astype(inputs.dtype)


def linear_float32(inputs: Float[Array, "*batch in"], weight: Weight) -> Float[Array, "*batch out"]:
    """:func:`linear` without the final rounding; operands of different dtypes meet in float32."""
    return product(inputs, weight)


def rms_norm(
    inputs: Float[Array, "*batch width"], weight: Float[Array, " width"], epsilon: float
) -> Float[Array, "*batch width"]:
    """``weight * x * rsqrt(mean(x^2) + epsilon)`` in float32, rounded once to the inputs' dtype (specification, 0)."""
    return rms_norm_float32(inputs, weight, epsilon).astype(inputs.dtype)


def rms_norm_float32(
    inputs: Float[Array, "*batch width"], weight: Float[Array, " width"], epsilon: float
) -> Float[Array, "*batch width"]:
    """:func:`rms_norm` without the final rounding."""
    values = inputs.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.mean(jnp.square(values), axis=-1, keepdims=True) + epsilon)
    return values * factor * jnp.broadcast_to(weight.astype(jnp.float32), values.shape)
