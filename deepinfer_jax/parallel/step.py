"""A step over a mesh: attention on each device's own requests, experts and tables across all devices."""

from __future__ import annotations

from collections.abc import Callable

from jax import lax, shard_map
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from deepinfer_jax.cache.state import State
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.transformer import Model, logits
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.parallel.experts import GatherExchange
from deepinfer_jax.parallel.layouts import Layout, parameter_specs, state_specs
from deepinfer_jax.runtime.advance import advance
from deepinfer_jax.runtime.batch import Batch

# (parameters, state, batch, block tables) -> (successor state, logits); see :func:`sharded_step`.
ShardedStep = Callable[[Model, State, Batch, Array], tuple[State, Array]]


def sharded_step(
    mesh: Mesh,
    layout: Layout,
    described: Model,
    config: ModelConfig,
    numerics: Numerics,
    *,
    implementation: str | None = None,
) -> ShardedStep:
    """The step of a layout that splits rows, slots, pages, experts, tables and vocabulary along one mesh axis.

    Args:
      mesh, layout: the devices, see :func:`deepinfer_jax.parallel.mesh.layout_mesh`.
      described: description of the parameters, unrolled and padded; the parameters themselves come stacked.
      config, numerics: static.
      implementation: of the routed experts, see :func:`pallas_kernels.grouped_experts`.

    Returns:
      The step; jit it, with the state donated. Rows, slots and blocks are numbered per device: arrays over rows, slots
      and pool rows concatenate the devices' own, and ``batch.tiles`` is the shape of one device's rows. Logits are
      float32 ``[rows vocabulary]`` of every row of every device, split along the vocabulary.
    """
    axis = layout.placed["rows"]
    rows = layout.spec(("rows",))

    def step(
        params: Model, state: State, batch: Batch, block_tables: Int[Array, "slots blocks"]
    ) -> tuple[State, Float[Array, "rows vocabulary"]]:
        placed = state_specs(state, layout)
        return shard_map(
            on_one_device,
            mesh=mesh,
            in_specs=(parameter_specs(described, layout, config, numerics), placed, rows, layout.spec(("slots",))),
            out_specs=(placed, layout.spec((None, "vocabulary"))),
            check_vma=False,
        )(params, state, batch, block_tables)

    def on_one_device(params: Model, state: State, batch: Batch, block_tables: Array) -> tuple[State, Array]:
        exchange = GatherExchange(axis, implementation)
        advanced = advance(params, state, batch.to_rows(), block_tables, config, numerics, exchange=exchange)
        everyone = lax.all_gather(advanced.hidden, axis, tiled=True)
        return advanced.state, logits(params, everyone)

    return step
