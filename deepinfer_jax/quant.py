"""The quantised formats of the model: caches, inputs of linear layers, and weights.

Values that live on the device (caches, linear inputs) are handled by the functions on JAX arrays; weights read from a
checkpoint by the `dequantise_*` functions on NumPy arrays, which run once at load time. No format has both.

| format | functions | group | element | scale | used for |
|---|---|---|---|---|---|
| Q8_32 | `*_fp8_32` | 32 channels | e4m3 | e8m0, floor 1e-4 | window KV, inputs of linear layers |
| Q4_32 | `*_fp4_32` | 32 channels | e2m1 | e8m0, floor 6 * 2^-126 | index queries and keys |
| Q4_16 | `*_fp4_16` | 16 channels | e2m1 | e4m3, floor 6 * 2^-9 | main KV |
| fp8 blocks | `dequantise_fp8_blocks` | 32 x 32 tile | e4m3 | e8m0 | dense weights |
| fp8 rows | `dequantise_fp8_rows` | 32 channels of a row | e4m3 | e8m0 | Engram tables |
| fp4 rows | `dequantise_fp4_rows` | 32 inputs of a row | e2m1, packed | e8m0 | routed experts |

The scale of a cache or input group is its largest magnitude, at least the floor, over the largest element (448 or 6):
rounded up to a power of two for e8m0, to the nearest e4m3 number for e4m3.

`round_trip_*` equals `dequantise_*(*quantise_*(x))` bit for bit without forming the packed bytes. Every product of an
element and its scale is exact in bfloat16. A group that holds a NaN or an infinity comes back as NaN throughout: it is
not hidden by saturation. Source: DeepSeek-V4.1 technical report, quantisation of caches and weights; released
`config.json`, `quantization_config`.
"""

from collections.abc import Callable

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8, UInt8

from pallas_kernels import formats
from pallas_kernels.packed_weight import GROUP, fp8_groups
from pallas_kernels.packed_weight import round_trip_fp8_32 as round_trip_fp8_32

MAIN_KV_GROUP = 16
"""Channels that share a scale in the main KV."""

_FP4_32_FLOOR = formats.E2M1_LARGEST * 2.0**-126
_FP4_16_FLOOR = formats.E2M1_LARGEST * 2.0**-9

# Elements decoded per look-up at load time: NumPy widens the indices to eight bytes, so a whole tensor at once would
# need twice the memory of its float32 result.
_ELEMENTS_PER_LOOK_UP = 1 << 17


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


def dequantise_fp8_blocks(
    weight: UInt8[np.ndarray, "rows columns"], scale: UInt8[np.ndarray, "tile_rows tile_columns"]
) -> Float32[np.ndarray, "rows columns"]:
    """Float32 values of a dense weight: e4m3 bytes with one e8m0 byte per tile of 32 x 32.

    The last tile of a row or column may be partial. Raises ValueError where the scale has another shape than
    [ceil(rows / 32), ceil(columns / 32)].
    """
    rows, columns = weight.shape
    _check_scale_shape(scale, (-(-rows // GROUP), -(-columns // GROUP)), weight, "tile of 32 x 32")
    column_scale = np.repeat(_E8M0_VALUES[scale], GROUP, axis=1)[:, :columns]

    def apply_scale(values: np.ndarray, start: int) -> None:
        for offset in range(0, len(values), GROUP):
            values[offset : offset + GROUP] *= column_scale[(start + offset) // GROUP]

    return _decode_rows(weight, _E4M3_VALUES, apply_scale)


def dequantise_fp8_rows(
    weight: UInt8[np.ndarray, "rows columns"], scale: UInt8[np.ndarray, "rows groups"]
) -> Float32[np.ndarray, "rows columns"]:
    """Float32 values of an Engram table (or some of its rows): e4m3 bytes, one e8m0 byte per 32 channels of a row.

    Raises ValueError where the scale has another shape than [rows, columns / 32].
    """
    return _dequantise_rows(weight, scale, _E4M3_VALUES, columns=weight.shape[1])


def dequantise_fp4_rows(
    packed: Int8[np.ndarray, "rows bytes"] | UInt8[np.ndarray, "rows bytes"], scale: UInt8[np.ndarray, "rows groups"]
) -> Float32[np.ndarray, "rows columns"]:
    """Float32 values of a routed expert's weight: e2m1 codes packed along the inputs, the even column low.

    `scale` holds one e8m0 byte per row and 32 inputs (16 bytes). Raises ValueError where it has another shape than
    [rows, bytes / 16].
    """
    return _dequantise_rows(packed.view(np.uint8), scale, _E2M1_PAIRS, columns=2 * packed.shape[1])


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


def _dequantise_rows(data: np.ndarray, scale: np.ndarray, table: np.ndarray, columns: int) -> np.ndarray:
    rows = len(data)
    _check_scale_shape(scale, (rows, columns // GROUP), data, "row and 32 columns")
    if columns % GROUP:
        raise ValueError(f"columns are scaled in groups of {GROUP}, got {columns} columns")

    def apply_scale(values: np.ndarray, start: int) -> None:
        part = scale[start : start + len(values)]
        groups = values.reshape(*part.shape, GROUP)
        groups *= _E8M0_VALUES[part][..., None]

    return _decode_rows(data, table, apply_scale)


def _decode_rows(
    data: UInt8[np.ndarray, "rows bytes"], table: np.ndarray, apply_scale: Callable[[np.ndarray, int], None]
) -> Float32[np.ndarray, "rows columns"]:
    """Look every byte up in `table` ([256] or, for two values a byte, a [256] view of pairs) and scale run by run."""
    rows, bytes_per_row = data.shape
    decoded = np.empty((rows, bytes_per_row), table.dtype)
    values = decoded.view(np.float32)
    rows_per_run = GROUP * max(1, _ELEMENTS_PER_LOOK_UP // (GROUP * max(1, bytes_per_row)))
    for start in range(0, rows, rows_per_run):
        run = slice(start, start + rows_per_run)
        np.take(table, data[run], out=decoded[run], mode="clip")
        apply_scale(values[run], start)
    return values


def _check_scale_shape(scale: np.ndarray, expected: tuple[int, int], weight: np.ndarray, one_per: str) -> None:
    if scale.shape != expected:
        raise ValueError(
            f"a weight stored as {list(weight.shape)} bytes has one scale per {one_per}: "
            f"expected scales {list(expected)}, got {list(scale.shape)}"
        )


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def _e2m1_pairs() -> np.ndarray:
    """The two values of every byte as one eight-byte item, so that one look-up yields both."""
    magnitudes = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
    values = np.concatenate([magnitudes, -magnitudes])
    byte = np.arange(256)
    return np.stack([values[byte & 15], values[byte >> 4]], axis=-1).view(np.complex64)[:, 0]


_E4M3_VALUES = _read_only(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
_E8M0_VALUES = _read_only(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
_E2M1_PAIRS = _read_only(_e2m1_pairs())
