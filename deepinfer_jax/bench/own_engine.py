"""This project's own engine behind the line protocol: one configuration, one numerics, random weights.

Usage: ``python -m deepinfer_jax.bench.own_engine CONFIG NUMERICS``, with a ``config.json`` or the name of a preset.
"""

from __future__ import annotations

import functools
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

from deepinfer_jax import __version__
from deepinfer_jax.bench.drivers.line_protocol import claim_output, serve
from deepinfer_jax.bench.model import ModelRun, Workload, draw_weights
from deepinfer_jax.config import PRESETS, ModelConfig
from deepinfer_jax.model.params import count
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics


def main() -> None:
    """Draw the weights and serve turns."""
    place, name = sys.argv[1:]
    answers = claim_output()
    config = ModelConfig.preset(place) if place in PRESETS else ModelConfig.from_file(Path(place))
    numerics = Numerics.preset(name)
    weights = draw_weights(config, numerics)

    @functools.cache
    def prepared(batch: int, prompt: int, steps: int) -> ModelRun:
        return ModelRun(config, numerics, Workload(batch, prompt, steps), weights)

    def turn(batch: int, prompt: int, steps: int, seed: int) -> dict[str, float]:
        prefill, decode = prepared(batch, prompt, steps).repeat(np.random.default_rng(seed), steps)
        return {"prefill_seconds": prefill, "decode_seconds": decode, "decode_tokens": batch * steps}

    versions = {"deepinfer-jax": __version__} | {library: version(library) for library in ("jax", "jaxlib")}
    serve(answers, {"versions": versions, "parameters": count(Model.describe(config))}, turn)


if __name__ == "__main__":
    main()
