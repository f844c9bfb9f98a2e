"""The number formats against golden tables, and against nearest-even rounding written out in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels import formats
from tests.golden import tensors

E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Written out from the definition: seven subnormal steps of 2^-9, then eight steps per power of two up to 448.
E4M3_MAGNITUDES = np.array(
    [step * 2.0**-9 for step in range(8)]
    + [(8 + step) / 8 * 2.0**exponent for exponent in range(-6, 9) for step in range(8)][:-1]
)
MAGNITUDES = {"e4m3": E4M3_MAGNITUDES, "e2m1": E2M1_MAGNITUDES}
ROUND = {"e4m3": formats.round_to_e4m3, "e2m1": formats.round_to_e2m1}

every_format = pytest.mark.parametrize("name", MAGNITUDES)
modes = pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])


def normal_float32(smallest=2.0**-126, largest=2.0**127, sign=True):
    magnitude = st.floats(smallest, largest, width=32)
    return (
        st.builds(lambda value, negative: -value if negative else value, magnitude, st.booleans())
        if sign
        else magnitude
    )


def nearest_even(x, magnitudes):
    """Signed member of `magnitudes` nearest to each x; a tie goes to the even position, which has the even mantissa."""
    wide = np.abs(np.asarray(x, np.float64)).clip(max=magnitudes[-1])
    upper = np.searchsorted(magnitudes, wide).clip(1, len(magnitudes) - 1)
    below, above = wide - magnitudes[upper - 1], magnitudes[upper] - wide
    take_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    return np.copysign(np.where(take_upper, magnitudes[upper], magnitudes[upper - 1]), np.asarray(x, np.float64))


def around_midpoints(magnitudes):
    """The float32 values at, just below and just above every member and every midpoint, in both signs."""
    points = np.concatenate([magnitudes, (magnitudes[1:] + magnitudes[:-1]) / 2]).astype(np.float32)
    points = points[points > 0]
    spread = np.concatenate([np.nextafter(points, np.float32(0)), points, np.nextafter(points, np.float32(np.inf))])
    return np.concatenate([[0.0], spread, [-0.0], -spread]).astype(np.float32)


def assert_same_bits(actual, expected):
    """Bitwise equality of floats, so that -0 differs from 0; every NaN is the same."""
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(actual[number].view(np.uint32), expected[number].view(np.uint32))


def run(function, compiled, *arguments):
    return (jax.jit(function) if compiled else function)(*arguments)


@modes
def test_decoding_matches_the_golden_tables(compiled):
    table = tensors("quant/quant.safetensors")
    assert_same_bits(run(formats.decode_e4m3, compiled, jnp.array(table["table.e4m3_bytes"])), table["table.e4m3_f32"])
    assert_same_bits(run(formats.decode_e8m0, compiled, jnp.array(table["table.e8m0_bytes"])), table["table.e8m0_f32"])
    codes = jnp.arange(16, dtype=jnp.uint8)
    assert_same_bits(run(formats.decode_e2m1, compiled, codes), table["table.e2m1_f32"])


@modes
def test_encoding_inverts_the_golden_tables(compiled):
    table = tensors("quant/quant.safetensors")
    e4m3 = run(formats.encode_e4m3, compiled, jnp.array(table["table.e4m3_f32"]))
    np.testing.assert_array_equal(e4m3, table["table.e4m3_bytes"])
    e8m0 = run(formats.encode_e8m0, compiled, jnp.array(table["table.e8m0_f32"]))
    np.testing.assert_array_equal(e8m0, table["table.e8m0_bytes"])
    np.testing.assert_array_equal(run(formats.encode_e2m1, compiled, jnp.array(table["table.e2m1_f32"])), np.arange(16))


def test_nan_bytes_decode_to_nan():
    assert np.isnan(formats.decode_e4m3(jnp.array([0x7F, 0xFF], jnp.uint8))).all()
    assert np.isnan(formats.decode_e8m0(jnp.array([255], jnp.uint8))).all()


@every_format
@modes
def test_rounding_is_nearest_even_around_every_midpoint(name, compiled):
    x = around_midpoints(MAGNITUDES[name])
    assert_same_bits(run(ROUND[name], compiled, jnp.array(x)), nearest_even(x, MAGNITUDES[name]))


@every_format
def test_rounding_is_nearest_even_for_every_bfloat16(name):
    x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    wide = x.astype(np.float32)
    x = x[~np.isnan(wide)]
    rounded = jax.jit(ROUND[name])(jnp.array(x))
    assert rounded.dtype == jnp.bfloat16
    assert_same_bits(rounded, nearest_even(x, MAGNITUDES[name]))


@every_format
@given(x=hnp.arrays(np.float32, 64, elements=normal_float32(2.0**-12, 1000.0)))
def test_rounding_is_nearest_even_for_random_float32(name, x):
    assert_same_bits(jax.jit(ROUND[name])(jnp.array(x)), nearest_even(x, MAGNITUDES[name]))


@every_format
def test_rounding_keeps_nan_and_saturates(name):
    largest = MAGNITUDES[name][-1]
    x = jnp.array([np.nan, np.inf, -np.inf, 3e38, -3e38], jnp.float32)
    assert_same_bits(jax.jit(ROUND[name])(x), [np.nan, largest, -largest, largest, -largest])


def test_encoded_e4m3_is_the_rounded_value():
    x = jnp.array(np.concatenate([around_midpoints(E4M3_MAGNITUDES), np.float32([np.nan, np.inf, -1e30])]))
    assert_same_bits(formats.decode_e4m3(jax.jit(formats.encode_e4m3)(x)), formats.round_to_e4m3(x))


@given(
    x=hnp.arrays(np.float32, 64, elements=normal_float32(2.0**-20, 5000.0)),
    unit_byte=st.integers(1, 126),
    multiples=st.lists(st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), min_size=8, max_size=8),
)
def test_e2m1_in_units_of_an_e4m3_scale_rounds_the_quotient(x, unit_byte, multiples):
    unit = np.float32(E4M3_MAGNITUDES[unit_byte])
    ties = np.float32(multiples) * unit
    x = np.concatenate([x, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))])
    quotient = nearest_even(x.astype(np.float64) / np.float64(unit), E2M1_MAGNITUDES)
    codes = jax.jit(formats.encode_e2m1)(jnp.array(x), jnp.array([unit]))
    assert_same_bits(formats.decode_e2m1(codes), quotient)
    assert_same_bits(nearest_even(x / unit, E2M1_MAGNITUDES), quotient)  # a float32 division never makes a false tie


@given(
    x=hnp.arrays(np.float32, 64, elements=normal_float32(sign=False)),
    exponent=st.integers(-100, 100),
    divisor=st.sampled_from([1.0, formats.E2M1_LARGEST, formats.E4M3_LARGEST]),
)
def test_e8m0_is_the_smallest_power_of_two_not_below(x, exponent, divisor):
    boundary = np.float32(divisor * 2.0**exponent)
    x = np.concatenate(
        [x, [np.nextafter(boundary, np.float32(0)), boundary, np.nextafter(boundary, np.float32(np.inf))]]
    )
    fraction, power = np.frexp(x.astype(np.float64) / divisor)  # x / divisor = fraction * 2^power, fraction in [0.5, 1)
    expected = (np.where(fraction == 0.5, power - 1, power) + 127).clip(min=0)
    bytes_ = np.asarray(jax.jit(formats.encode_e8m0, static_argnums=1)(jnp.array(x), divisor))
    np.testing.assert_array_equal(bytes_, expected)


def test_e8m0_of_what_has_no_power_of_two():
    x = jnp.array([0.0, 2.0**-140, 2.0**-127, np.inf, np.nan, 3e38], jnp.float32)
    np.testing.assert_array_equal(jax.jit(formats.encode_e8m0)(x), [0, 0, 0, 255, 255, 255])
    np.testing.assert_array_equal(formats.encode_e8m0(x, 448.0), [0, 0, 0, 255, 255, 120 + 127])


def test_e8m0_reciprocal():
    scale = jnp.arange(1, 254, dtype=jnp.uint8)
    np.testing.assert_array_equal(formats.decode_e8m0(scale) * formats.decode_e8m0(254 - scale), np.ones(253))
    assert np.isnan(formats.decode_e8m0(254 - jnp.array([255], jnp.uint8))).all()


@pytest.mark.parametrize("shape", [(256,), (16, 16), (2, 8, 16), (0, 4)])
def test_packing_inverts_unpacking(shape):
    packed = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    values = formats.unpack_e2m1(jnp.array(packed))
    assert values.shape == (*packed.shape[:-1], 2 * packed.shape[-1])
    np.testing.assert_array_equal(formats.pack_e2m1(values), packed)


@modes
def test_the_even_column_is_the_low_nibble(compiled):
    assert_same_bits(run(formats.unpack_e2m1, compiled, jnp.array([0x21, 0xF8], jnp.uint8)), [0.5, 1.0, -0.0, -6.0])
    signed = jnp.array([0x21, 0xF8 - 256], jnp.int8)
    assert_same_bits(run(formats.unpack_e2m1, compiled, signed), [0.5, 1.0, -0.0, -6.0])
    np.testing.assert_array_equal(run(formats.pack_e2m1, compiled, jnp.array([0.5, 1.0, -0.0, -7.0])), [0x21, 0xF8])


def test_packing_applies_the_unit():
    packed = formats.pack_e2m1(jnp.array([[3.0, 12.0]]), jnp.array([[2.0]]))
    assert_same_bits(formats.unpack_e2m1(packed), [[1.5, 6.0]])


def test_packing_refuses_an_odd_number_of_columns():
    with pytest.raises(ValueError, match="got 3 columns"):
        formats.pack_e2m1(jnp.zeros((2, 3)))
