"""The optimiser, and the loop around a training step, which a killed run takes up again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import orbax.checkpoint as ocp
from flax import struct
from jaxtyping import Array, Float, Int

from deepinfer_jax.model.params import Parameter, Stored, Tree
from examples.train_tiny.initialisation import first_parameters

CURVE_FILE = "curve.jsonl"
Figures = dict[str, Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How long and how fast to train.

    The rate rises for ``warm_up`` steps, stays, and falls to a fiftieth over the last ``decay`` steps.
    ``stored_steps``: the last steps, in which parameters are rounded to their stored formats. ``save_every``: steps
    between checkpoints.
    """

    steps: int
    batch: int
    decay: int
    stored_steps: int
    peak_rate: float = 5e-3
    warm_up: int = 100
    weight_decay: float = 0.1
    save_every: int = 100
    seed: int = 0

    def stored(self, step: int) -> bool:
        """Whether a step sees parameters as they will be stored."""
        return step >= self.steps - self.stored_steps


@struct.dataclass
class Progress:
    """What a checkpoint of a run holds."""

    params: Any
    optimiser: Any
    step: Int[Array, ""]


def muon_and_adam(described: Tree, schedule: Schedule) -> optax.GradientTransformation:
    """Muon for the quantised matrices, AdamW for all else.

    Muon moves a matrix by a fifth of the rate in root mean square, about as far as AdamW does on noisy gradients (Liu
    et al., "Muon is Scalable for LLM Training", 2025).
    """
    peak = schedule.peak_rate
    rate = optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, schedule.warm_up),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.02 * peak, schedule.decay),
        ],
        [schedule.warm_up, schedule.steps - schedule.decay],
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            rate,
            consistent_rms=0.2,
            weight_decay=schedule.weight_decay,
            adam_b2=0.95,
            adam_weight_decay=schedule.weight_decay,
            muon_weight_dimension_numbers=jax.tree.map(_matrix_axes, described),
        ),
    )


def _matrix_axes(item: Parameter) -> optax.contrib.MuonDimensionNumbers | None:
    if item.stored not in (Stored.FP8_BLOCKS, Stored.FP4_ROWS):
        return None
    last = len(item.shape) - 1
    return optax.contrib.MuonDimensionNumbers(reduction_axis=last, output_axis=last - 1)


def first_progress(described: Tree, optimiser: optax.GradientTransformation, schedule: Schedule) -> Progress:
    """The progress before the first step."""
    params = first_parameters(described, schedule.seed)
    return Progress(params, optimiser.init(params), jnp.zeros((), jnp.int32))


def train(
    progress: Progress,
    update: Callable[[Progress, int], tuple[Progress, Figures]],
    schedule: Schedule,
    directory: Path,
    report: Callable[[dict[str, float]], None] = lambda line: None,
) -> Progress:
    """Train from where ``directory`` left off, or from ``progress``, to the schedule's end.

    ``update`` takes one step, whose number it is given. The curve stands in ``curve.jsonl``, one object a step.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with ocp.CheckpointManager(
        (directory / "checkpoints").absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=1, save_interval_steps=schedule.save_every),
    ) as manager:
        latest = manager.latest_step()
        if latest is not None:
            leaves, structure = jax.tree.flatten(progress)
            progress = jax.tree.unflatten(structure, manager.restore(latest, args=ocp.args.StandardRestore(leaves)))
        with (directory / CURVE_FILE).open("a+", encoding="utf-8") as curve:
            _cut_curve(curve, int(progress.step))
            for step in range(int(progress.step), schedule.steps):
                progress, figures = update(progress, step)
                line = {"step": step + 1} | {name: float(value) for name, value in figures.items()}
                curve.write(json.dumps(line) + "\n")
                report(line)
                if (step + 1) % schedule.save_every == 0 or step + 1 == schedule.steps:
                    curve.flush()
                    manager.save(step + 1, args=ocp.args.StandardSave(jax.tree.leaves(progress)), force=True)
                    manager.wait_until_finished()
    return progress


def _cut_curve(curve: TextIO, step: int) -> None:
    """Drop the lines behind a checkpoint, whose steps are taken again."""
    curve.seek(0)
    kept = curve.readlines()[:step]
    curve.seek(0)
    curve.truncate()
    curve.writelines(kept)
