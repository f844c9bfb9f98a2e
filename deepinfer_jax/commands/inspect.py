"""``deepinfer-jax inspect``: what a checkpoint or a preset consists of, and whether the checkpoint is complete."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
import jax

from deepinfer_jax.checkpoint.default_model import default_model
from deepinfer_jax.checkpoint.digest import weights_id
from deepinfer_jax.checkpoint.reader import Coverage, coverage, open_storage
from deepinfer_jax.commands.console import Console
from deepinfer_jax.commands.description import Document, describe_files, describe_model
from deepinfer_jax.commands.table import table
from deepinfer_jax.config import PRESETS, ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.transformer import Model

EPILOG = """
\b
Examples:
  deepinfer-jax inspect
  deepinfer-jax inspect --preset v4.1-flash
  deepinfer-jax inspect --model MODEL --json | jq .parameters
  deepinfer-jax inspect --model MODEL --digest
"""


@click.command(name="inspect", epilog=EPILOG)
@click.option(
    "--model",
    "directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Checkpoint directory; only config.json and the headers of its tensor files are read.  "
    "[default: the small trained model that comes with the library]",
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
    if directory is not None and preset is not None:
        raise click.UsageError("give at most one of --model and --preset")
    if digest and preset is not None:
        raise click.UsageError("--digest reads a checkpoint, and a preset is none")
    # Nothing here computes on a device, and one that is busy or absent must not stand in the way.
    jax.config.update("jax_platforms", "cpu")
    if preset is None:
        _describe_checkpoint(default_model() if directory is None else directory, digest=digest, as_json=as_json)
    else:
        _print(_described(ModelConfig.preset(preset)), preset, as_json=as_json)


def _describe_checkpoint(directory: Path, *, digest: bool, as_json: bool) -> None:
    config = ModelConfig.from_directory(directory)
    document = _described(config)
    storage = open_storage(directory)
    covered = coverage(Model.describe(config), storage)
    identity = storage.verify(Console(quiet=False).progress) if digest else weights_id(directory)
    document |= describe_files(covered, storage) | {"tensors": covered.described}
    document["weights_id"] = dataclasses.asdict(identity)
    _print(document, f"{directory}", as_json=as_json)
    _refuse(covered)


def _described(config: ModelConfig) -> Document:
    """The description of a model whose files are not looked at."""
    described = Model.describe(config)
    return describe_model(config, described) | {"coverage": None, "dtypes": None, "weights_id": None}


def _print(document: Document, name: str, *, as_json: bool) -> None:
    click.echo(json.dumps(document, indent=2) if as_json else table(document, name))


def _refuse(covered: Coverage) -> None:
    """End with an error for a checkpoint that cannot be loaded for its names."""
    for names, fault in ((covered.missing, "missing"), (covered.extra, "extra")):
        if names:
            others = f", nor are {len(names) - 1} others" if len(names) > 1 else ""
            raise CheckpointError(names[0], fault, f"every tensor that config.json describes, and no other{others}")
