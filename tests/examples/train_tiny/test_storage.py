"""Straight-through rounding: values as a checkpoint stores them, gradients as if nothing were rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model.params import Parameter, Stored
from examples.train_tiny.storage import as_stored, stored_values

FORMATS = [Stored.BF16, Stored.FP8_BLOCKS, Stored.FP8_ROWS, Stored.FP4_ROWS]


def parameter(stored):
    return Parameter((64, 64), (None, None), stored, (("a",),))


def values():
    return jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.float32)


@pytest.mark.parametrize("stored", FORMATS)
def test_stored_values_are_close_and_stay_when_stored_again(stored):
    rounded = stored_values(parameter(stored), values())
    error = np.abs(np.asarray(rounded - values())).max()
    assert 0 < error < {Stored.BF16: 0.02, Stored.FP4_ROWS: 1.0}.get(stored, 0.3)
    np.testing.assert_array_equal(stored_values(parameter(stored), rounded), rounded)


@pytest.mark.parametrize("stored", FORMATS)
def test_values_are_rounded_and_gradients_are_not(stored):
    def weighted(tree):
        kept = as_stored({"x": parameter(stored)}, tree)["x"]
        return (kept * kept).sum(), kept

    (_, kept), gradient = jax.value_and_grad(weighted, has_aux=True)({"x": values()})
    rounded = stored_values(parameter(stored), values())
    np.testing.assert_allclose(kept, rounded, atol=1e-6)
    np.testing.assert_allclose(gradient["x"], 2 * rounded, atol=1e-5)


def test_what_the_release_keeps_in_float32_is_untouched():
    tree = {"x": values()}
    assert as_stored({"x": parameter(Stored.F32)}, tree)["x"] is tree["x"]
