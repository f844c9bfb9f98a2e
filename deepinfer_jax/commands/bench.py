"""``deepinfer-jax bench``: the model on this machine, alone and beside other engines."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import click
import jax

from deepinfer_jax.bench.agreement import PEER as AGREEMENT_PEER
from deepinfer_jax.bench.agreement import compare_first_tokens
from deepinfer_jax.bench.model import Workload, measure_model
from deepinfer_jax.bench.peers import PEERS, Place, check_installed
from deepinfer_jax.bench.process import EngineError
from deepinfer_jax.bench.side_by_side import Plan, compare
from deepinfer_jax.checkpoint.default_model import default_model
from deepinfer_jax.commands.bench_offline import offline_command
from deepinfer_jax.commands.bench_text import agreement_text, comparison_text, figures_text
from deepinfer_jax.commands.console import Console
from deepinfer_jax.commands.options import model_option, quiet_option
from deepinfer_jax.commands.settings import outer_environment, process_settings
from deepinfer_jax.config import PRESETS, ModelConfig
from deepinfer_jax.model.params import backend_form
from deepinfer_jax.numerics import NUMERICS_NAMES, Numerics

BENCH_GROUP = "deepinfer_jax.commands.bench"

EPILOG = """
\b
Examples:
  deepinfer-jax bench model --prompt 128
  deepinfer-jax bench model --preset peer-50m --batch 8
  deepinfer-jax bench model --config config.json --dtype bf16 --prompt 128 --json
  deepinfer-jax bench offline --preset peer-50m --concurrency 1,8,32
  deepinfer-jax bench peers --work-directory ~/peers --only torch --repeats 3
  deepinfer-jax bench agreement --prompts 50 --margin 0.5
"""


def parse_environments(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    """Option callback: ``PEER=DIR`` pairs."""
    environments = {}
    for value in values:
        name, separator, directory = value.partition("=")
        if not separator or not directory:
            raise click.BadParameter(f"{value!r} has not the form PEER=DIR", ctx, param)
        environments[name] = Path(directory).absolute()
    return environments


work_directory_option = click.option(
    "--work-directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/peers"),
    show_default=True,
    metavar="DIR",
    help="Where the peers' own environments, a synthetic checkpoint and logs live; kept between runs.",
)
environments_option = click.option(
    "--environment",
    "environments",
    multiple=True,
    callback=parse_environments,
    metavar="PEER=DIR",
    help="A virtual environment that has a peer installed, instead of making one; may be repeated.",
)


@contextlib.contextmanager
def ending_on_terminate() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that engines which stand still end too."""
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class BenchGroup(click.Group):
    """Its own subcommands, and those that other packages install under :data:`BENCH_GROUP`, imported when used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(entry.name for entry in entry_points(group=BENCH_GROUP))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        found = [entry for entry in entry_points(group=BENCH_GROUP) if entry.name == cmd_name]
        return found[0].load() if own is None and found else own


@click.group(name="bench", cls=BenchGroup, epilog=EPILOG)
def command() -> None:
    """Measure speed on this machine, and compare with other engines."""


command.add_command(offline_command)


@command.command(name="model", epilog=EPILOG)
@model_option
@click.option("--preset", type=click.Choice(PRESETS), help="A built-in configuration instead, with random weights.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A config.json instead, with random weights.",
)
@click.option("--dtype", type=click.Choice(NUMERICS_NAMES), default="f32", show_default=True, help="Numerics.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Requests side by side.")
@click.option("--prompt", type=click.IntRange(min=1), default=512, show_default=True, help="Prompt tokens each.")
@click.option("--steps", type=click.IntRange(min=1), default=64, show_default=True, help="Decode steps.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs; the best counts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@quiet_option
def model_command(
    directory: Path | None,
    preset: str | None,
    config_file: Path | None,
    dtype: str,
    batch: int,
    prompt: int,
    steps: int,
    repeats: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Prefill a batch of random prompts and decode. Best of the repeats; medians beside.

    The weights are those of a checkpoint, or random ones of a configuration: give at most one of --model, --preset and
    --config.
    """
    if sum(source is not None for source in (directory, preset, config_file)) > 1:
        raise click.UsageError("give at most one of --model, --preset and --config")
    console, numerics = Console(quiet), Numerics.preset(dtype)
    work = Workload(batch=batch, prompt=prompt, steps=steps, repeats=repeats)
    params = None
    if preset is not None:
        config = ModelConfig.preset(preset)
    elif config_file is not None:
        config = ModelConfig.from_file(config_file)
    else:
        place = default_model() if directory is None else directory
        config = ModelConfig.from_directory(place)
        work.check(config)
        params = console.load_model(place, config, numerics, form=backend_form)
    with _fresh_compilation():
        figures = measure_model(config, numerics, work, console.note, params)
    if as_json:
        console.text(json.dumps(dataclasses.asdict(figures)) + "\n")
    else:
        console.text(figures_text(figures))


@command.command(name="peers", epilog=EPILOG)
@work_directory_option
@click.option("--only", type=click.Choice(list(PEERS)), multiple=True, help="These peers only; may be repeated.")
@environments_option
@click.option(
    "--dtype",
    "numerics",
    type=click.Choice(NUMERICS_NAMES),
    multiple=True,
    default=Plan.numerics,
    show_default=True,
    help="This engine's numerics; may be repeated.",
)
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(min=1),
    multiple=True,
    default=Plan.batches,
    show_default=True,
    help="Requests side by side; may be repeated.",
)
@click.option("--prompt", type=click.IntRange(min=1), default=Plan.prompt, show_default=True, help="Prompt tokens.")
@click.option("--steps", type=click.IntRange(min=1), default=Plan.steps, show_default=True, help="Decode steps.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=Plan.repeats, show_default=True, help="Turns of each engine."
)
@click.option(
    "--processors",
    type=click.IntRange(min=1),
    default=Plan.processors,
    show_default=True,
    help="Processors that each engine may use.",
)
@click.option(
    "--maximum-load",
    type=click.FloatRange(min=0),
    default=Plan.maximum_load,
    show_default=True,
    help="Load average above which nothing is started.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@quiet_option
def peers_command(
    work_directory: Path,
    only: tuple[str, ...],
    environments: dict[str, Path],
    numerics: tuple[str, ...],
    batches: tuple[int, ...],
    prompt: int,
    steps: int,
    repeats: int,
    processors: int,
    maximum_load: float,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run other CPU engines and this one in turn (A B A B) on a 50 M model, and print the ratios.

    A peer that is not installed yet is installed with pip. An engine that fails is reported at the end, with exit code
    1, and the others go on.
    """
    plan = Plan(
        peers=only or tuple(PEERS),
        numerics=numerics,
        batches=batches,
        prompt=prompt,
        steps=steps,
        repeats=repeats,
        processors=processors,
        maximum_load=maximum_load,
        environments=environments,
    )
    console = Console(quiet)
    # Other engines run on the CPU; here a device would only be held idle.
    jax.config.update("jax_platforms", "cpu")
    surroundings = outer_environment(os.environ)
    with ending_on_terminate():
        result = compare(
            plan,
            work_directory,
            environment=surroundings,
            own_settings=process_settings(surroundings),
            progress=console.note,
        )
    console.text(json.dumps(dataclasses.asdict(result)) + "\n" if as_json else comparison_text(result))
    for failure in result.failures:
        click.echo(f"Error: {failure.engine}: {failure.reason}", err=True)
    if result.failures:
        raise click.exceptions.Exit(1)


@command.command(name="agreement", epilog=EPILOG)
@work_directory_option
@environments_option
@click.option("--prompts", type=click.IntRange(min=1), default=50, show_default=True, help="Prompts to compare.")
@click.option("--margin", type=click.FloatRange(min=0), default=0.5, show_default=True, help="Least lead of a logit.")
@click.option("--length", type=click.IntRange(min=1), default=48, show_default=True, help="Tokens of a prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@quiet_option
def agreement_command(
    work_directory: Path,
    environments: dict[str, Path],
    prompts: int,
    margin: float,
    length: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compare greedy first tokens with those of fastllm, which reads the same random checkpoint.

    This engine runs in `released` numerics. Only prompts count whose best logit leads the second by the margin here.
    """
    check_installed(environments)
    console = Console(quiet)
    jax.config.update("jax_platforms", "cpu")
    surroundings = outer_environment(os.environ)
    place = Place(work_directory.resolve(), surroundings, process_settings(surroundings), os.cpu_count() or 1, 1)
    place.log("any").parent.mkdir(parents=True, exist_ok=True)
    with ending_on_terminate():
        try:
            result = compare_first_tokens(
                place,
                environments.get(AGREEMENT_PEER),
                prompts=prompts,
                margin=margin,
                length=length,
                progress=console.note,
            )
        except EngineError as error:
            raise click.ClickException(f"{AGREEMENT_PEER}: {error}") from error
    console.text(json.dumps(dataclasses.asdict(result)) + "\n" if as_json else agreement_text(result))


@contextlib.contextmanager
def _fresh_compilation() -> Iterator[None]:
    """Without kept compilations, so that their time is seen."""
    kept = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)
