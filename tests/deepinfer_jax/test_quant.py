"""The quantised formats against golden values, and against their definition written out in float64."""

import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax import quant
from tests.golden import tensors

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)

NAMES = ["fp8_32", "fp4_32", "fp4_16"]
ROUND_TRIP = {name: jax.jit(getattr(quant, f"round_trip_{name}")) for name in NAMES}
QUANTISE = {name: jax.jit(getattr(quant, f"quantise_{name}")) for name in NAMES}
DEQUANTISE = {name: jax.jit(getattr(quant, f"dequantise_{name}"), static_argnums=2) for name in NAMES}
GOLDEN_NAME = {
    "fp8_32": "act.window_kv_fp8_b32_ue8m0",
    "fp4_32": "act.index_fp4_b32_ue8m0",
    "fp4_16": "act.compress_kv_fp4_b16_e4m3",
}
GROUP = {"fp8_32": 32, "fp4_32": 32, "fp4_16": 16}

every_format = pytest.mark.parametrize("name", NAMES)
both_dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


@st.composite
def activations(draw, smallest_exponent=-30):
    """Rows whose groups have very different magnitudes, with zeros and repeated powers of two among the elements."""
    rows = 3
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    exponent = generator.integers(smallest_exponent, 9, (rows, 4, 1))
    x = generator.standard_normal((rows, 4, 16)) * np.exp2(exponent)
    powers = np.exp2(exponent + generator.integers(-6, 3, x.shape))
    kind = generator.integers(0, 8, x.shape)
    x = np.where(kind == 0, 0.0, np.where(kind == 1, powers, x))
    return x.reshape(rows, 64).astype(draw(st.sampled_from([np.float32, ml_dtypes.bfloat16])))


def nearest_even(x, element):
    """`x` as the nearest `element` number, by the conversion of an independent package; it does not saturate e4m3."""
    return x.clip(-448, 448).astype(element).astype(np.float64)


def ceil_power_of_two(x):
    fraction, power = np.frexp(x)
    return np.exp2(np.where(fraction == 0.5, power - 1, power))


def round_trip_by_definition(name, x):
    """The formulas of the formats in float64, with divisions."""
    groups = x.astype(np.float64).reshape(-1, GROUP[name])
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    if name == "fp8_32":
        scale = ceil_power_of_two(np.maximum(largest, np.float32(1e-4)) / 448)
        rounded = nearest_even(groups / scale, ml_dtypes.float8_e4m3fn)
    elif name == "fp4_32":
        scale = ceil_power_of_two(np.maximum(largest, 6 * 2.0**-126) / 6)
        rounded = nearest_even(groups / scale, ml_dtypes.float4_e2m1fn)
    else:
        scale = nearest_even(np.maximum(largest, 6 * 2.0**-9) / 6, ml_dtypes.float8_e4m3fn)
        rounded = nearest_even(groups / scale, ml_dtypes.float4_e2m1fn)
    return (rounded * scale).reshape(x.shape)


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual).astype(np.float32), np.asarray(expected).astype(np.float32)
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.fixture(scope="module")
def golden():
    return tensors("quant/quant.safetensors")


@every_format
@both_dtypes
@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
def test_round_trip_matches_golden(golden, name, dtype, compiled):
    with jax.disable_jit(not compiled):
        actual = ROUND_TRIP[name](jnp.array(golden["act.input_bf16"], dtype))
    assert actual.dtype == dtype
    assert_same_bits(actual, golden[GOLDEN_NAME[name]])


def test_linear_input_matches_golden(golden):
    data, scale = QUANTISE["fp8_32"](jnp.array(golden["act.input_bf16"], jnp.bfloat16))
    np.testing.assert_array_equal(data, golden["act.linear_input_fp8"])
    np.testing.assert_array_equal(scale, golden["act.linear_input_scale"])


@pytest.mark.parametrize("case", ["ragged", "sq", "wide"])
def test_fp8_blocks_match_golden(golden, case):
    weight, scale = golden[f"fp8_block.{case}.weight"], golden[f"fp8_block.{case}.scale"]
    assert_same_bits(quant.dequantise_fp8_blocks(weight, scale), golden[f"fp8_block.{case}.expected_f32"])


def test_fp8_rows_match_golden(golden):
    values = quant.dequantise_fp8_rows(golden["fp8_row.weight"], golden["fp8_row.scale"])
    assert_same_bits(values, golden["fp8_row.expected_f32"])


@pytest.mark.parametrize("case", ["a", "b"])
@pytest.mark.parametrize("stored", [np.uint8, np.int8])
def test_fp4_rows_match_golden(golden, case, stored):
    values = quant.dequantise_fp4_rows(golden[f"fp4.{case}.weight"].view(stored), golden[f"fp4.{case}.scale"])
    assert_same_bits(values, golden[f"fp4.{case}.expected_f32"])


@pytest.mark.parametrize("element", ["fp8", "fp4"])
def test_matrix_products_match_golden(golden, element):
    dequantise = {"fp8": quant.dequantise_fp8_blocks, "fp4": quant.dequantise_fp4_rows}[element]
    weight = dequantise(golden[f"gemm.w_{element}"], golden[f"gemm.w_{element}_scale"])
    plain = golden["gemm.x_bf16"].astype(np.float64) @ weight.T.astype(np.float64)
    np.testing.assert_allclose(plain, golden[f"gemm.y_{element}_dequant_f32"], rtol=0, atol=1e-6)
    x = quant.dequantise_fp8_32(*quant.quantise_fp8_32(jnp.array(golden["gemm.x_bf16"])), jnp.float32)
    released = np.asarray(x, np.float64) @ weight.T.astype(np.float64)
    assert_same_bits(released.astype(ml_dtypes.bfloat16), golden[f"gemm.y_{element}_bf16"])


@every_format
@given(x=activations())
def test_round_trip_follows_the_definition(name, x):
    assert_same_bits(ROUND_TRIP[name](jnp.array(x)), round_trip_by_definition(name, x))


@every_format
@given(x=activations())
def test_dequantised_data_equal_the_round_trip(name, x):
    data, scale = QUANTISE[name](jnp.array(x))
    assert (data.dtype, scale.dtype) == (jnp.uint8, jnp.uint8)
    assert data.shape == (*x.shape[:-1], x.shape[-1] // (1 if name == "fp8_32" else 2))
    assert scale.shape == (*x.shape[:-1], x.shape[-1] // GROUP[name])
    values = DEQUANTISE[name](data, scale, x.dtype)
    assert values.dtype == x.dtype
    assert_same_bits(values, ROUND_TRIP[name](jnp.array(x)))


@every_format
@given(x=activations(smallest_exponent=0))
def test_round_trip_is_idempotent(name, x):
    # From a largest magnitude of 6 * 2^-6 upwards the e4m3 scale is normal; below, a coarser scale can come back finer.
    once = ROUND_TRIP[name](jnp.array(x))
    assert_same_bits(ROUND_TRIP[name](once), once)


@every_format
@given(x=activations())
def test_round_trip_is_exact_in_bfloat16(name, x):
    values = ROUND_TRIP[name](jnp.array(x.astype(np.float32)))
    assert_same_bits(values.astype(jnp.bfloat16), values)


@pytest.mark.parametrize(("name", "largest"), [("fp8_32", 448.0), ("fp4_32", 6.0)])
@given(x=activations(smallest_exponent=0))
def test_scales_are_the_smallest_sufficient_powers_of_two(name, largest, x):
    _, scale = QUANTISE[name](jnp.array(x))
    power = np.exp2(np.asarray(scale, np.float64) - 127)
    magnitude = np.abs(x.astype(np.float64)).reshape(len(x), -1, 32).max(-1)
    assert (magnitude > largest * power / 2).all()
    assert (magnitude <= largest * power).all()


@every_format
@both_dtypes
def test_zeros_and_the_smallest_numbers_come_back(name, dtype):
    x = np.zeros((3, 32))
    x[1] = 1.5 * 2.0**-126
    x[2, ::2] = -(2.0**-120)
    expected = round_trip_by_definition(name, x)
    assert_same_bits(ROUND_TRIP[name](jnp.array(x, dtype)), expected)


@every_format
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_group_that_is_not_finite_becomes_nan_and_its_neighbour_does_not(name, value):
    size = GROUP[name]
    x = np.full((1, 2 * size), 1.5, np.float32)
    x[0, 3] = value
    expected = np.concatenate([np.full(size, np.nan), np.full(size, 1.5)])[None].astype(np.float32)
    np.testing.assert_array_equal(ROUND_TRIP[name](jnp.array(x)), expected)
    np.testing.assert_array_equal(DEQUANTISE[name](*QUANTISE[name](jnp.array(x)), jnp.float32), expected)


def test_main_kv_saturates_at_its_largest_scale():
    x = jnp.array([[1e6, -1e6] + [2688.0] * 14])
    np.testing.assert_array_equal(quant.round_trip_fp4_16(x), [[2688.0, -2688.0] + [2688.0] * 14])


@every_format
def test_no_rows_are_no_error(name):
    x = jnp.zeros((0, 64), jnp.bfloat16)
    assert ROUND_TRIP[name](x).shape == (0, 64)
    assert DEQUANTISE[name](*QUANTISE[name](x), jnp.bfloat16).shape == (0, 64)


@every_format
def test_channels_that_fill_no_group_are_refused(name):
    for function in (ROUND_TRIP[name], QUANTISE[name]):
        with pytest.raises(ValueError, match=f"groups of {GROUP[name]}, got 40 channels"):
            function(jnp.zeros((2, 40)))


def random_bytes(*shape, low=0, high=256):
    return np.random.default_rng(0).integers(low, high, shape, dtype=np.uint8)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (70, 45), (1100, 256), (33, 300_000)])
def test_fp8_blocks_of_every_size(rows, columns):
    weight = random_bytes(rows, columns, high=127)
    scale = random_bytes(-(-rows // 32), -(-columns // 32), low=100, high=150)
    values = quant.dequantise_fp8_blocks(weight, scale)
    tile = np.exp2(scale[np.arange(rows)[:, None] // 32, np.arange(columns) // 32].astype(np.float32) - 127)
    np.testing.assert_array_equal(values, E4M3.astype(np.float32)[weight] * tile)


@pytest.mark.parametrize(("rows", "columns"), [(0, 64), (1, 32), (1100, 256), (3, 320_000)])
def test_fp8_rows_of_every_size(rows, columns):
    weight, scale = random_bytes(rows, columns, high=127), random_bytes(rows, columns // 32, low=100, high=150)
    expected = E4M3.astype(np.float32)[weight] * np.exp2(np.repeat(scale, 32, axis=1).astype(np.float32) - 127)
    np.testing.assert_array_equal(quant.dequantise_fp8_rows(weight, scale), expected)


@pytest.mark.parametrize(("rows", "columns"), [(0, 64), (1, 32), (1100, 512)])
def test_fp4_rows_of_every_size(rows, columns):
    packed, scale = random_bytes(rows, columns // 2), random_bytes(rows, columns // 32, low=100, high=150)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, columns)
    expected = np.concatenate([E2M1, -E2M1])[codes] * np.exp2(np.repeat(scale, 32, axis=1) - 127.0)
    assert_same_bits(quant.dequantise_fp4_rows(packed, scale), expected)


def test_dequantising_needs_little_more_memory_than_its_result():
    weight, scale = random_bytes(2048, 2048), random_bytes(2048, 64, low=100, high=150)
    tracemalloc.start()
    try:
        values = quant.dequantise_fp8_rows(weight, scale)
        quant.dequantise_fp8_blocks(weight, scale[:64])
        quant.dequantise_fp4_rows(weight[:, :1024], scale)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.25 * values.nbytes


@pytest.mark.parametrize(
    ("dequantise", "weight", "scale", "expected"),
    [
        (quant.dequantise_fp8_blocks, (70, 64), (2, 2), r"\[3, 2\]"),
        (quant.dequantise_fp8_rows, (4, 64), (4, 3), r"\[4, 2\]"),
        (quant.dequantise_fp4_rows, (4, 32), (4, 1), r"\[4, 2\]"),
    ],
)
def test_scales_of_another_shape_are_refused(dequantise, weight, scale, expected):
    with pytest.raises(ValueError, match=f"expected scales {expected}"):
        dequantise(np.zeros(weight, np.uint8), np.zeros(scale, np.uint8))


@pytest.mark.parametrize("dequantise", [quant.dequantise_fp8_rows, quant.dequantise_fp4_rows])
def test_rows_that_fill_no_group_are_refused(dequantise):
    columns = 40 if dequantise is quant.dequantise_fp8_rows else 20
    with pytest.raises(ValueError, match="got 40 columns"):
        dequantise(np.zeros((4, columns), np.uint8), np.zeros((4, 1), np.uint8))
