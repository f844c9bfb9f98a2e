"""Matrix products and norms: float32 accumulation, one rounding to the compute dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import PackedWeight, expand, rounded_inputs

Weight = Float[Array, "out in"] | PackedWeight


def linear(inputs: Float[Array, "*batch in"], weight: Weight) -> Float[Array, "*batch out"]:
    """``inputs @ weight.T`` in the inputs' dtype, accumulated in float32. Weights lie as released, ``[out, in]``."""
    return linear_float32(inputs, weight).astype(inputs.dtype)


def linear_float32(inputs: Float[Array, "*batch in"], weight: Weight) -> Float[Array, "*batch out"]:
    """``inputs @ weight.T`` with a float32 result; operands of different dtypes meet in float32.

    A packed weight is expanded to the inputs' dtype, and the inputs go through fp8 where it asks for that.
    """
    values = expand(weight, inputs.dtype)
    dtype = inputs.dtype if inputs.dtype == values.dtype else jnp.float32
    return jax.lax.dot_general(
        rounded_inputs(inputs, weight).astype(dtype),
        values.astype(dtype),
        (((inputs.ndim - 1,), (1,)), ((), ())),
        precision="highest",
        preferred_element_type=jnp.float32,
    )


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
