"""Cached rows: exact for values that have been through their format, gathered and written like plain arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import quant
from deepinfer_jax.cache.state import empty_cache, read_rows, write_rows
from deepinfer_jax.numerics import F32
from pallas_kernels import CachedRows, gather_rows, sparse_attention

ROUND_TRIPS = {"fp8_32": quant.round_trip_fp8_32, "fp4_32": quant.round_trip_fp4_32, "fp4_16": quant.round_trip_fp4_16}
CHANNELS = 64


def values(rows, seed=0):
    """Rows of all magnitudes: scales, saturation and the floor of every format are reached."""
    random = np.random.default_rng(seed)
    size = 10.0 ** random.uniform(-8, 5, (rows, 1))
    return jnp.asarray(random.normal(size=(rows, CHANNELS)) * size, jnp.float32)


@pytest.mark.parametrize("name", sorted(ROUND_TRIPS))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_values_are_those_of_the_round_trip(name, dtype):
    exact = values(4000).astype(dtype)
    rounded = jax.jit(ROUND_TRIPS[name])(exact)
    packed = CachedRows.pack(exact, name)
    np.testing.assert_array_equal(packed.values(dtype), rounded)
    assert packed.shape == rounded.shape
    if name != "fp4_16":  # its scale has few digits when it is small: such rows are packed once only
        np.testing.assert_array_equal(CachedRows.pack(rounded, name).values(dtype), rounded)


@pytest.mark.parametrize("name", sorted(ROUND_TRIPS))
def test_rows_are_written_and_read_like_those_of_a_plain_array(name):
    exact = values(5)
    rounded = ROUND_TRIPS[name](exact)
    plain, packed = (empty_cache((7, CHANNELS), form, F32) for form in (None, name))
    places = jnp.asarray([6, 2, 7, 0, 3])  # 7 is out of range
    plain, packed = write_rows(plain, places, rounded), write_rows(packed, places, exact)
    np.testing.assert_array_equal(read_rows(packed, jnp.float32), plain)
    named = jnp.asarray([[3, -1], [6, 0]])
    np.testing.assert_array_equal(gather_rows(packed, named, jnp.float32), gather_rows(plain, named, jnp.float32))


@pytest.mark.parametrize("name", sorted(ROUND_TRIPS))
def test_poisoned_rows_are_nan_until_they_are_written(name):
    cache = empty_cache((2, 3, CHANNELS), name, F32, fill=np.nan)
    assert jnp.isnan(read_rows(cache, jnp.float32)).all()
    cache = write_rows(cache, (1, jnp.asarray([2])), ROUND_TRIPS[name](values(1)))
    assert not jnp.isnan(read_rows(cache[1, 2], jnp.float32)).any()
    assert jnp.isnan(read_rows(cache[0], jnp.float32)).all()
    assert not jnp.isnan(read_rows(empty_cache((2, CHANNELS), name, F32), jnp.float32)).any()


def test_attention_over_packed_entries_is_attention_over_their_values():
    exact = values(9, seed=1) / 100
    rounded = quant.round_trip_fp4_16(exact)
    queries = jax.random.normal(jax.random.key(0), (3, 2, CHANNELS))
    indices = jnp.asarray([[0, 8, -1], [4, 4, 2], [-1, -1, -1]])
    packed = sparse_attention(queries, CachedRows.pack(exact, "fp4_16"), indices, scale=0.1)
    plain = sparse_attention(queries, rounded, indices, scale=0.1)
    jax.tree.map(np.testing.assert_array_equal, packed, plain)
