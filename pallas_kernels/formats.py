"""Exact primitives of the small number formats: e4m3, e2m1 (two to a byte) and e8m0.

| format | bits (sign, exponent, mantissa) | finite values | source |
|---|---|---|---|
| e4m3 | 1, 4, 3 | up to 448, no infinity, one NaN per sign | OCP 8-bit floating point, "E4M3" |
| e2m1 | 1, 2, 1 | 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives | OCP microscaling formats, "FP4" |
| e8m0 | 0, 8, 0 | 2^(byte - 127) for byte 0 to 254; 255 is NaN | OCP microscaling formats, scale |

Rounding is to nearest, ties to the even mantissa, and saturates at the largest value. All functions take and return
JAX arrays of any shape, can be jitted, and compute in float32 whatever the input. They use comparisons, integer
operations on the exponent field and multiplications whose result is exact, and neither division, logarithm nor a
rounding conversion to float8: a back end may approximate the first two and may reach float8 by way of float16, which
rounds twice. The result is therefore the same, bit for bit, everywhere, with one exception: XLA treats subnormal
float32 numbers (below 2^-126) as zero on most back ends.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int8, UInt8

E4M3_LARGEST = 448.0
E2M1_LARGEST = 6.0

_FLOAT32_MANTISSA_BITS = 23
_FLOAT32_MANTISSA_MASK = (1 << _FLOAT32_MANTISSA_BITS) - 1
_FLOAT32_NAN = 0x7FC00000
_E8M0_NAN = 255
_E8M0_SMALLEST_AS_FLOAT32 = 0x00400000  # 2^-127, a subnormal float32: its exponent field alone would say zero
_E4M3_SMALLEST_NORMAL_EXPONENT = 127 - 6  # as a float32 exponent field

# Midpoints between neighbouring e2m1 magnitudes; the flag says whether the upper neighbour has the even mantissa and
# so takes the tie.
_E2M1_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def round_to_e4m3(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The e4m3 number nearest to each element, in the dtype of `x`; magnitudes above 448 become 448, NaN stays NaN."""
    wide = x.astype(jnp.float32)
    magnitude = jnp.minimum(jnp.abs(wide), E4M3_LARGEST)
    exponent = jnp.maximum(_float32_bits(magnitude) >> _FLOAT32_MANTISSA_BITS, _E4M3_SMALLEST_NORMAL_EXPONENT)
    spacing = _float32_power_of_two(exponent - 3)
    inverse_spacing = _float32_power_of_two(2 * 127 + 3 - exponent)
    steps = lax.round(magnitude * inverse_spacing, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.copysign(steps * spacing, wide).astype(x.dtype)


def encode_e4m3(x: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """The byte of the e4m3 number nearest to each element; saturates like `round_to_e4m3`."""
    rounded = round_to_e4m3(x.astype(jnp.float32))
    return lax.bitcast_convert_type(rounded.astype(jnp.float8_e4m3fn), jnp.uint8)


def decode_e4m3(data: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The float32 values of e4m3 bytes; 0x7F and 0xFF are NaN."""
    return lax.bitcast_convert_type(data, jnp.float8_e4m3fn).astype(jnp.float32)


def round_to_e2m1(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The e2m1 number nearest to each element, in the dtype of `x`; magnitudes above 6 become 6, NaN stays NaN."""
    rounded = decode_e2m1(encode_e2m1(x)).astype(x.dtype)
    return jnp.where(jnp.isnan(x), x, rounded)


def encode_e2m1(x: Float[Array, "*shape"], unit: Float[Array, "*#shape"] | float = 1.0) -> UInt8[Array, "*shape"]:
    """The four-bit code (0 to 15, bit 3 the sign) of the e2m1 number nearest to `x / unit`; saturates at 6.

    `unit` is positive and broadcasts against `x`. The quotient is never formed: |x| is compared with the seven
    midpoints times `unit`, products that are exact for a power of two or an e4m3 number from 2^-124 upwards. e2m1 has
    no NaN and a NaN gets code 0, so a caller that must not lose it carries it in the scale.
    """
    wide = x.astype(jnp.float32)
    magnitude = jnp.abs(wide)
    code = jnp.where(jnp.signbit(wide), 8, 0).astype(jnp.uint8)
    for midpoint, upper_takes_tie in _E2M1_MIDPOINTS:
        threshold = midpoint * unit
        above = magnitude >= threshold if upper_takes_tie else magnitude > threshold
        code = code + above.astype(jnp.uint8)
    return code


def decode_e2m1(codes: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The float32 values of e2m1 codes. Only the low four bits count: `byte` and `byte >> 4` decode a packed pair."""
    magnitude = (codes & 7).astype(jnp.int32)
    doubled = jnp.where(magnitude < 4, magnitude, jnp.where(magnitude < 6, 2 * magnitude - 4, 4 * magnitude - 16))
    value = doubled.astype(jnp.float32) * 0.5
    return jnp.where(codes & 8 != 0, -value, value)


def pack_e2m1(
    x: Float[Array, "*rows columns"], unit: Float[Array, "*#rows #columns"] | float = 1.0
) -> UInt8[Array, "*rows bytes"]:
    """Bytes holding the e2m1 codes of `x / unit` two by two along the last axis, the even column in the low four bits.

    Raises ValueError where the number of columns is odd.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"e2m1 packs two columns into a byte, got {x.shape[-1]} columns; pad the last axis to even")
    codes = encode_e2m1(x, unit)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: UInt8[Array, "*rows bytes"] | Int8[Array, "*rows bytes"]) -> Float[Array, "*rows columns"]:
    """The float32 values of packed e2m1 codes, twice as many columns as bytes; int8 (the stored dtype) works too."""
    unsigned = lax.bitcast_convert_type(packed, jnp.uint8)
    pairs = jnp.stack([decode_e2m1(unsigned), decode_e2m1(unsigned >> 4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def encode_e8m0(x: Float[Array, "*shape"], divisor: float = 1.0) -> UInt8[Array, "*shape"]:
    """The e8m0 byte of the smallest power of two not below `x / divisor`: 2^ceil(log2(x / divisor)).

    `x` is not negative and `divisor` at least 1. Computed on the bits: a float32 read as an integer is its logarithm up
    to the mantissa, so that the difference of two, rounded up to whole exponents, is exact for every pair of normal
    numbers. A power of two gives its own byte. Zero and everything below 2^-127 gives byte 0, infinity and NaN (and a
    result above 2^127) give byte 255, which is NaN.
    """
    bits = _float32_bits(x.astype(jnp.float32))
    divisor_bits = int(np.float32(divisor).view(np.int32))
    exponent = (bits - divisor_bits + _FLOAT32_MANTISSA_MASK) >> _FLOAT32_MANTISSA_BITS
    byte = jnp.where(bits <= _E8M0_SMALLEST_AS_FLOAT32, 0, jnp.clip(exponent + 127, 0, _E8M0_NAN))
    return jnp.where(jnp.isfinite(x), byte, _E8M0_NAN).astype(jnp.uint8)


def decode_e8m0(data: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The float32 values of e8m0 bytes. The reciprocal of a scale is `decode_e8m0(254 - byte)`; 255 stays NaN there."""
    byte = data.astype(jnp.int32)
    bits = jnp.where(byte == 0, _E8M0_SMALLEST_AS_FLOAT32, byte << _FLOAT32_MANTISSA_BITS)
    return lax.bitcast_convert_type(jnp.where(byte == _E8M0_NAN, _FLOAT32_NAN, bits), jnp.float32)


def split_groups(x: Float[Array, "*rows channels"], size: int) -> tuple[Array, Array]:
    """Float32 `x` as [*rows, groups, size] and each group's largest magnitude [*rows, groups, 1], NaN if not finite."""
    channels = x.shape[-1]
    if channels % size:
        raise ValueError(f"channels are quantised in groups of {size}, got {channels} channels; pad the last axis")
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], channels // size, size)
    largest = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    return groups, jnp.where(jnp.isfinite(largest), largest, jnp.nan)


def _float32_bits(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float32_power_of_two(exponent_field: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    return lax.bitcast_convert_type(exponent_field << _FLOAT32_MANTISSA_BITS, jnp.float32)
