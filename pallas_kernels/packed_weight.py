"""Weights that stay packed on the device, and the rounding of the inputs they are multiplied with.

A packed weight keeps the released bytes: e4m3 with an e8m0 scale per 32 x 32 tile or per 32 columns of a row, or two
e2m1 codes to a byte with an e8m0 scale per 32 columns of a row. Every product of an element and its scale is exact in
bfloat16, so that expanding to bfloat16 loses nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels import formats

GROUP = 32
"""Channels of a linear input, or columns of a weight row, that share a scale."""

FP8_FLOOR = 1e-4
"""Smallest magnitude that sets a scale of fp8 inputs and caches."""

_FP8_WEIGHT_FLOOR = formats.E4M3_LARGEST * 2.0**-126
_FP4_FLOOR = formats.E2M1_LARGEST * 2.0**-126


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "scale"],
    meta_fields=["fp4", "scale_rows", "rounds_inputs"],
)
@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A weight ``[*batch out in]`` in packed form; leaves are arrays or abstract arrays.

    ``data`` uint8 ``[*batch out in]`` (e4m3) or ``[*batch out in/2]`` (e2m1, the even column low); ``scale`` uint8
    ``[*batch ceil(out/scale_rows) ceil(in/32)]`` (e8m0). ``rounds_inputs``: whether what is multiplied with it is
    rounded to fp8 first.
    """

    data: Any
    scale: Any
    fp4: bool
    scale_rows: int
    rounds_inputs: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        *batch, columns = self.data.shape
        return (*batch, 2 * columns if self.fp4 else columns)

    def __getitem__(self, index: Any) -> PackedWeight:
        """Part of the leading axes; rows too where every row has its own scale."""
        return dataclasses.replace(self, data=self.data[index], scale=self.scale[index])

    def values(self, dtype: jnp.dtype) -> Float[Array, "*batch out in"]:
        """The weight in floating point."""
        elements = formats.unpack_e2m1(self.data) if self.fp4 else formats.decode_e4m3(self.data)
        scale = formats.decode_e8m0(self.scale).astype(dtype)
        if self.scale_rows > 1:
            scale = jnp.repeat(scale, self.scale_rows, axis=-2)[..., : elements.shape[-2], :]
        scale = jnp.repeat(scale, GROUP, axis=-1)[..., : elements.shape[-1]]
        return elements.astype(dtype) * scale


def expand(weight: Array | PackedWeight, dtype: jnp.dtype) -> Float[Array, "*batch out in"]:
    """A weight in floating point: packed ones expanded to ``dtype``, others as they are."""
    return weight.values(dtype) if isinstance(weight, PackedWeight) else weight


def pack_weight(
    values: Float[Array, "*batch out in"], *, fp4: bool, scale_rows: int, rounds_inputs: bool = False
) -> PackedWeight:
    """The packed weight nearest to ``values``: the smallest power-of-two scale whose largest element does not saturate.

    Columns must be a multiple of 32; a last tile of fewer than ``scale_rows`` rows is allowed.
    """
    *batch, rows, columns = values.shape
    tile_rows = -(-rows // scale_rows)
    wide = jnp.pad(values.astype(jnp.float32), [(0, 0)] * len(batch) + [(0, tile_rows * scale_rows - rows), (0, 0)])
    tiles = wide.reshape(*batch, tile_rows, scale_rows, columns // GROUP, GROUP)
    largest = jnp.abs(tiles).max(axis=(-3, -1))
    floor, limit = (_FP4_FLOOR, formats.E2M1_LARGEST) if fp4 else (_FP8_WEIGHT_FLOOR, formats.E4M3_LARGEST)
    scale = formats.encode_e8m0(jnp.maximum(largest, floor), limit)
    inverse = formats.decode_e8m0(254 - scale)[..., :, None, :, None]
    elements = (tiles * inverse).reshape(*batch, tile_rows * scale_rows, columns)[..., :rows, :]
    data = formats.pack_e2m1(elements) if fp4 else formats.encode_e4m3(elements)
    return PackedWeight(data, scale, fp4, scale_rows, rounds_inputs)


def rounded_inputs(inputs: Float[Array, "*rows in"], weight: object) -> Float[Array, "*rows in"]:
    """The inputs as a weight's product reads them: through fp8 where the weight asks for it."""
    rounds = isinstance(weight, PackedWeight) and weight.rounds_inputs
    return round_trip_fp8_32(inputs) if rounds else inputs


def fp8_groups(
    x: Float[Array, "*rows channels"],
) -> tuple[Float[Array, "*rows groups 32"], UInt8[Array, "*rows groups 1"]]:
    """Float32 groups of 32 channels and the e8m0 scale of each: a power of two of at least largest / 448.

    A group with a NaN or an infinity has the NaN scale. Raises ValueError where channels are not a multiple of 32.
    """
    groups, largest = formats.split_groups(x, GROUP)
    return groups, formats.encode_e8m0(jnp.maximum(largest, FP8_FLOOR), formats.E4M3_LARGEST)


def round_trip_fp8_32(x: Float[Array, "*rows channels"]) -> Float[Array, "*rows channels"]:
    """``x`` through e4m3 with an e8m0 scale per 32 channels, in its own dtype; raises like :func:`fp8_groups`."""
    groups, scale = fp8_groups(x)
    rounded = formats.round_to_e4m3(groups * formats.decode_e8m0(254 - scale))
    return (rounded * formats.decode_e8m0(scale)).reshape(x.shape).astype(x.dtype)
