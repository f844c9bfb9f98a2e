"""Products and norms: golden RMSNorm, float64 references, and where exactly bfloat16 rounds."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.model.linear import linear, linear_float32, rms_norm, rms_norm_float32
from tests.golden import tensors

bfloat16 = ml_dtypes.bfloat16
product = jax.jit(linear)
product_float32 = jax.jit(linear_float32)
norm = jax.jit(rms_norm, static_argnames="epsilon")
norm_float32 = jax.jit(rms_norm_float32, static_argnames="epsilon")


def random(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_golden_rms_norm():
    """Rows down to 1e-12, where the epsilon of 1e-20 counts, and a row of zeros."""
    golden = tensors("units/units.safetensors")
    x, expected = golden["rmsnorm.x"], golden["rmsnorm.y_eps1e-20"]
    weight = golden["rmsnorm.weight"]
    np.testing.assert_allclose(norm(x, weight, epsilon=1e-20), expected, rtol=1e-6, atol=1e-30)
    assert np.abs(x[3]).max() < 1e-11
    assert np.abs(np.asarray(norm(x, weight, epsilon=1e-19))[3] / expected[3] - 1).max() > 0.5
    np.testing.assert_array_equal(norm(x, weight, epsilon=1e-20)[4], np.zeros(x.shape[1]))


def test_rms_norm_follows_the_definition():
    x, weight = random(0, 2, 3, 32) * 5, random(1, 32)
    exact = x.astype(np.float64)
    expected = weight * exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 0.5)
    np.testing.assert_allclose(norm(x, weight, epsilon=0.5), expected, rtol=1e-6, atol=1e-6)


def test_rms_norm_rounds_once_at_the_end():
    """The weight multiplies in float32, before the only rounding to bfloat16 (golden README 5.8)."""
    x, weight = random(2, 64, 64, dtype=bfloat16), random(3, 64, dtype=bfloat16)
    exact = x.astype(np.float64)
    normed = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-20)
    result = norm(x, weight, epsilon=1e-20)
    assert result.dtype == jnp.bfloat16
    once = (normed * weight.astype(np.float64)).astype(bfloat16)
    assert (np.asarray(result) == once).mean() > 0.999
    twice = (normed.astype(bfloat16) * weight).astype(bfloat16)
    assert (np.asarray(result) == twice).mean() < 0.9
    unrounded = norm_float32(x, weight, epsilon=1e-20)
    assert unrounded.dtype == jnp.float32
    np.testing.assert_allclose(unrounded, normed * weight.astype(np.float64), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_linear_multiplies_by_the_transposed_weight(batch):
    x, weight = random(4, *batch, 40), random(5, 7, 40)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    for function in (product, product_float32):
        result = function(x, weight)
        assert result.dtype == jnp.float32
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_products_accumulate_in_float32_and_round_once():
    x, weight = random(6, 8, 4096, dtype=bfloat16), random(7, 8, 4096, dtype=bfloat16)
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    wide = product_float32(x, weight)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, exact, rtol=1e-4, atol=1e-3)
    narrow = product(x, weight)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow, np.asarray(wide).astype(bfloat16))


def test_operands_of_different_dtypes_meet_in_float32():
    """A float32 input is not rounded for a bfloat16 weight (router, mHC and compressor work in float32)."""
    x, weight = random(8, 5, 64), random(9, 6, 64, dtype=bfloat16)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(product_float32(x, weight), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(x.astype(bfloat16).astype(np.float64) @ weight.astype(np.float64).T - expected).max() > 1e-3
    assert product(x.astype(bfloat16), weight.astype(np.float32)).dtype == jnp.bfloat16


@pytest.mark.parametrize("function", [linear, linear_float32])
def test_widths_that_disagree_are_refused(function):
    with pytest.raises(Exception, match="in"):
        function(jnp.zeros((2, 3)), jnp.zeros((4, 5)))


def test_norm_weights_of_another_width_are_refused():
    with pytest.raises(Exception, match="width"):
        rms_norm(jnp.zeros((2, 3)), jnp.zeros((4,)), 1e-6)
