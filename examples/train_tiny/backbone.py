"""Training the backbone: its losses, its balanced experts, one optimiser step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.layer import Layer, UnrolledLayers
from deepinfer_jax.model.transformer import Model
from examples.train_tiny.batches import Batches
from examples.train_tiny.losses import (
    answers,
    expert_loads,
    index_losses,
    next_token_losses,
    run_windows,
    with_memory,
)
from examples.train_tiny.optimisation import Figures, Progress, Schedule, first_progress, muon_and_adam, train
from examples.train_tiny.storage import as_stored

# Every so many queries one trains the indexers.
INDEX_EVERY = 16
INDEX_WEIGHT = 0.1
# How far a step moves the selection biases of the router.
BIAS_RATE = 2e-3
# Share of steps without Engram, so that the layers learn what it would spare them.
FORGETTING = 0.25


def train_backbone(
    config: ModelConfig,
    token_map: Int[Array, " vocabulary"] | None,
    batches: Batches,
    schedule: Schedule,
    directory: Path,
    report: Callable[[dict[str, float]], None] = lambda line: None,
    assistant: int | None = None,
) -> Model:
    """Train from where ``directory`` left off; returns the backbone without draft head and token map.

    ``assistant`` is the token that opens an answer in chats.
    """
    optimiser = _optimiser(config, schedule)

    def step(progress: Progress, number: int) -> tuple[Progress, Figures]:
        remembers = np.random.default_rng((schedule.seed, number)).random() >= FORGETTING
        return update(
            progress,
            token_map,
            batches.batch(number, schedule.batch),
            np.float32(remembers),
            config=config,
            assistant=assistant,
            stored=schedule.stored(number),
            optimiser=optimiser,
        )

    first = first_progress(backbone_description(config), optimiser, schedule)
    params: Model = train(first, step, schedule, directory, report).params
    return params


def backbone_description(config: ModelConfig) -> Model:
    """The described model without draft head and token map."""
    return dataclasses.replace(Model.describe(config), draft=None, token_map=None)


@functools.partial(
    jax.jit, static_argnames=("config", "assistant", "stored", "optimiser"), donate_argnames=("progress",)
)
def update(
    progress: Progress,
    token_map: Int[Array, " vocabulary"] | None,
    batch: Int[Array, "windows window"],
    remembers: Float[Array, ""],
    *,
    config: ModelConfig,
    assistant: int | None,
    stored: bool,
    optimiser: optax.GradientTransformation,
) -> tuple[Progress, Figures]:
    """One optimiser step; donates the progress.

    ``remembers`` is 0 where Engram shall add nothing, else 1; ``assistant`` marks answers in chats.
    """

    def total(params: Model) -> tuple[Array, tuple[Figures, Array]]:
        if stored:
            params = as_stored(backbone_description(config), params)
        params = dataclasses.replace(with_memory(params, remembers, config), token_map=token_map)
        output, rows = run_windows(params, batch[:, :-1], config)
        counted = answers(batch, assistant, config.eos_token_id)[:, 1:]
        losses = next_token_losses(params, output, batch[:, 1:])
        language = jnp.where(counted, losses, 0.0).sum() / jnp.maximum(counted.sum(), 1)
        index = index_losses(params, output.taps, rows, batch.shape[1] - 1, INDEX_EVERY, config)
        loads = expert_loads(output.taps, config)
        figures = {
            "loss": language,
            "index_loss": index.mean(),
            "expert_load": (loads.max(axis=1) * config.n_routed_experts).mean(),
        }
        return language + INDEX_WEIGHT * index.sum(), (figures, loads)

    gradients, (figures, loads) = jax.grad(total, has_aux=True)(progress.params)
    changes, state = optimiser.update(gradients, progress.optimiser, progress.params)
    params = optax.apply_updates(progress.params, changes)
    return Progress(_balanced(params, loads, BIAS_RATE), state, progress.step + 1), figures


@functools.lru_cache
def _optimiser(config: ModelConfig, schedule: Schedule) -> optax.GradientTransformation:
    return muon_and_adam(backbone_description(config), schedule)


def _balanced(params: Model, loads: Float[Array, "layers experts"], rate: float) -> Model:
    """Raise the selection bias of experts that were chosen less than the mean, and lower the others'."""
    assert isinstance(params.layers, UnrolledLayers)

    def moved(layer: Layer, load: Array) -> Layer:
        experts = layer.feed_forward
        step = rate * jnp.sign(load.mean() - load)
        bias = experts.text_bias + step - step.mean()
        return dataclasses.replace(layer, feed_forward=dataclasses.replace(experts, text_bias=bias, image_bias=bias))

    layers = tuple(moved(layer, loads[number]) for number, layer in enumerate(params.layers.layers))
    return dataclasses.replace(params, layers=UnrolledLayers(layers))
