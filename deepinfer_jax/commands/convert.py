"""``deepinfer-jax convert``: a released checkpoint as orbax arrays, ready for any devices."""

from __future__ import annotations

import time
from pathlib import Path

import click
import jax

from deepinfer_jax.checkpoint.convert import STORED_NUMERICS, convert
from deepinfer_jax.commands.console import Console
from deepinfer_jax.commands.options import quiet_option
from deepinfer_jax.numerics import Numerics

EPILOG = """
\b
Examples:
  deepinfer-jax convert MODEL CONVERTED
  deepinfer-jax convert MODEL CONVERTED --numerics bf16
  deepinfer-jax generate --model CONVERTED --prompt 'The lighthouse' --numerics released
"""


@click.command(name="convert", epilog=EPILOG)
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--numerics",
    type=click.Choice(STORED_NUMERICS),
    help="Form of the weights: released keeps fp8 and fp4 packed, f32 and bf16 expand them.  "
    "[default: the most compact one that loses nothing]",
)
@quiet_option
def command(source: Path, target: Path, numerics: str | None, quiet: bool) -> None:
    """Convert the checkpoint SOURCE, of the released layout, to the directory TARGET.

    TARGET can be used as --model everywhere; parts of it can be read alone. A conversion that was interrupted goes on
    when the same command is given again. Everything written is read back and compared before TARGET counts as complete.
    """
    # Weights pass through host memory only, and a device that is busy or absent must not stand in the way.
    jax.config.update("jax_platforms", "cpu")
    console = Console(quiet)
    started = time.perf_counter()
    chosen = None if numerics is None else Numerics.preset(numerics)
    digests = convert(source, target, chosen, console.progress)
    seconds = time.perf_counter() - started
    console.note(f"{target}: {len(digests.tensors)} tensors, verified, {seconds:.1f} s")
    console.note(f"weights id {digests.weights_id.value}")
