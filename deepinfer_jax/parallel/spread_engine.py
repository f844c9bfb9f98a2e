"""The engine's device work over a mesh: every device is a shard with its own rows, slots and pages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, shard_map
from jax.sharding import Mesh
from jaxtyping import Array, Float

from deepinfer_jax.cache.state import State, initial_state
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.params import Parameter
from deepinfer_jax.model.transformer import Model, logits
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.parallel.experts import GatherExchange
from deepinfer_jax.parallel.layouts import (
    Layout,
    expert_and_data_parallel,
    padded,
    parameter_specs,
    shardings,
    state_specs,
)
from deepinfer_jax.parallel.mesh import layout_mesh
from deepinfer_jax.runtime.device import StepFunctions, StepSettings
from deepinfer_jax.runtime.sampler import Choices, Counts, Sampled
from deepinfer_jax.runtime.step import StepInput, forward_step, sample_step, score_step


@dataclasses.dataclass(frozen=True)
class Spread:
    """A model over devices: its parameters in place, and the parts of a step.

    ``place``: puts an empty state, empty counts and the tokens before the first step, of all shards, on the devices.
    """

    params: Model
    functions: StepFunctions
    place: Callable[[State, Counts, Array], tuple[State, Counts, Array]]


def spread(
    params: Model,
    config: ModelConfig,
    numerics: Numerics,
    settings: StepSettings,
    devices: Sequence[jax.Device],
) -> Spread:
    """Spread a model's experts, tables and vocabulary over devices, and its requests too.

    Args:
      params: unrolled, of plain arrays; vision is left out.
      config, numerics: of the model.
      settings: of the engine's step.
      devices: one shard each.
    """
    layout = expert_and_data_parallel(len(devices))
    mesh = layout_mesh(layout, devices)
    bare = dataclasses.replace(Model.describe(config), vision=None)
    described = padded(bare, layout)
    whole = jax.tree.map(
        _widened, described, dataclasses.replace(params, vision=None), is_leaf=lambda item: isinstance(item, Parameter)
    ).stacked(config)
    specs = parameter_specs(described, layout, config, numerics)

    def place(state: State, counts: Counts, previous: Array) -> tuple[State, Counts, Array]:
        along = layout.spec(("rows",))
        places = (state_specs(state, layout), Counts(along, along), along)
        put = jax.device_put((state, counts, previous), shardings(places, mesh))
        return put[0], put[1], put[2]

    return Spread(
        jax.device_put(whole, shardings(specs, mesh)),
        _functions(mesh, layout, specs, config, numerics, settings),
        place,
    )


def _functions(
    mesh: Mesh, layout: Layout, specs: Model, config: ModelConfig, numerics: Numerics, settings: StepSettings
) -> StepFunctions:
    axis, rows = layout.placed["rows"], layout.spec(("rows",))
    exchange = GatherExchange(axis)
    most, deterministic = settings.most, settings.deterministic

    def head(params: Model, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocabulary"]:
        """Every device's rows by its part of the vocabulary, then every device its own rows by all of it."""
        everyone = lax.all_gather(hidden, axis, tiled=True)
        whole = lax.all_to_all(logits(params, everyone), axis, split_axis=0, concat_axis=1, tiled=True)
        return whole[:, : config.vocab_size]

    def over(function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any) -> Callable[..., Any]:
        return shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)

    def forward(params: Model, state: State, step: StepInput, previous: Array) -> Any:
        run = functools.partial(
            forward_step,
            config=config,
            numerics=numerics,
            scored=settings.scored if settings.deterministic else 0,
            deterministic=settings.deterministic,
            exchange=exchange,
        )
        placed = state_specs(state, layout)
        return over(run, (specs, placed, rows, rows), (placed, rows, rows, rows))(params, state, step, previous)

    def sample(params: Model, hidden: Array, choices: Choices, counts: Counts) -> tuple[Sampled, Counts, Array]:
        run = functools.partial(sample_step, places=settings.places, head=head, most=most, deterministic=deterministic)
        done: tuple[Sampled, Counts, Array] = over(run, (specs, rows, rows, rows), rows)(
            params, hidden, choices, counts
        )
        return done

    def score(params: Model, hidden: Array, targets: Array) -> Any:
        run = functools.partial(score_step, head=head, most=most, deterministic=deterministic)
        return over(run, (specs, rows, rows), rows)(params, hidden, targets)

    return StepFunctions(forward, sample, score)


def _widened(item: Parameter, value: Any) -> Any:
    """A parameter filled up to the size that splits evenly; nothing reads what is added."""
    if value is None or value.shape == item.shape:
        return value
    missing = [(0, wanted - size) for wanted, size in zip(item.shape, value.shape, strict=True)]
    return jnp.pad(value, missing)


def empty_shards(
    config: ModelConfig,
    numerics: Numerics,
    shards: int,
    *,
    slots: int,
    blocks: int,
    layout: Any,
    places: int,
    max_drafts: int | None,
    fill: float,
) -> tuple[State, Counts, Array]:
    """The state, counts and tokens of all shards before anything ran."""
    state = initial_state(
        config,
        numerics,
        slots=shards * slots,
        blocks=shards * blocks,
        layout=layout,
        max_drafts=max_drafts,
        fill=fill,
    )
    return state, Counts.empty(shards * slots, config.vocab_size), jnp.zeros(shards * places, np.int32)
