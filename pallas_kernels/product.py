"""Products of rows with a weight, in every form that a weight takes: float32 accumulation, no further rounding."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.packed_weight import PackedWeight, rounded_inputs

# Parts of a single row's product that a CPU computes on several threads.
_ROW_PARTS = 4


@functools.partial(jax.tree_util.register_dataclass, data_fields=["transposed"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TransposedWeight:
    """A weight ``[out in]`` that lies as ``transposed`` ``[in out]``: a CPU's products read it without packing it."""

    transposed: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        return self.transposed.shape[::-1]


Weight = Float[Array, "_out _in"] | PackedWeight | TransposedWeight


def product(inputs: Float[Array, "*batch in"], weight: Weight) -> Float[Array, "*batch out"]:
    """``inputs @ weight.T`` in float32; operands of different dtypes meet in float32.

    A packed weight is expanded to the inputs' dtype, and the inputs go through fp8 where it asks for that.
    """
    if isinstance(weight, TransposedWeight):
        return _transposed_product(inputs, weight.transposed)
    values = weight.values(inputs.dtype) if isinstance(weight, PackedWeight) else weight
    return _dot(rounded_inputs(inputs, weight), values, contracted=1)


def without_rounding(weight: Weight) -> Weight:
    """The weight for inputs that have been rounded already."""
    return dataclasses.replace(weight, rounds_inputs=False) if isinstance(weight, PackedWeight) else weight


def _transposed_product(
    inputs: Float[Array, "*batch in"], values: Float[Array, "in out"]
) -> Float[Array, "*batch out"]:
    """As :func:`product`. XLA's CPU back end multiplies one row on one thread, and converts a whole bfloat16 weight."""
    if inputs.size > inputs.shape[-1] or values.shape[0] % _ROW_PARTS:
        return _dot(inputs, values, contracted=0)
    row = inputs.reshape(1, -1)
    if inputs.dtype != jnp.float32 and inputs.dtype == values.dtype:
        result = _dot(jnp.pad(row, ((0, 1), (0, 0))), values, contracted=0)[:1]
    else:
        parts = row.astype(jnp.float32).reshape(_ROW_PARTS, -1)
        weights = values.astype(jnp.float32).reshape(*parts.shape, -1)
        result = jnp.einsum("pi,pio->po", parts, weights, precision="highest").sum(axis=0)
    return result.reshape(*inputs.shape[:-1], -1)


def _dot(inputs: Float[Array, "*batch in"], values: Float[Array, "_ _"], contracted: int) -> Float[Array, "*batch out"]:
    dtype = inputs.dtype if inputs.dtype == values.dtype else jnp.float32
    return jax.lax.dot_general(
        inputs.astype(dtype),
        values.astype(dtype),
        (((inputs.ndim - 1,), (contracted,)), ((), ())),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
