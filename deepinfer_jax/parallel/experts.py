"""Expert parallelism by all-gather and reduce-scatter: every device sees all rows and serves its own experts.

Nothing is dropped and no shape depends on the routing. The price is that rows travel to devices that hold none of
their experts; a dispatch that sends each row only where it is needed can take the same place.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from deepinfer_jax.model.exchange import ExpertWeights, held_experts
from pallas_kernels import PackedWeight


@dataclasses.dataclass(frozen=True)
class GatherExchange:
    """The exchange inside a ``shard_map`` whose mesh axis ``axis`` splits the rows, the experts and the tables.

    Device i holds the i-th of equally many consecutive experts and table rows. See
    :class:`deepinfer_jax.model.exchange.Exchange`.
    """

    axis: str
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
        """This device's rows through experts of all devices, float32; summed over the devices in their own order."""
        if isinstance(gate_up, tuple):
            raise NotImplementedError("experts over devices are stacked, not one array per expert")
        held = gate_up.shape[-3]
        rows, chosen, ids = (lax.all_gather(part, self.axis, tiled=True) for part in (inputs, weights, experts))
        own = ids - lax.axis_index(self.axis) * held
        total = held * lax.axis_size(self.axis)
        partial = held_experts(rows, own, chosen, gate_up, down, limit, layer, total, self.implementation)
        return lax.psum_scatter(partial, self.axis, scatter_dimension=0, tiled=True)

    def lookup(
        self, table: Shaped[Array, "entries width"] | PackedWeight, indices: Int[Array, "*rows"]
    ) -> Shaped[Array, "*rows width"] | PackedWeight:
        """Exact, packed bytes included: all devices but the one that holds a row contribute zero to the sum."""
        everyone = lax.all_gather(indices, self.axis, tiled=True)

        def one(part: Array) -> Array:
            own = everyone - lax.axis_index(self.axis) * part.shape[0]
            held = (own >= 0) & (own < part.shape[0])
            found = jnp.take(part, own, axis=0, mode="clip")
            found = jnp.where(held[..., None], found, jnp.zeros((), part.dtype))
            return lax.psum_scatter(found, self.axis, scatter_dimension=0, tiled=True)

        return jax.tree.map(one, table)

    def largest(self, number: Int[Array, ""]) -> Int[Array, ""]:
        """See :class:`deepinfer_jax.model.exchange.Exchange`."""
        return lax.pmax(number, self.axis)
