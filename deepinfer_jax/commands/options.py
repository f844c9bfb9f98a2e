"""Options and values that several subcommands share."""

from __future__ import annotations

import re
from pathlib import Path

import click

from deepinfer_jax.numerics import F32, NUMERICS_NAMES

_INTEGER = re.compile(r"-?[0-9]+")


def parse_token_ids(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Option callback: ids separated by commas. Whether they are in the vocabulary is checked with the model.

    Raises:
      click.BadParameter: names the first piece that is not an integer.
    """
    if value is None:
        return None
    pieces = [piece.strip() for piece in value.split(",")]
    for piece in pieces:
        if not _INTEGER.fullmatch(piece):
            raise click.BadParameter(f"{piece!r} is not a token id; give integers as in 0,17,25", ctx, param)
    return tuple(int(piece) for piece in pieces)


model_option = click.option(
    "--model",
    "directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Checkpoint directory with config.json and tokenizer.json: of the released layout, or converted.  "
    "[default: the small trained model that comes with the library]",
)

numerics_option = click.option(
    "--numerics",
    type=click.Choice(NUMERICS_NAMES),
    default=F32.name,
    show_default=True,
    help="f32: dequantised weights, exact arithmetic. f32q: the same with caches rounded to the released formats. "
    "bf16: weights, activations and caches in bfloat16. released: packed weights and the release's own rounding.",
)

quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="Write nothing but errors to standard error: no progress, no summary."
)
