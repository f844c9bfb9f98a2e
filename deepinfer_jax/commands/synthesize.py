"""``deepinfer-jax synthesize``: a random checkpoint in the released layout."""

from __future__ import annotations

import json
import time
from importlib import resources
from pathlib import Path
from typing import Any

import click
import jax

from deepinfer_jax.checkpoint.synthetic import synthesize
from deepinfer_jax.commands.console import Console
from deepinfer_jax.commands.options import quiet_option
from deepinfer_jax.config import PRESETS
from deepinfer_jax.errors import ConfigError

EPILOG = """
\b
Examples:
  deepinfer-jax synthesize --preset mini-40 MODEL
  deepinfer-jax synthesize --config config.json MODEL --seed 7 --dtype bf16 --shards 4
"""


@click.command(name="synthesize", epilog=EPILOG)
@click.argument("target", type=click.Path(file_okay=False, path_type=Path))
@click.option("--preset", type=click.Choice(PRESETS), help="A configuration that comes with the library.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A config.json, instead of a preset.",
)
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Another seed, other values.")
@click.option(
    "--dtype",
    type=click.Choice(("quantised", "bf16")),
    default="quantised",
    show_default=True,
    help="quantised: fp8 and packed fp4 as in the release; bf16: everything that is not float32 there.",
)
@click.option("--shards", type=click.IntRange(min=1), metavar="N", help="Tensor files.  [default: one for every 5 GB]")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that stands in TARGET.")
@quiet_option
def command(
    target: Path,
    preset: str | None,
    config_file: Path | None,
    seed: int,
    dtype: str,
    shards: int | None,
    overwrite: bool,
    quiet: bool,
) -> None:
    """Write a checkpoint with random weights and a made-up tokenizer to the directory TARGET.

    It has the released layout: config.json, tokenizer.json, safetensors files with their index, and a digest sidecar.
    The same seed gives the same weights, whatever the number of files.
    """
    if (preset is None) == (config_file is None):
        raise click.UsageError("give exactly one of --preset and --config")
    # Values are drawn on the host, and a device that is busy or absent must not stand in the way.
    jax.config.update("jax_platforms", "cpu")
    console = Console(quiet)
    started = time.perf_counter()
    identity = synthesize(
        _document(preset, config_file),
        target,
        seed=seed,
        quantised=dtype == "quantised",
        shards=shards,
        overwrite=overwrite,
        progress=console.progress,
    )
    console.note(f"{target}: {dtype} weights of seed {seed}, {time.perf_counter() - started:.1f} s")
    console.note(f"weights id {identity.value}")


def _document(preset: str | None, file: Path | None) -> dict[str, Any]:
    place = file or resources.files("deepinfer_jax").joinpath("presets", f"{preset}.json")
    try:
        document = json.loads(place.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("--config", str(file), f"a config.json ({error})") from error
    if not isinstance(document, dict):
        raise ConfigError("--config", str(file), "a JSON object")
    return document
