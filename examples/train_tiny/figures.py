"""``python -m examples.train_tiny.figures --model DIR RUN``: what the published model is worth, beside its baseline."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from deepinfer_jax.checkpoint.digest import write_json
from deepinfer_jax.checkpoint.reader import load_model
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import F32, Numerics
from examples.train_tiny.batches import Scored, scoring_windows
from examples.train_tiny.draft_report import Survey, draft_report
from examples.train_tiny.evaluation import evaluate
from examples.train_tiny.kneser_ney import KneserNey
from examples.train_tiny.losses import next_token_losses, run_windows
from examples.train_tiny.preparation import Prepared, prepare

LENGTH = 1024
FIGURES_FILE = "figures.json"
# Numerics are compared on every so many-th window.
COMPARED_EVERY = 8


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--model",
    "directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The published model.  [default: RUN/model]",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the run.")
def main(run: Path, directory: Path | None, seed: int) -> None:
    """Measure the model of a training RUN on held-out text; writes RUN/figures.json and prints it."""
    figures = measure(prepare(run, seed), directory or run / "model")
    write_json(run / FIGURES_FILE, figures)
    click.echo(json.dumps(figures, indent=1))


def measure(prepared: Prepared, directory: Path, survey: Survey | None = None) -> dict[str, Any]:
    """All figures of a published model: baseline, held-out loss and its parts, numerics, drafts."""
    config, params = load_model(directory, F32)
    say = functools.partial(click.echo, err=True)
    scored = scoring_windows(prepared.held_out, LENGTH, config.pad_token_id)
    say("counting n-grams")
    figures: dict[str, Any] = {
        "corpus": prepared.digest,
        "training_tokens": sum(map(len, prepared.training)),
        "kneser_ney": kneser_ney_loss(prepared),
    }
    say("evaluating on held-out text")
    figures["held_out"] = dataclasses.asdict(evaluate(params, config, scored))
    say("comparing numerics")
    part = Scored(scored.windows[::COMPARED_EVERY], scored.counted[::COMPARED_EVERY])
    figures["loss_by_numerics"] = {
        name: loss_in(load_model(directory, Numerics.preset(name))[1], config, part, Numerics.preset(name))
        for name in ("f32", "f32q", "bf16", "released")
    }
    figures["drafts"] = draft_report(params, config, prepared.held_out, survey or Survey(), say)
    return figures


def kneser_ney_loss(prepared: Prepared) -> float:
    """Held-out loss of the n-gram baseline, in nats a token."""
    model = KneserNey(prepared.training, prepared.config.vocab_size)
    parts = [model.log_probabilities(document) for document in prepared.held_out]
    return float(-np.concatenate(parts).mean())


def loss_in(params: Model, config: ModelConfig, scored: Scored, numerics: Numerics) -> float:
    """Held-out loss of a model in some numerics, in nats a token; windows go through one at a time."""
    total = sum(
        np.asarray(_window_loss(params, window[None], counted[None], config=config, numerics=numerics), np.float64)
        for window, counted in zip(scored.windows, scored.counted, strict=True)
    )
    return float(total / scored.counted.sum())


@functools.partial(jax.jit, static_argnames=("config", "numerics"))
def _window_loss(
    params: Model,
    windows: Int[Array, "windows window"],
    counted: Bool[Array, "windows length"],
    *,
    config: ModelConfig,
    numerics: Numerics,
) -> Float[Array, ""]:
    output, _ = run_windows(params, windows[:, :-1], config, numerics)
    return jnp.where(counted, next_token_losses(params, output, windows[:, 1:]), 0.0).sum()


if __name__ == "__main__":
    main()
