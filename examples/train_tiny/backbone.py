"""Training the backbone: one optimiser step, and the loop around it, which a killed run takes up again."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import orbax.checkpoint as ocp
from flax import struct
from jaxtyping import Array, Float, Int

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.layer import Layer, UnrolledLayers
from deepinfer_jax.model.params import Parameter, Stored
from deepinfer_jax.model.transformer import Model
from examples.train_tiny.batches import Batches
from examples.train_tiny.initialisation import first_parameters
from examples.train_tiny.losses import expert_loads, index_losses, next_token_losses, run_windows
from examples.train_tiny.storage import as_stored

CURVE_FILE = "curve.jsonl"
# Every so many queries one trains the indexers.
INDEX_EVERY = 16


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How long and how fast to train.

    The rate rises for ``warm_up`` steps, stays, and falls to a fiftieth over the last ``decay`` steps.
    ``stored_steps``: the last steps, in which parameters are rounded to their stored formats. ``bias_rate``: how far a
    step moves the selection biases of the router. ``save_every``: steps between checkpoints.
    """

    steps: int
    batch: int
    decay: int
    stored_steps: int
    peak_rate: float = 5e-3
    warm_up: int = 100
    weight_decay: float = 0.1
    index_weight: float = 0.1
    bias_rate: float = 2e-3
    save_every: int = 100
    seed: int = 0


@struct.dataclass
class Progress:
    """What a checkpoint of a run holds. ``params`` has no draft head and no token map."""

    params: Model
    optimiser: Any
    step: Int[Array, ""]


def train_backbone(
    config: ModelConfig,
    token_map: Int[Array, " vocabulary"] | None,
    batches: Batches,
    schedule: Schedule,
    directory: Path,
    report: Callable[[dict[str, float]], None] = lambda line: None,
) -> Model:
    """Train from where ``directory`` left off; returns the backbone without draft head and token map.

    The loss curve stands in ``curve.jsonl``, one object a step.
    """
    directory.mkdir(parents=True, exist_ok=True)
    optimiser = _optimiser(config, schedule)
    with ocp.CheckpointManager(
        (directory / "checkpoints").absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=1, save_interval_steps=schedule.save_every),
    ) as manager:
        progress = _first(config, optimiser, schedule.seed)
        latest = manager.latest_step()
        if latest is not None:
            leaves, structure = jax.tree.flatten(progress)
            progress = jax.tree.unflatten(structure, manager.restore(latest, args=ocp.args.StandardRestore(leaves)))
        with (directory / CURVE_FILE).open("a+", encoding="utf-8") as curve:
            _cut_curve(curve, int(progress.step))
            for step in range(int(progress.step), schedule.steps):
                progress, figures = update(
                    progress,
                    token_map,
                    batches.batch(step, schedule.batch),
                    config=config,
                    schedule=schedule,
                    stored=step >= schedule.steps - schedule.stored_steps,
                    optimiser=optimiser,
                )
                line = {"step": step + 1} | {name: float(value) for name, value in figures.items()}
                curve.write(json.dumps(line) + "\n")
                report(line)
                if (step + 1) % schedule.save_every == 0 or step + 1 == schedule.steps:
                    curve.flush()
                    manager.save(step + 1, args=ocp.args.StandardSave(jax.tree.leaves(progress)), force=True)
                    manager.wait_until_finished()
    return progress.params


@functools.partial(
    jax.jit, static_argnames=("config", "schedule", "stored", "optimiser"), donate_argnames=("progress",)
)
def update(
    progress: Progress,
    token_map: Int[Array, " vocabulary"] | None,
    batch: Int[Array, "windows window"],
    *,
    config: ModelConfig,
    schedule: Schedule,
    stored: bool,
    optimiser: optax.GradientTransformation,
) -> tuple[Progress, dict[str, Float[Array, ""]]]:
    """One optimiser step; donates the progress."""

    def total(params: Model) -> tuple[Array, tuple[dict[str, Array], Array]]:
        if stored:
            params = as_stored(backbone_description(config), params)
        params = dataclasses.replace(params, token_map=token_map)
        output, rows = run_windows(params, batch[:, :-1], config)
        language = next_token_losses(params, output, batch[:, 1:]).mean()
        index = index_losses(params, output.taps, rows, batch.shape[1] - 1, INDEX_EVERY, config)
        loads = expert_loads(output.taps, config)
        figures = {
            "loss": language,
            "index_loss": index.mean(),
            "expert_load": (loads.max(axis=1) * config.n_routed_experts).mean(),
        }
        return language + schedule.index_weight * index.sum(), (figures, loads)

    gradients, (figures, loads) = jax.grad(total, has_aux=True)(progress.params)
    changes, state = optimiser.update(gradients, progress.optimiser, progress.params)
    params = optax.apply_updates(progress.params, changes)
    params = _balanced(params, loads, schedule.bias_rate)
    return Progress(params, state, progress.step + 1), figures


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


def backbone_description(config: ModelConfig) -> Model:
    """The described model without draft head and token map."""
    return dataclasses.replace(Model.describe(config), draft=None, token_map=None)


def _first(config: ModelConfig, optimiser: optax.GradientTransformation, seed: int) -> Progress:
    params = first_parameters(backbone_description(config), seed)
    return Progress(params, optimiser.init(params), jnp.zeros((), jnp.int32))


@functools.lru_cache
def _optimiser(config: ModelConfig, schedule: Schedule) -> optax.GradientTransformation:
    """Muon for the quantised matrices, AdamW for all else; both move a parameter by about the rate in root mean square.

    Muon: Liu et al., "Muon is Scalable for LLM Training", 2025.
    """
    peak, falling = schedule.peak_rate, schedule.steps - schedule.decay
    rate = optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, schedule.warm_up),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.02 * peak, schedule.decay),
        ],
        [schedule.warm_up, falling],
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            rate,
            consistent_rms=0.2,
            weight_decay=schedule.weight_decay,
            adam_b2=0.95,
            adam_weight_decay=schedule.weight_decay,
            muon_weight_dimension_numbers=jax.tree.map(_matrix_axes, backbone_description(config)),
        ),
    )


def _matrix_axes(item: Parameter) -> optax.contrib.MuonDimensionNumbers | None:
    if item.stored not in (Stored.FP8_BLOCKS, Stored.FP4_ROWS):
        return None
    last = len(item.shape) - 1
    return optax.contrib.MuonDimensionNumbers(reduction_axis=last, output_axis=last - 1)


def _cut_curve(curve: Any, step: int) -> None:
    """Drop the lines behind a checkpoint, whose steps are taken again."""
    curve.seek(0)
    kept = curve.readlines()[:step]
    curve.seek(0)
    curve.truncate()
    curve.writelines(kept)
