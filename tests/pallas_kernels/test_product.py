"""Products: every form of a weight against a float64 product of its values."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import TransposedWeight, pack_weight, product
from pallas_kernels.product import without_rounding

run = jax.jit(product)
ROWS = [1, 2, 7]
every_dtype = pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])


def random_case(rows, width, dtype, out=6):
    random = np.random.default_rng(rows * width)
    inputs = random.standard_normal((rows, width)).astype(dtype)
    return inputs, random.standard_normal((out, width)).astype(dtype)


def assert_product(actual, inputs, values):
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, inputs.astype(np.float64) @ values.astype(np.float64).T, rtol=1e-5, atol=1e-5)


@every_dtype
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [8, 30])
def test_plain_and_transposed_weights_give_the_product(rows, width, dtype):
    inputs, values = random_case(rows, width, dtype)
    assert_product(run(inputs, values), inputs, values)
    assert_product(run(inputs, TransposedWeight(values.T.copy())), inputs, values)


@pytest.mark.parametrize("rows", ROWS)
def test_operands_of_different_dtypes_meet_in_float32(rows):
    """Or float32 inputs would be rounded to the weight's bfloat16."""
    inputs, values = random_case(rows, 8, np.float32)
    values = values.astype(ml_dtypes.bfloat16)
    for weight in (values, TransposedWeight(values.T.copy())):
        assert_product(run(inputs, weight), inputs, values)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 3, 8), (1, 1, 8)])
def test_leading_axes_stay(shape):
    inputs = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    values = random_case(1, 8, np.float32)[1]
    for weight in (values, TransposedWeight(values.T.copy())):
        actual = run(inputs, weight)
        assert actual.shape == (*shape[:-1], 6)
        assert_product(actual, inputs, values)


def test_a_transposed_weight_tells_its_logical_shape():
    assert TransposedWeight(np.zeros((8, 6), np.float32)).shape == (6, 8)


@pytest.mark.parametrize("fp4", [False, True])
def test_packed_weights_round_their_inputs_unless_told_that_they_are(fp4):
    inputs, values = random_case(5, 64, np.float32)
    weight = pack_weight(jnp.asarray(values), fp4=fp4, scale_rows=1, rounds_inputs=True)
    exact = np.asarray(weight.values(jnp.dtype(jnp.float32)))
    assert_product(run(inputs, without_rounding(weight)), inputs, exact)
    rounded = np.asarray(run(inputs, weight))
    assert 1e-3 < np.abs(rounded - inputs @ exact.T).max() < 1.0


def test_only_packed_weights_have_a_rounding():
    values = jnp.ones((2, 32))
    assert without_rounding(values) is values
