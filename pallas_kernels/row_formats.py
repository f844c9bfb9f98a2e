"""Rows of the caches in the released formats: packed bytes and one scale byte per group of channels.

The formats are those of :mod:`deepinfer_jax.quant`. :class:`CachedRows` is an array of such rows that is indexed and
gathered like a plain one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels import formats
from pallas_kernels.packed_weight import GROUP, fp8_groups

MAIN_KV_GROUP = 16
"""Channels that share a scale in the main KV."""

_FP4_32_FLOOR = formats.E2M1_LARGEST * 2.0**-126
_FP4_16_FLOOR = formats.E2M1_LARGEST * 2.0**-9


def quantise_fp8_32(
    x: Float[Array, "*rows channels"],
) -> tuple[UInt8[Array, "*rows channels"], UInt8[Array, "*rows groups"]]:
    """Q8_32 data (e4m3 bytes) and scales (e8m0 bytes) of `x`.

    Raises ValueError where the number of channels is not a multiple of 32.
    """
    groups, scale = fp8_groups(x)
    data = formats.encode_e4m3(groups * formats.decode_e8m0(254 - scale))
    return data.reshape(x.shape), scale[..., 0]


def dequantise_fp8_32(
    data: UInt8[Array, "*rows channels"], scale: UInt8[Array, "*rows groups"], dtype: DTypeLike
) -> Float[Array, "*rows channels"]:
    """The values of Q8_32 data, in `dtype`."""
    return _scaled(formats.decode_e4m3(data), formats.decode_e8m0(scale), GROUP, dtype)


def quantise_fp4_32(
    x: Float[Array, "*rows channels"],
) -> tuple[UInt8[Array, "*rows bytes"], UInt8[Array, "*rows groups"]]:
    """Q4_32 data (e2m1, two channels to a byte, the even one low) and scales (e8m0 bytes) of `x`.

    Raises ValueError where the number of channels is not a multiple of 32.
    """
    groups, scale = _fp4_32_groups(x)
    packed = formats.pack_e2m1(groups * formats.decode_e8m0(254 - scale))
    return packed.reshape(*x.shape[:-1], x.shape[-1] // 2), scale[..., 0]


def dequantise_fp4_32(
    packed: UInt8[Array, "*rows bytes"], scale: UInt8[Array, "*rows groups"], dtype: DTypeLike
) -> Float[Array, "*rows channels"]:
    """The values of Q4_32 data, in `dtype`."""
    return _scaled(formats.unpack_e2m1(packed), formats.decode_e8m0(scale), GROUP, dtype)


def round_trip_fp4_32(x: Float[Array, "*rows channels"]) -> Float[Array, "*rows channels"]:
    """`x` as it comes back from Q4_32, in its own dtype. Raises ValueError like `quantise_fp4_32`."""
    groups, scale = _fp4_32_groups(x)
    rounded = formats.round_to_e2m1(groups * formats.decode_e8m0(254 - scale))
    return (rounded * formats.decode_e8m0(scale)).reshape(x.shape).astype(x.dtype)


def quantise_fp4_16(
    x: Float[Array, "*rows channels"],
) -> tuple[UInt8[Array, "*rows bytes"], UInt8[Array, "*rows groups"]]:
    """Q4_16 data (e2m1, two channels to a byte, the even one low) and scales (e4m3 bytes) of `x`.

    The scale saturates at 448, so magnitudes above 2,688 come back as 2,688. Raises ValueError where the number of
    channels is not a multiple of 16.
    """
    groups, scale = _fp4_16_groups(x)
    packed = formats.pack_e2m1(groups, formats.decode_e4m3(scale))
    return packed.reshape(*x.shape[:-1], x.shape[-1] // 2), scale[..., 0]


def dequantise_fp4_16(
    packed: UInt8[Array, "*rows bytes"], scale: UInt8[Array, "*rows groups"], dtype: DTypeLike
) -> Float[Array, "*rows channels"]:
    """The values of Q4_16 data, in `dtype`."""
    return _scaled(formats.unpack_e2m1(packed), formats.decode_e4m3(scale), MAIN_KV_GROUP, dtype)


def round_trip_fp4_16(x: Float[Array, "*rows channels"]) -> Float[Array, "*rows channels"]:
    """`x` as it comes back from Q4_16, in its own dtype. Raises ValueError like `quantise_fp4_16`."""
    groups, scale = _fp4_16_groups(x)
    unit = formats.decode_e4m3(scale)
    rounded = formats.decode_e2m1(formats.encode_e2m1(groups, unit))
    return (rounded * unit).reshape(x.shape).astype(x.dtype)


def _fp4_32_groups(x: Array) -> tuple[Array, Array]:
    groups, largest = formats.split_groups(x, GROUP)
    return groups, formats.encode_e8m0(jnp.maximum(largest, _FP4_32_FLOOR), formats.E2M1_LARGEST)


def _fp4_16_groups(x: Array) -> tuple[Array, Array]:
    # A product with the rounded 1/6 rounds to the same e4m3 number as the quotient for every bfloat16 input and all
    # but one float32 mantissa, and unlike a division it is the same on every back end.
    groups, largest = formats.split_groups(x, MAIN_KV_GROUP)
    return groups, formats.encode_e4m3(jnp.maximum(largest, _FP4_16_FLOOR) * (1 / formats.E2M1_LARGEST))


def _scaled(
    values: Float[Array, "*rows channels"], scale: Float[Array, "*rows groups"], size: int, dtype: DTypeLike
) -> Float[Array, "*rows channels"]:
    groups = values.reshape(*scale.shape, size)
    return (groups * scale[..., None]).reshape(values.shape).astype(dtype)


class RowFormat(NamedTuple):
    """One format: how rows are packed and read, bytes of data per channel, and channels that share a scale."""

    quantise: Callable[[Array], tuple[Array, Array]]
    dequantise: Callable[[Array, Array, DTypeLike], Array]
    channels_per_byte: int
    group: int
    nan_scale: int


ROW_FORMATS = {
    "fp8_32": RowFormat(quantise_fp8_32, dequantise_fp8_32, 1, GROUP, 0xFF),
    "fp4_32": RowFormat(quantise_fp4_32, dequantise_fp4_32, 2, GROUP, 0xFF),
    "fp4_16": RowFormat(quantise_fp4_16, dequantise_fp4_16, 2, MAIN_KV_GROUP, 0x7F),
}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data", "scale"], meta_fields=["name"])
@dataclasses.dataclass(frozen=True)
class CachedRows:
    """Rows ``[*batch channels]`` in the format ``name``; leaves are arrays or abstract arrays.

    ``data`` uint8 ``[*batch bytes]`` and ``scale`` uint8 ``[*batch groups]`` are separate planes.
    """

    data: Any
    scale: Any
    name: str

    @classmethod
    def empty(cls, shape: tuple[int, ...], name: str, *, poisoned: bool = False) -> CachedRows:
        """Rows of zeros, or of NaN where they are ``poisoned``."""
        form, (*batch, channels) = ROW_FORMATS[name], shape
        data = jnp.zeros((*batch, channels // form.channels_per_byte), jnp.uint8)
        scale = jnp.full((*batch, channels // form.group), form.nan_scale if poisoned else 0, jnp.uint8)
        return cls(data, scale, name)

    @classmethod
    def pack(cls, values: Float[Array, "*batch channels"], name: str) -> CachedRows:
        """Values in the format; those that went through it before come back unchanged."""
        return cls(*ROW_FORMATS[name].quantise(values), name)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        *batch, width = self.data.shape
        return (*batch, width * ROW_FORMATS[self.name].channels_per_byte)

    def take(self, rows: Array) -> CachedRows:
        """Rows of the first axis by number, clipped to the last one."""
        take = functools.partial(jnp.take, indices=rows, axis=0, mode="clip")
        return CachedRows(take(self.data), take(self.scale), self.name)

    def values(self, dtype: DTypeLike) -> Float[Array, "*batch channels"]:
        """The rows in floating point; exact in bfloat16 and float32."""
        return ROW_FORMATS[self.name].dequantise(self.data, self.scale, dtype)

    def __getitem__(self, index: Any) -> CachedRows:
        """Rows by their leading axes."""
        return CachedRows(self.data[index], self.scale[index], self.name)
