"""``deepinfer-jax inspect``: what a checkpoint or a preset consists of, and whether the checkpoint is complete."""

from __future__ import annotations

import json
from pathlib import Path

import click
import jax

from deepinfer_jax.checkpoint.reader import coverage
from deepinfer_jax.checkpoint.safetensors import open_directory
from deepinfer_jax.commands.description import describe_files, describe_model
from deepinfer_jax.commands.table import table
from deepinfer_jax.config import PRESETS, ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.transformer import Model

EPILOG = """
\b
Examples:
  deepinfer-jax inspect --preset v4.1-flash
  deepinfer-jax inspect --model MODEL
  deepinfer-jax inspect --model MODEL --json | jq .parameters
"""


@click.command(name="inspect", epilog=EPILOG)
@click.option(
    "--model",
    "directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Checkpoint directory; only config.json and the headers of its tensor files are read.",
)
@click.option("--preset", type=click.Choice(PRESETS), help="A configuration that comes with the library.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with complete lists.")
def command(directory: Path | None, preset: str | None, as_json: bool) -> None:
    """Describe a checkpoint or a preset.

    Shows the layer schedule, the segments in which layers compile, parameter counts, the memory of a running request,
    and for a checkpoint how its tensors cover its configuration. Ends with exit code 4 when tensors are missing.
    """
    if (directory is None) == (preset is None):
        raise click.UsageError("give exactly one of --model and --preset")
    # Nothing here computes on a device, and one that is busy or absent must not stand in the way.
    jax.config.update("jax_platforms", "cpu")
    if directory is None:
        assert preset is not None
        config = ModelConfig.preset(preset)
    else:
        config = ModelConfig.from_directory(directory)
    described = Model.describe(config)
    document = describe_model(config, described) | {"coverage": None, "dtypes": None}
    missing: tuple[str, ...] = ()
    if directory is not None:
        files = open_directory(directory)
        covered = coverage(described, files)
        missing = covered.missing
        document |= describe_files(covered, files) | {"tensors": covered.described}
    click.echo(json.dumps(document, indent=2) if as_json else table(document, f"{directory or preset}"))
    if missing:
        others = f", nor are {len(missing) - 1} others" if len(missing) > 1 else ""
        raise CheckpointError(missing[0], "missing", f"every tensor that config.json describes{others}")
