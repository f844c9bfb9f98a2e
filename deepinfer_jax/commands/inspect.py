"""``deepinfer-jax inspect``: what a checkpoint or a preset consists of, and whether the checkpoint is complete."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
import jax

from deepinfer_jax.checkpoint.digest import weights_id
from deepinfer_jax.checkpoint.reader import Coverage, coverage, open_storage
from deepinfer_jax.commands.console import Console
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
  deepinfer-jax inspect --model MODEL --digest
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
@click.option(
    "--digest",
    is_flag=True,
    help="Read every tensor: check it against the digest sidecar, or write digest.json where there is none.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with complete lists.")
def command(directory: Path | None, preset: str | None, digest: bool, as_json: bool) -> None:
    """Describe a checkpoint or a preset.

    Shows the layer schedule, the segments in which layers compile, parameter counts, the memory of a running request,
    and for a checkpoint how its tensors cover its configuration, and the id of its weights. Ends with exit code 4 when
    tensors are missing or belong to nothing.
    """
    if (directory is None) == (preset is None):
        raise click.UsageError("give exactly one of --model and --preset")
    if digest and directory is None:
        raise click.UsageError("--digest goes with --model")
    # Nothing here computes on a device, and one that is busy or absent must not stand in the way.
    jax.config.update("jax_platforms", "cpu")
    if directory is None:
        assert preset is not None
        config = ModelConfig.preset(preset)
    else:
        config = ModelConfig.from_directory(directory)
    described = Model.describe(config)
    document = describe_model(config, described) | {"coverage": None, "dtypes": None, "weights_id": None}
    if directory is None:
        click.echo(json.dumps(document, indent=2) if as_json else table(document, f"{preset}"))
        return
    storage = open_storage(directory)
    covered = coverage(described, storage)
    identity = storage.verify(Console(quiet=False).progress) if digest else weights_id(directory)
    document |= describe_files(covered, storage) | {"tensors": covered.described}
    document["weights_id"] = dataclasses.asdict(identity)
    click.echo(json.dumps(document, indent=2) if as_json else table(document, f"{directory}"))
    _refuse(covered)


def _refuse(covered: Coverage) -> None:
    """End with an error for a checkpoint that cannot be loaded for its names."""
    for names, fault in ((covered.missing, "missing"), (covered.extra, "extra")):
        if names:
            others = f", nor are {len(names) - 1} others" if len(names) > 1 else ""
            raise CheckpointError(names[0], fault, f"every tensor that config.json describes, and no other{others}")
