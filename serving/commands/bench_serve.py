"""``deepinfer-jax bench serve``: what serving costs beside the engine, and how states travel."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from importlib import resources
from pathlib import Path

import click

from deepinfer_jax.checkpoint.synthetic import synthesize
from deepinfer_jax.commands.console import Console
from deepinfer_jax.commands.options import model_option, quiet_option
from deepinfer_jax.config import PRESETS
from deepinfer_jax.numerics import NUMERICS_NAMES
from serving.bench.cluster import Addresses
from serving.bench.run import PARTS, Sizes, Terminal, run_parts
from serving.configuration import ModelSection
from serving.errors import ServingError
from serving.processes import ProcessError, interrupt_on_signals

EPILOG = """
\b
Examples:
  deepinfer-jax bench serve
  deepinfer-jax bench serve --parts transfer,overlap --turns 16 --json
  deepinfer-jax bench serve --preset peer-50m --parts overhead
  deepinfer-jax bench serve --address 127.0.0.1:8500 --prefill 127.0.0.1:8501 --decode 127.0.0.1:8503

\b
Parts:
  overhead  time per token and to the first one that gRPC, a gateway and a hand-over add to the engine
  input     tokens of prompts per second, those that caches have counted and not
  overlap   how much of a long prompt's state is still to come when the prompt is computed
  transfer  states by gRPC and by shared memory, beside bare streams of bytes
  streams   many streams at once, each compared with the engine alone

Exit code 1: the tokens of a stream are not those of the engine alone, or a server failed.
"""


def parse_parts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Option callback: names of parts, separated by commas."""
    parts = tuple(value.split(","))
    for part in parts:
        if part not in PARTS:
            raise click.BadParameter(f"{part!r} is none of {', '.join(PARTS)}", ctx, param)
    return parts


@click.command(name="serve", epilog=EPILOG)
@model_option
@click.option("--preset", type=click.Choice(PRESETS), help="A built-in configuration instead, with random weights.")
@click.option(
    "--numerics", type=click.Choice(NUMERICS_NAMES), default="f32", show_default=True, help="Of the servers' engines."
)
@click.option(
    "--parts",
    callback=parse_parts,
    default=",".join(PARTS),
    show_default=True,
    metavar="PART,...",
    help="What is measured.",
)
@click.option("--turns", type=click.IntRange(min=1), default=Sizes.turns, show_default=True, help="Of each kind.")
@click.option(
    "--streams", type=click.IntRange(min=1), default=Sizes.streams, show_default=True, help="Streams at once."
)
@click.option(
    "--address",
    metavar="HOST:PORT",
    help="A gateway that runs already, with the same model; its workers by the next two.  [default: start servers]",
)
@click.option("--prefill", metavar="HOST:PORT", help="A prefill worker of it; without one, no overlap.")
@click.option("--decode", metavar="HOST:PORT", help="A decode worker of it; without one, no overlap.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@quiet_option
def command(
    directory: Path | None,
    preset: str | None,
    numerics: str,
    parts: tuple[str, ...],
    turns: int,
    streams: int,
    address: str | None,
    prefill: str | None,
    decode: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure what servers add to the engine alone.

    Starts a prefill worker, a decode worker and two gateways on this machine, and again, deterministic and exact, for
    the streams. What is compared takes turns in one run: on a machine that is shared only ratios mean much.
    """
    if directory is not None and preset is not None:
        raise click.UsageError("give at most one of --model and --preset")
    if address is None and (prefill is not None or decode is not None):
        raise click.UsageError("--prefill and --decode go with --address")
    console = Console(quiet)
    interrupt_on_signals()
    with ExitStack() as stack:
        if preset is not None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deepinfer-")))
            console.note(f"drawing weights of {preset}")
            place = resources.files("deepinfer_jax").joinpath("presets", f"{preset}.json")
            synthesize(json.loads(place.read_text(encoding="utf-8")), directory, quantised=False)
        model = ModelSection("" if directory is None else str(directory), preset or "", numerics)
        running = None if address is None else Addresses(gateway=address, prefill=prefill, decode=decode)
        terminal = Terminal(console.note, console.progress)
        try:
            report = run_parts(model, parts, Sizes(turns=turns, streams=streams), terminal, running=running)
        except (ServingError, ProcessError) as error:
            raise click.ClickException(str(error)) from error
    console.text(json.dumps(report.document()) + "\n" if as_json else report.text())
    if report.streams is not None and not report.streams.all_equal:
        raise click.exceptions.Exit(1)
