"""``deepinfer-jax bench offline``: the engine with many requests at once, and what prefix hits and replay save."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from deepinfer_jax.bench.model import draw_weights
from deepinfer_jax.bench.offline import OfflineWorkload, measure_offline, measure_prefix, measure_replay
from deepinfer_jax.checkpoint.default_model import default_model
from deepinfer_jax.commands.console import Console
from deepinfer_jax.commands.options import model_option, quiet_option
from deepinfer_jax.commands.table import aligned
from deepinfer_jax.config import PRESETS, ModelConfig
from deepinfer_jax.model.params import backend_form
from deepinfer_jax.numerics import NUMERICS_NAMES, Numerics

EPILOG = """
\b
Examples:
  deepinfer-jax bench offline --preset peer-50m --concurrency 1,8,32 --json
  deepinfer-jax bench offline --preset peer-50m --concurrency 8 --trace profile --trace-steps 4
  deepinfer-jax bench offline --preset peer-50m --prefix
  deepinfer-jax bench offline --preset mini-40 --replay
"""


def parse_numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Option callback: numbers of 1 or more, separated by commas."""
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no list of numbers as in 1,8,32", ctx, param) from error
    if min(numbers) < 1:
        raise click.BadParameter(f"{min(numbers)} is below 1", ctx, param)
    return numbers


@click.command(name="offline", epilog=EPILOG)
@model_option
@click.option("--preset", type=click.Choice(PRESETS), help="A built-in configuration instead, with random weights.")
@click.option("--dtype", type=click.Choice(NUMERICS_NAMES), default="f32", show_default=True, help="Numerics.")
@click.option(
    "--concurrency",
    callback=parse_numbers,
    default="1,8,32",
    show_default=True,
    metavar="N,N,...",
    help="Requests at a time.",
)
@click.option("--prompt", type=click.IntRange(min=1), help="Prompt tokens.  [default: 512; 4000 and 2000 below]")
@click.option("--steps", type=click.IntRange(min=4), default=64, show_default=True, help="New tokens of each request.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs; the best counts.")
@click.option("--deterministic", is_flag=True, help="A request's tokens shall be the same whatever else runs; slower.")
@click.option(
    "--trace",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write a jax.profiler trace of some decode steps there, in a run of its own behind the measured ones.",
)
@click.option(
    "--trace-steps", type=click.IntRange(min=1), default=8, show_default=True, metavar="N", help="Steps of the trace."
)
@click.option("--prefix", "prefix", is_flag=True, help="Instead: a prompt cold and behind a hit of 3,840 tokens.")
@click.option("--replay", "replay", is_flag=True, help="Instead: a cold prompt without and with decoder replay.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@quiet_option
def offline_command(
    directory: Path | None,
    preset: str | None,
    dtype: str,
    concurrency: tuple[int, ...],
    prompt: int | None,
    steps: int,
    repeats: int,
    deterministic: bool,
    trace: Path | None,
    trace_steps: int,
    prefix: bool,
    replay: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run many requests at once through the engine. Best of the repeats.

    Step times are those in which all requests decode. Host time is the processor time of the engine's thread.
    """
    if directory is not None and preset is not None:
        raise click.UsageError("give at most one of --model and --preset")
    if prefix and replay:
        raise click.UsageError("give at most one of --prefix and --replay")
    if (prefix or replay) and (deterministic or trace is not None):
        raise click.UsageError("--deterministic and --trace go with the plain run")
    console, numerics = Console(quiet), Numerics.preset(dtype)
    if preset is None:
        place = default_model() if directory is None else directory
        config = ModelConfig.from_directory(place)
        params = console.load_model(place, config, numerics, form=backend_form)
    else:
        config = ModelConfig.preset(preset)
        params = draw_weights(config, numerics)
    model = (params, config, numerics)
    if prefix:
        runs: list[Any] = [measure_prefix(*model, prompt=prompt or 4000, repeats=repeats, progress=console.note)]
    elif replay:
        runs = [measure_replay(*model, prompt=prompt or 2000, repeats=repeats, progress=console.note)]
    else:
        work = OfflineWorkload(
            concurrency=concurrency,
            prompt=prompt or 512,
            steps=steps,
            repeats=repeats,
            deterministic=deterministic,
            trace=trace,
            trace_steps=trace_steps,
        )
        runs = list(measure_offline(*model, work, console.note))
    figures = [dataclasses.asdict(run) for run in runs]
    if as_json:
        console.text(
            json.dumps({"model": preset or str(directory or "default"), "dtype": dtype, "runs": figures}) + "\n"
        )
        return
    rows = [tuple(figures[0]), *(tuple(_number(value) for value in run.values()) for run in figures)]
    console.text(aligned(rows, frozenset(range(len(rows[0])))))


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
