"""Grouped experts: each row through its own few experts, weighted and summed (model specification, 9.2)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import choose
from pallas_kernels.packed_weight import PackedWeight, expand, rounded_inputs
from pallas_kernels.product import Weight, product, without_rounding

# All experts stacked along the first axis, or one array each: a CPU copies what is indexed dynamically out of a stack.
ExpertWeights = Float[Array, "_experts _out _in"] | PackedWeight | tuple[Any, ...]

# Beyond this many rows a CPU's matrix products gain nothing more.
_LARGEST_TILE = 256
# Steps of up to this many rows give every expert one tile of all rows.
_SMALL_STEP = 16


def grouped_experts(
    inputs: Float[Array, "rows hidden"],
    experts: Int[Array, "rows chosen"],
    weights: Float[Array, "rows chosen"],
    gate_up: Float[Array, "experts double_width hidden"] | PackedWeight | tuple[Any, ...],
    down: Float[Array, "experts hidden width"] | PackedWeight | tuple[Any, ...],
    *,
    limit: float,
    tile_rows: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows hidden"]:
    """Clamped-SwiGLU experts; the routing weight multiplies the hidden activation before the down projection.

    Args:
      inputs: rows in the compute dtype, which is also that of unpacked weights.
      experts: expert ids per row; an id outside ``[0, experts)`` contributes nothing (padding rows use -1).
      weights: routing weight of each chosen expert.
      gate_up: w1 rows then w3 rows of each expert, ``[experts 2*width hidden]``; a tuple holds one array per expert.
      down: w2 of each expert, ``[experts hidden width]``, in the same form as ``gate_up``. Packed weights are expanded
        to the inputs' dtype, one expert at a time by "tiled", and what they multiply goes through fp8 where they ask
        for it.
      limit: the gate is clamped from above at ``limit``, the up projection to ``[-limit, limit]``.
      tile_rows: rows of one expert multiplied together by "tiled". It is static, so that a row's result never depends
        on how many rows its expert received; by default a power of two near the mean number of rows an expert gets.
      implementation: "tiled" (default: sorted by expert, dynamic number of tiles, not differentiable in reverse) or
        "dense" (every expert on every row: differentiable, the oracle; stacked weights only).

    Returns:
      float32 ``[rows hidden]``, summed over the chosen experts in their given order.
    """
    table = {"tiled": _tiled, "dense": _dense}
    return choose("grouped_experts", implementation, table, "tiled")(
        inputs, experts, weights, gate_up, down, limit, tile_rows
    )


def clamped_swiglu(gate_up: Float[Array, "*batch double_width"], limit: float) -> Float[Array, "*batch width"]:
    """``silu(min(gate, limit)) * clip(up, -limit, limit)`` of stacked gate and up projections, float32."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def _dense(
    inputs: Float[Array, "rows hidden"],
    experts: Int[Array, "rows chosen"],
    weights: Float[Array, "rows chosen"],
    gate_up: ExpertWeights,
    down: ExpertWeights,
    limit: float,
    tile_rows: int | None,
) -> Float[Array, "rows hidden"]:
    del tile_rows
    if isinstance(gate_up, tuple) or isinstance(down, tuple):
        raise NotImplementedError("grouped_experts 'dense' takes stacked experts, not one array per expert")
    chosen = experts[..., None] == jnp.arange(gate_up.shape[0])[None, None]
    combine = jnp.where(chosen, weights[..., None], 0.0).sum(axis=1)
    projected = _all_experts("rc,ewc->rew", rounded_inputs(inputs, gate_up), gate_up)
    hidden = (clamped_swiglu(projected, limit) * combine[..., None]).astype(inputs.dtype)
    return _all_experts("rew,ecw->rc", rounded_inputs(hidden, down), down)


def _default_tile_rows(rows: int, chosen: int, experts: int, split: bool, dtype: jnp.dtype) -> int:
    """A power of two near the mean number of rows an expert gets; all rows of a small step over split experts."""
    if split and rows <= _SMALL_STEP:
        # A CPU's bfloat16 product of a single row is far slower than that of two.
        return rows if dtype == jnp.float32 else max(rows, 2)
    return min(_LARGEST_TILE, 1 << (-(-rows * chosen // experts) - 1).bit_length())


def _all_experts(equation: str, inputs: Array, weight: Array | PackedWeight) -> Array:
    values = expand(weight, inputs.dtype)
    return jnp.einsum(equation, inputs, values, preferred_element_type=jnp.float32, precision="highest")


def _tiled(
    inputs: Float[Array, "rows hidden"],
    experts: Int[Array, "rows chosen"],
    weights: Float[Array, "rows chosen"],
    gate_up: ExpertWeights,
    down: ExpertWeights,
    limit: float,
    tile_rows: int | None,
) -> Float[Array, "rows hidden"]:
    rows, chosen = experts.shape
    split = isinstance(gate_up, tuple)
    count = len(gate_up) if isinstance(gate_up, tuple) else gate_up.shape[0]
    if tile_rows is None:
        tile_rows = _default_tile_rows(rows, chosen, count, split, inputs.dtype)
    flat = experts.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < count), flat, count)
    order = jnp.argsort(flat, stable=True)
    sizes = (flat[:, None] == jnp.arange(count)[None]).sum(axis=0, dtype=jnp.int32)
    sorted_weights = jnp.pad(weights.reshape(-1)[order], (0, tile_rows))
    sorted_rows = jnp.pad(order // chosen, (0, tile_rows))
    readable = rounded_inputs(inputs, gate_up[0])

    def one_tile(start: Array, up: Weight, out: Weight, outputs: Array) -> Array:
        """Rows past the expert's last one compute garbage where later tiles, or nobody, will write and read."""
        taken = jax.lax.dynamic_slice_in_dim(sorted_rows, start, tile_rows)
        projected = product(readable[taken], without_rounding(up))
        routing = jax.lax.dynamic_slice_in_dim(sorted_weights, start, tile_rows)
        hidden = (clamped_swiglu(projected, limit) * routing[:, None]).astype(inputs.dtype)
        result = product(hidden, out)
        return jax.lax.dynamic_update_slice_in_dim(outputs, result, start, 0)

    outputs = jnp.zeros((rows * chosen + tile_rows, inputs.shape[1]), jnp.float32)
    run = _run_split if split else _run_stacked
    outputs = run(one_tile, sizes, gate_up, down, outputs, tile_rows, rows)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(rows * chosen)).reshape(rows, chosen)
    used = flat.reshape(rows, chosen) < count
    parts = (jnp.where(used[:, one, None], outputs[place[:, one]], 0.0) for one in range(chosen))
    return functools.reduce(jnp.add, parts)


def _run_stacked(
    one_tile: Callable[..., Array],
    sizes: Int[Array, " experts"],
    gate_up: Any,
    down: Any,
    outputs: Float[Array, "slots hidden"],
    tile_rows: int,
    rows: int,
) -> Float[Array, "slots hidden"]:
    """One loop over all tiles of all experts, in expert order."""
    del rows
    starts = jnp.cumsum(sizes) - sizes
    tiles = -(-sizes // tile_rows)
    tile_ends = jnp.cumsum(tiles)

    def any_tile(tile: Array, outputs: Array) -> Array:
        expert = jnp.searchsorted(tile_ends, tile, side="right")
        start = starts[expert] + (tile - (tile_ends[expert] - tiles[expert])) * tile_rows
        return one_tile(start, gate_up[expert], down[expert], outputs)

    return jax.lax.fori_loop(0, tile_ends[-1], any_tile, outputs)


def _run_split(
    one_tile: Callable[..., Array],
    sizes: Int[Array, " experts"],
    gate_up: Any,
    down: Any,
    outputs: Float[Array, "slots hidden"],
    tile_rows: int,
    rows: int,
) -> Float[Array, "slots hidden"]:
    """Expert after expert, each reading its own arrays."""
    starts = jnp.cumsum(sizes) - sizes
    tiles = -(-sizes // tile_rows)
    for expert, (up, out) in enumerate(zip(gate_up, down, strict=True)):

        def own_tile(
            tile: Array | int, outputs: Array, start: Array = starts[expert], up: Any = up, out: Any = out
        ) -> Array:
            return one_tile(start + tile * tile_rows, up, out, outputs)

        if tile_rows >= rows:
            # At most one tile: a branch reads the weights in place, where a loop would copy them.
            used = tiles[expert] > 0
            outputs = jax.lax.cond(used, functools.partial(own_tile, 0), lambda outputs: outputs, outputs)
        else:
            outputs = jax.lax.fori_loop(0, tiles[expert], own_tile, outputs)
    return outputs
