"""How rows reach the parameters that may be spread over devices: routed experts and looked-up tables.

Everything else of the model is computed where a row is. :class:`LocalExchange` finds all parameters on the row's own
device; implementations for meshes, in :mod:`deepinfer_jax.parallel`, run inside a ``shard_map`` over the rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels import PackedWeight, grouped_experts

# As in grouped_experts; stacked ones may have a leading axis of layers.
ExpertWeights = Float[Array, "... _experts _out _in"] | PackedWeight | tuple[Any, ...]

# More rows of one expert than this in one product gain nothing.
_LARGEST_TILE = 256


@runtime_checkable
class Exchange(Protocol):
    """What the model asks of an exchange. Rows and results are the calling device's own."""

    def experts(
        self,
        inputs: Float[Array, "rows hidden"],
        experts: Int[Array, "rows chosen"],
        weights: Float[Array, "rows chosen"],
        gate_up: ExpertWeights,
        down: ExpertWeights,
        *,
        limit: float,
        layer: Int[Array, ""] | None = None,
    ) -> Float[Array, "rows hidden"]:
        """Routed experts as in :func:`pallas_kernels.grouped_experts`; ids number the experts of all devices.

        With ``layer`` the weights hold several layers, and this one's experts serve.
        """

    def lookup(
        self, table: Shaped[Array, "entries width"] | PackedWeight, indices: Int[Array, "*rows"]
    ) -> Shaped[Array, "*rows width"] | PackedWeight:
        """Table rows by number, over the rows of all devices; a packed table gives packed rows."""

    def largest(self, number: Int[Array, ""]) -> Int[Array, ""]:
        """The largest of the devices' numbers. Devices must agree on how often they come to an exchange."""


@dataclasses.dataclass(frozen=True)
class LocalExchange:
    """All parameters lie on the device of the row.

    ``implementation``: of the routed experts, see :func:`pallas_kernels.grouped_experts`.
    """

    implementation: str | None = None

    def experts(
        self,
        inputs: Float[Array, "rows hidden"],
        experts: Int[Array, "rows chosen"],
        weights: Float[Array, "rows chosen"],
        gate_up: ExpertWeights,
        down: ExpertWeights,
        *,
        limit: float,
        layer: Int[Array, ""] | None = None,
    ) -> Float[Array, "rows hidden"]:
        return held_experts(inputs, experts, weights, gate_up, down, limit, layer, None, self.implementation)

    def lookup(
        self, table: Shaped[Array, "entries width"] | PackedWeight, indices: Int[Array, "*rows"]
    ) -> Shaped[Array, "*rows width"] | PackedWeight:
        return jax.tree.map(lambda part: jnp.take(part, indices, axis=0, mode="clip"), table)

    def largest(self, number: Int[Array, ""]) -> Int[Array, ""]:
        return number


LOCAL = LocalExchange()
"""The exchange of a single device."""


def held_experts(
    inputs: Float[Array, "rows hidden"],
    experts: Int[Array, "rows chosen"],
    weights: Float[Array, "rows chosen"],
    gate_up: ExpertWeights,
    down: ExpertWeights,
    limit: float,
    layer: Int[Array, ""] | None,
    total: int | None,
    implementation: str | None,
) -> Float[Array, "rows hidden"]:
    """:func:`pallas_kernels.grouped_experts` with the experts that a device holds, of one layer or of several.

    ``total`` counts the experts over which the rows spread, where they are more than a layer's held ones. A loop over
    layers that cut a layer's experts out of the stack would copy them all, so the layer goes into the ids instead; the
    "dense" implementation reads all experts it is given and is the exception.
    """
    if layer is not None and implementation == "dense":
        gate_up, down = (
            jax.tree.map(lambda part: jax.lax.dynamic_index_in_dim(part, layer, keepdims=False), stack)
            for stack in (gate_up, down)
        )
        layer = None
    if isinstance(gate_up, tuple):
        return grouped_experts(inputs, experts, weights, gate_up, down, limit=limit, implementation=implementation)
    held = gate_up.shape[-3]
    tile_rows = None
    if layer is not None or total is not None:
        mean = -(-experts.size // (total or held))
        tile_rows = min(_LARGEST_TILE, 1 << (mean - 1).bit_length())
    if layer is not None:
        gate_up, down = (
            jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), stack) for stack in (gate_up, down)
        )
        experts = jnp.where((experts >= 0) & (experts < held), experts + layer * held, -1)
    return grouped_experts(
        inputs, experts, weights, gate_up, down, limit=limit, tile_rows=tile_rows, implementation=implementation
    )
