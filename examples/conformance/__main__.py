"""``python -m examples.conformance``: build a kit, run a model on one, and check what an engine made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from deepinfer_jax.checkpoint.default_model import default_model
from deepinfer_jax.cli import SentenceGroup
from deepinfer_jax.commands.table import aligned
from examples.conformance.comparison import Outcome, Verdict, compare
from examples.conformance.kit import CHECKPOINT, Kit, Results
from examples.conformance.recording import record_kit, run_kit

KIT = Path(__file__).parent / "kit"
directory = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group(cls=SentenceGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Compare engines that run DeepSeek-V4.1 models, array by array."""


@main.command()
@click.option("--model", type=directory, metavar="DIR", help="Checkpoint.  [default: the one that is shipped]")
@click.option("--kit", type=click.Path(file_okay=False, path_type=Path), default=KIT, metavar="DIR", help="Target.")
def build(model: Path | None, kit: Path) -> None:
    """Record the prompts, chains and arrays of a kit."""
    record_kit(default_model() if model is None else model, _note).write(kit)


@main.command()
@click.option("--model", type=directory, metavar="DIR", help="Checkpoint.  [default: the kit's own]")
@click.argument("kit", type=directory)
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
def run(model: Path | None, kit: Path, out: Path) -> None:
    """Write to OUT what this engine makes of a kit."""
    run_kit(Kit.read(kit), kit / CHECKPOINT if model is None else model, out, _note)


@main.command()
@click.argument("results", type=directory)
@click.option("--kit", type=directory, default=KIT, metavar="DIR", help="Kit.  [default: the one that is shipped]")
@click.pass_context
def check(ctx: click.Context, results: Path, kit: Path) -> None:
    """Compare results with a kit, array by array.

    Results lie in files of the kit's names and form. What is missing is listed and is no failure. Ends with exit code 1
    where something is damaged or beyond its tolerance, or where nothing could be compared.
    """
    outcomes = compare(Kit.read(kit), Results.read(results))
    click.echo(report(outcomes), nl=False)
    counts = Counter(outcome.verdict for outcome in outcomes)
    if counts[Verdict.FAIL] or not counts[Verdict.PASS]:
        ctx.exit(1)


def report(outcomes: Sequence[Outcome]) -> str:
    """A table of everything, and how many there are of each kind."""
    rows = [
        (outcome.name, _number(outcome.difference), _number(outcome.tolerance), outcome.verdict.value, outcome.remark)
        for outcome in outcomes
    ]
    counts = Counter(outcome.verdict.value for outcome in outcomes)
    summary = ", ".join(f"{counts[verdict.value]} {verdict.value}" for verdict in Verdict)
    return aligned([("what", "difference", "tolerance", "verdict", ""), *rows], frozenset({1, 2})) + f"{summary}\n"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _note(line: str) -> None:
    click.echo(line, err=True)


if __name__ == "__main__":
    main()
