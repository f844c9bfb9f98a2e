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

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int8, UInt8

from pallas_kernels.packed_weight import GROUP
from pallas_kernels.packed_weight import round_trip_fp8_32 as round_trip_fp8_32
from pallas_kernels.row_formats import dequantise_fp4_16 as dequantise_fp4_16
from pallas_kernels.row_formats import dequantise_fp4_32 as dequantise_fp4_32
from pallas_kernels.row_formats import dequantise_fp8_32 as dequantise_fp8_32
from pallas_kernels.row_formats import quantise_fp4_16 as quantise_fp4_16
from pallas_kernels.row_formats import quantise_fp4_32 as quantise_fp4_32
from pallas_kernels.row_formats import quantise_fp8_32 as quantise_fp8_32
from pallas_kernels.row_formats import round_trip_fp4_16 as round_trip_fp4_16
from pallas_kernels.row_formats import round_trip_fp4_32 as round_trip_fp4_32

# Elements decoded per look-up at load time: NumPy widens the indices to eight bytes, so a whole tensor at once would
# need twice the memory of its float32 result.
_ELEMENTS_PER_LOOK_UP = 1 << 17


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
