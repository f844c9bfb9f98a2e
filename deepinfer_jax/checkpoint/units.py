"""The units of a checkpoint in the released layout: a released weight with its scale, and how its rows are stored."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deepinfer_jax.checkpoint.writer import ShardWriter, TensorSpec
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.params import SCALE_COLUMNS, Parameter, Stored, parameters, scale_name
from deepinfer_jax.model.transformer import Model
from pallas_kernels import PackedWeight, pack_weight

_WEIGHT_DTYPES = {Stored.FP8_BLOCKS: "F8_E4M3", Stored.FP8_ROWS: "F8_E4M3", Stored.FP4_ROWS: "I8"}


@dataclasses.dataclass(frozen=True)
class Unit:
    """What is written together: one released weight, with its scale where it has one."""

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


def units_of(config: ModelConfig, quantised: bool) -> Iterator[Unit]:
    """Every unit of a configuration, in the order of its parameters and their pieces.

    Raises:
      InputError: a width cannot be quantised.
    """
    for item in parameters(Model.describe(config)):
        for name in (piece for pieces in item.released for piece in pieces):
            shape = item.piece_shape
            if not (quantised and item.has_scale):
                dtype = "F32" if item.stored is Stored.F32 else "BF16"
                yield Unit(_piece(item, shape, packed=False), TensorSpec(name, dtype, shape), None)
                continue
            if shape[-1] % SCALE_COLUMNS:
                accepted = f"a multiple of {SCALE_COLUMNS} columns, to be quantised"
                raise InputError(name, f"shape {shape}", accepted, "change the configuration, or store it in bf16")
            weight = TensorSpec(name, _WEIGHT_DTYPES[item.stored], item.data_shape(shape))
            scale = TensorSpec(scale_name(name), "F8_E8M0", item.scale_shape(shape))
            yield Unit(_piece(item, shape, packed=True), weight, scale)


def _piece(item: Parameter, shape: tuple[int, ...], *, packed: bool) -> Parameter:
    """The description of one piece as it is stored, without what would tell two pieces of one form apart."""
    stored = item.stored if packed or item.stored is Stored.F32 else Stored.BF16
    return Parameter(shape, (), stored, (), init=item.init)


def shard_files(units: list[Unit], shards: int) -> dict[str, list[Unit]]:
    """Units by file, in order, in files of about equal size; a unit that is larger than a file makes them fewer."""
    total, before = sum(unit.size for unit in units), 0
    held: dict[int, list[Unit]] = {}
    for unit in units:
        held.setdefault(before * shards // total, []).append(unit)
        before += unit.size
    return {
        f"model-{number:05d}-of-{len(held):05d}.safetensors": inside for number, inside in enumerate(held.values(), 1)
    }


def write_rows(shard: ShardWriter, unit: Unit, values: Float[Array, "*shape"]) -> None:
    """Write the next rows of a unit from their float32 values; whole tiles of scales, where it has them."""
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
