"""Grouped experts: each row through its own few experts, weighted and summed (model specification, 9.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import choose


def grouped_experts(
    inputs: Float[Array, "rows hidden"],
    experts: Int[Array, "rows chosen"],
    weights: Float[Array, "rows chosen"],
    gate_up: Float[Array, "experts double_width hidden"],
    down: Float[Array, "experts hidden width"],
    *,
    limit: float,
    tile_rows: int = 8,
    implementation: str | None = None,
) -> Float[Array, "rows hidden"]:
    """Clamped-SwiGLU experts; the routing weight multiplies the hidden activation before the down projection.

    Args:
      inputs: rows in the weights' dtype.
      experts: expert ids per row; an id outside ``[0, experts)`` contributes nothing (padding rows use -1).
      weights: routing weight of each chosen expert.
      gate_up: w1 rows then w3 rows of each expert.
      down: w2 of each expert.
      limit: the gate is clamped from above at ``limit``, the up projection to ``[-limit, limit]``.
      tile_rows: rows of one expert multiplied together by "tiled"; a constant, so that a row's result does not depend
        on how many rows its expert received.
      implementation: "tiled" (default: sorted by expert, dynamic number of tiles, not differentiable in reverse) or
        "dense" (every expert on every row: differentiable, the oracle).

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
    gate_up: Float[Array, "experts double_width hidden"],
    down: Float[Array, "experts hidden width"],
    limit: float,
    tile_rows: int,
) -> Float[Array, "rows hidden"]:
    del tile_rows
    chosen = experts[..., None] == jnp.arange(gate_up.shape[0])[None, None]
    combine = jnp.where(chosen, weights[..., None], 0.0).sum(axis=1)
    projected = jnp.einsum("rc,ewc->rew", inputs, gate_up, preferred_element_type=jnp.float32, precision="highest")
    hidden = clamped_swiglu(projected, limit) * combine[..., None]
    return jnp.einsum(
        "rew,ecw->rc", hidden.astype(down.dtype), down, preferred_element_type=jnp.float32, precision="highest"
    )


def _tiled(
    inputs: Float[Array, "rows hidden"],
    experts: Int[Array, "rows chosen"],
    weights: Float[Array, "rows chosen"],
    gate_up: Float[Array, "experts double_width hidden"],
    down: Float[Array, "experts hidden width"],
    limit: float,
    tile_rows: int,
) -> Float[Array, "rows hidden"]:
    rows, chosen = experts.shape
    count = gate_up.shape[0]
    flat = experts.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < count), flat, count)
    order = jnp.argsort(flat, stable=True)
    sizes = (flat[:, None] == jnp.arange(count)[None]).sum(axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(sizes) - sizes
    tiles = -(-sizes // tile_rows)
    tile_ends = jnp.cumsum(tiles)
    # Slots past the last assignment read a row of zeros and write to a discarded row.
    padded_inputs = jnp.pad(inputs, ((0, 1), (0, 0)))
    padded_weights = jnp.pad(weights.reshape(-1), (0, 1))

    def one_tile(tile: Array, outputs: Array) -> Array:
        expert = jnp.searchsorted(tile_ends, tile, side="right")
        within = (tile - (tile_ends[expert] - tiles[expert])) * tile_rows + jnp.arange(tile_rows)
        slot = jnp.where(within < sizes[expert], starts[expert] + within, rows * chosen)
        assignment = jnp.take(order, slot, mode="fill", fill_value=rows * chosen)
        projected = jnp.einsum(
            "rc,wc->rw",
            padded_inputs[assignment // chosen],
            gate_up[expert],
            preferred_element_type=jnp.float32,
            precision="highest",
        )
        hidden = clamped_swiglu(projected, limit) * padded_weights[assignment][:, None]
        result = jnp.einsum(
            "rw,cw->rc",
            hidden.astype(down.dtype),
            down[expert],
            preferred_element_type=jnp.float32,
            precision="highest",
        )
        return outputs.at[assignment].set(result, mode="drop", unique_indices=False)

    outputs = jnp.zeros((rows * chosen, inputs.shape[1]), jnp.float32)
    outputs = jax.lax.fori_loop(0, tile_ends[-1], one_tile, outputs)
    return outputs.reshape(rows, chosen, -1).sum(axis=1)
