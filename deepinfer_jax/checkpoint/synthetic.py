"""Random checkpoints of any configuration in the released layout, for tests and as input for other engines.

Values are drawn by the rules of :func:`deepinfer_jax.model.params.from_noise`, tensor by tensor and a few rows at a
time, so that memory does not grow with the model. A tensor's values depend on the seed and its name only: not on the
number of shards, nor on the other tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from deepinfer_jax.checkpoint.converted import ARRAYS, MANIFEST_FILE
from deepinfer_jax.checkpoint.digest import DIGEST_FILE, Digests, TensorDigest, WeightsId, write_digests, write_json
from deepinfer_jax.checkpoint.progress import Progress, silent
from deepinfer_jax.checkpoint.reader import UNFINISHED
from deepinfer_jax.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE
from deepinfer_jax.checkpoint.synthetic_tokenizer import tokenizer_configuration, tokenizer_document
from deepinfer_jax.checkpoint.writer import ShardWriter, TensorSpec, write_index
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.config_keys import normalise
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.engram import hash_constants
from deepinfer_jax.model.params import SCALE_COLUMNS, Parameter, Stored, from_noise, parameters, scale_name
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.text.compressed_vocabulary import compressed_token_map
from deepinfer_jax.text.tokenizer import TOKENIZER_FILE, Tokenizer
from pallas_kernels import PackedWeight, pack_weight

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
_WEIGHT_DTYPES = {Stored.FP8_BLOCKS: "F8_E4M3", Stored.FP8_ROWS: "F8_E4M3", Stored.FP4_ROWS: "I8"}


@dataclasses.dataclass(frozen=True)
class Unit:
    """What is drawn together: one released weight, with its scale where it has one."""

    item: Parameter
    weight: TensorSpec
    scale: TensorSpec | None

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The weight and, where there is one, its scale."""
        return (self.weight,) if self.scale is None else (self.weight, self.scale)

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(tensor.size for tensor in self.tensors)


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
    units = list(_units(config, quantised))
    files = _shard_files(units, shards or -(-sum(unit.size for unit in units) // SHARD_BYTES))
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


def _units(config: ModelConfig, quantised: bool) -> Iterator[Unit]:
    for item in parameters(Model.describe(config)):
        for name in (piece for pieces in item.released for piece in pieces):
            shape = item.piece_shape
            if not (quantised and item.has_scale):
                dtype = "F32" if item.stored is Stored.F32 else "BF16"
                yield Unit(_drawn(item, shape, packed=False), TensorSpec(name, dtype, shape), None)
                continue
            if shape[-1] % SCALE_COLUMNS:
                accepted = f"a multiple of {SCALE_COLUMNS} columns, to be quantised"
                raise InputError(name, f"shape {shape}", accepted, "change the configuration, or store it in bf16")
            weight = TensorSpec(name, _WEIGHT_DTYPES[item.stored], item.data_shape(shape))
            scale = TensorSpec(scale_name(name), "F8_E8M0", item.scale_shape(shape))
            yield Unit(_drawn(item, shape, packed=True), weight, scale)


def _drawn(item: Parameter, shape: tuple[int, ...], *, packed: bool) -> Parameter:
    """The description of one piece as it is stored, without what would tell two pieces of one form apart."""
    stored = item.stored if packed or item.stored is Stored.F32 else Stored.BF16
    return Parameter(shape, (), stored, (), init=item.init)


def _shard_files(units: list[Unit], shards: int) -> dict[str, list[Unit]]:
    """Units by file, in order, in files of about equal size; a unit that is larger than a file makes them fewer."""
    total, before = sum(unit.size for unit in units), 0
    held: dict[int, list[Unit]] = {}
    for unit in units:
        held.setdefault(before * shards // total, []).append(unit)
        before += unit.size
    return {
        f"model-{number:05d}-of-{len(held):05d}.safetensors": inside for number, inside in enumerate(held.values(), 1)
    }


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
        stored = jax.device_get(_stored(values, item=unit.item))
        if isinstance(stored, PackedWeight):
            assert unit.scale is not None
            shard.write(unit.weight.name, stored.data)
            shard.write(unit.scale.name, stored.scale)
        else:
            shard.write(unit.weight.name, stored)


@functools.partial(jax.jit, static_argnames="item")
def _stored(values: Float[Array, "*shape"], *, item: Parameter) -> Array | PackedWeight:
    if item.has_scale:
        return pack_weight(values, fp4=item.stored is Stored.FP4_ROWS, scale_rows=item.scale_rows)
    return values if item.stored is Stored.F32 else values.astype(jnp.bfloat16)


def _generator(seed: int, name: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16])))
