"""Random checkpoints of any configuration in the released layout, for tests and as input for other engines.

Values are drawn by the rules of :func:`deepinfer_jax.model.params.from_noise`, tensor by tensor and a few rows at a
time, so that memory does not grow with the model. A tensor's values depend on the seed and its name only: not on the
number of shards, nor on the other tensors.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.checkpoint.converted import ARRAYS, MANIFEST_FILE
from deepinfer_jax.checkpoint.digest import DIGEST_FILE, Digests, TensorDigest, WeightsId, write_digests, write_json
from deepinfer_jax.checkpoint.progress import Progress, silent
from deepinfer_jax.checkpoint.reader import UNFINISHED
from deepinfer_jax.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE
from deepinfer_jax.checkpoint.synthetic_tokenizer import tokenizer_configuration, tokenizer_document
from deepinfer_jax.checkpoint.units import Unit, shard_files, units_of, write_rows
from deepinfer_jax.checkpoint.writer import ShardWriter, write_index
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.config_keys import normalise
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.engram import hash_constants
from deepinfer_jax.model.params import SCALE_COLUMNS, from_noise
from deepinfer_jax.text.compressed_vocabulary import compressed_token_map
from deepinfer_jax.text.tokenizer import TOKENIZER_FILE, Tokenizer

SHARD_BYTES = 5_000_000_000
"""Size of a shard where none is asked for."""

_DRAWN_ELEMENTS = 1 << 22
_CONFIG_FILE, _TOKENIZER_CONFIG_FILE = "config.json", "tokenizer_config.json"
_OWN_FILES = ("model*.safetensors", ".*.partial", INDEX_FILE, DIGEST_FILE, TOKENIZER_FILE, _TOKENIZER_CONFIG_FILE)
_QUANTISATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def synthesize(
    document: Mapping[str, Any],
    target: Path,
    *,
    seed: int = 0,
    quantised: bool = True,
    shards: int | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> WeightsId:
    """Write a random checkpoint. The index comes last: without it the directory is no checkpoint.

    Args:
      document: a parsed ``config.json``. What is written says how the weights are stored, and the number of compressed
        classes of the tokenizer that is written beside it.
      target: the directory to write.
      seed: another seed gives other values.
      quantised: fp8 and packed fp4 weights as in the release; otherwise bfloat16 throughout.
      shards: number of tensor files, at most the number of weights; None means files of about 5 GB.
      overwrite: replace an earlier checkpoint in ``target``.
      progress: told of the weights written.

    Raises:
      ConfigError: the configuration is not accepted.
      InputError: the target is not empty, the disk has not enough room, or a width cannot be quantised.
    """
    released = {key: value for key, value in normalise(document).items() if key != "quantization_config"}
    if quantised:
        released["quantization_config"] = _QUANTISATION
    config = ModelConfig.from_dict(released)
    if config.engram is not None:
        hash_constants(config.engram)
    units = list(units_of(config, quantised))
    files = shard_files(units, shards or -(-sum(unit.size for unit in units) // SHARD_BYTES))
    _prepare(target, sum(unit.size for unit in units), overwrite)
    _write_texts(target, released, config)
    digests: dict[str, TensorDigest] = {}
    with progress(len(units), " weights") as step:
        for file, held in files.items():
            with ShardWriter(target / file, [tensor for unit in held for tensor in unit.tensors]) as shard:
                for unit in held:
                    _write_unit(shard, unit, seed)
                    step()
            digests |= shard.digests()
    write_digests(target, Digests(digests))
    write_index(target, {file: [tensor for unit in held for tensor in unit.tensors] for file, held in files.items()})
    return Digests(digests).weights_id


def _prepare(target: Path, size: int, overwrite: bool) -> None:
    """An empty place with room enough; of an earlier checkpoint the index goes first, so that the rest is none."""
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise InputError(str(target), "a directory that is not empty", "an absent or empty one", "or overwrite it")
        for name in (MANIFEST_FILE, ARRAYS, UNFINISHED, SINGLE_FILE):
            if (target / name).exists():
                raise InputError(str(target), f"a directory with {name}", "a checkpoint that was synthesized")
        (target / INDEX_FILE).unlink(missing_ok=True)
        for path in [path for pattern in _OWN_FILES for path in target.glob(pattern)]:
            path.unlink()
    target.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target).free
    if free < size:
        raise InputError(str(target), f"on a disk with {free:,} bytes free", f"{size:,} bytes, for the tensors alone")


def _write_texts(target: Path, released: dict[str, Any], config: ModelConfig) -> None:
    """Configuration and tokenizer; the tokenizer decides the number of compressed classes."""
    write_json(target / TOKENIZER_FILE, tokenizer_document(config))
    write_json(target / _TOKENIZER_CONFIG_FILE, tokenizer_configuration(config))
    if config.engram is not None:
        tokenizer = Tokenizer.from_directory(target, vocab_size=config.vocab_size)
        classes = compressed_token_map(tokenizer, config.vocab_size, config.engram.pad_token_id).max() + 1
        text = released["text_config"] | {"engram_compressed_vocab_size": int(classes)}
        released = released | {"text_config": text}
    write_json(target / _CONFIG_FILE, released)


def _write_unit(shard: ShardWriter, unit: Unit, seed: int) -> None:
    rows, *columns = unit.item.shape
    step = max(SCALE_COLUMNS, _DRAWN_ELEMENTS // math.prod(columns) // SCALE_COLUMNS * SCALE_COLUMNS)
    if not columns:
        step = rows  # the rule of a vector may depend on its length
    noise = _generator(seed, unit.weight.name)
    for start in range(0, rows, step):
        drawn = noise.standard_normal((min(step, rows - start), *columns), np.float32)
        # Not inside the compiled function: there a product and a sum may become one operation, on some machines.
        values = from_noise(unit.item, jnp.asarray(drawn))
        write_rows(shard, unit, values)


def _generator(seed: int, name: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16])))
