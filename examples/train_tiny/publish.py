"""Writing the trained model in the released layout, quantised as the release is."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array

from deepinfer_jax.checkpoint.digest import Digests, WeightsId, write_digests, write_json
from deepinfer_jax.checkpoint.safetensors import SINGLE_FILE
from deepinfer_jax.checkpoint.synthetic_tokenizer import tokenizer_configuration
from deepinfer_jax.checkpoint.units import units_of, write_rows
from deepinfer_jax.checkpoint.writer import ShardWriter
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.params import Parameter, Stored
from deepinfer_jax.model.transformer import Model
from examples.train_tiny.preparation import CONFIG_FILE, TOKENIZER_FILE


def publish(prepared: Path, params: Model, config: ModelConfig, target: Path) -> WeightsId:
    """Write a whole model, draft head included, as a checkpoint; what ``target`` held is replaced.

    Args:
      prepared: where ``config.json`` and ``tokenizer.json`` are.
      params: float32 parameters, unrolled, with stacked experts.
      config: the configuration.
      target: the directory to write. The index comes last: without it the directory is no checkpoint.
    """
    target.mkdir(parents=True, exist_ok=True)
    (target / SINGLE_FILE).unlink(missing_ok=True)
    for name in (CONFIG_FILE, TOKENIZER_FILE):
        shutil.copyfile(prepared / name, target / name)
    write_json(target / "tokenizer_config.json", tokenizer_configuration(config))
    values = released_values(Model.describe(config), params)
    units = list(units_of(config, quantised=True))
    tensors = (tensor for unit in units for tensor in unit.tensors)
    with ShardWriter(target / SINGLE_FILE, tensors) as shard:
        for unit in units:
            write_rows(shard, unit, values[unit.weight.name])
        digests = Digests(shard.digests())
        write_digests(target, digests)
    return digests.weights_id


def released_values(described: Model, params: Model) -> dict[str, Array]:
    """The float32 values of every released tensor but the scales, by name."""
    found: dict[str, Array] = {}

    def take(item: Parameter, values: Array) -> None:
        if item.stored is Stored.DERIVED:
            return
        stacked = values if item.stacked else values[None]
        for names, part in zip(item.released, stacked, strict=True):
            pieces = np.split(np.asarray(part), len(names)) if len(names) > 1 else [np.asarray(part)]
            found.update(zip(names, map(jax.numpy.asarray, pieces), strict=True))

    jax.tree.map(take, described, params, is_leaf=lambda leaf: isinstance(leaf, Parameter))
    return found
