"""Sparse attention against golden sink attention, and a float64 loop over single indices."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import EMPTY_MAXIMUM, AttentionPartial, gather_rows, merge_partials, sparse_attention
from tests.golden import tensors

attend = jax.jit(sparse_attention, static_argnames=("scale", "implementation"))
ROWS, HEADS, HEAD_DIM, POOL_ROWS, SELECTED = 4, 2, 4, 7, 5
SCALE = HEAD_DIM**-0.5


def reference(queries, pool, indices, scale):
    """The partial result by its definition, one query and head at a time, in float64."""
    rows, heads, head_dim = queries.shape
    accumulator = np.zeros((rows, heads, head_dim))
    maximum = np.full((rows, heads), EMPTY_MAXIMUM)
    denominator = np.zeros((rows, heads))
    for row, head in np.ndindex(rows, heads):
        keys = pool[indices[row][indices[row] >= 0]].astype(np.float64)
        if len(keys):
            scores = keys @ queries[row, head].astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            maximum[row, head] = scores.max()
            denominator[row, head] = weights.sum()
            accumulator[row, head] = weights @ keys
    return AttentionPartial(accumulator, maximum, denominator)


def random_case(seed, rows=ROWS, pool_rows=POOL_ROWS, head_dim=HEAD_DIM):
    random = np.random.default_rng(seed)
    return (
        random.standard_normal((rows, HEADS, head_dim)).astype(np.float32) * 2,
        random.standard_normal((pool_rows, head_dim)).astype(np.float32),
    )


def assert_close(actual, expected, tolerance=1e-5):
    for name, left, right in zip(AttentionPartial._fields, actual, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance, err_msg=name)


def test_golden_sink_attention():
    """Lists with -1 at the end, between others, and nothing but -1, which gives zeros."""
    golden = tensors("units/units.safetensors")
    partial = attend(golden["attn.q"], golden["attn.kv"], golden["attn.idx"], scale=float(golden["attn.scale"]))
    merged = np.asarray(merge_partials((partial,), jnp.asarray(golden["attn.sink"])))
    np.testing.assert_allclose(merged, golden["attn.out_f32"], rtol=1e-5, atol=1e-6)
    empty = (golden["attn.idx"] < 0).all(axis=1)
    assert empty.any()
    assert not merged[empty].any()


def test_golden_sink_attention_in_parts():
    """The golden lists cut in two, attended apart and merged."""
    golden = tensors("units/units.safetensors")
    parts = tuple(
        attend(golden["attn.q"], golden["attn.kv"], part, scale=float(golden["attn.scale"]))
        for part in np.split(golden["attn.idx"], [23], axis=1)
    )
    merged = merge_partials(parts, jnp.asarray(golden["attn.sink"]))
    np.testing.assert_allclose(merged, golden["attn.out_f32"], rtol=1e-5, atol=1e-6)


@given(
    seed=st.integers(0, 2**32 - 1),
    indices=st.lists(
        st.lists(st.integers(-1, POOL_ROWS - 1), min_size=SELECTED, max_size=SELECTED), min_size=ROWS, max_size=ROWS
    ),
)
def test_any_lists(seed, indices):
    """-1 anywhere, and rows named twice, which count twice."""
    case = (*random_case(seed), np.asarray(indices, np.int32))
    assert_close(attend(*case, scale=SCALE), reference(*case, SCALE))


def test_an_empty_list_is_exactly_zero():
    partial = attend(*random_case(0), np.full((ROWS, SELECTED), -1, np.int32), scale=SCALE)
    np.testing.assert_array_equal(partial.accumulator, np.zeros((ROWS, HEADS, HEAD_DIM)))
    np.testing.assert_array_equal(partial.denominator, np.zeros((ROWS, HEADS)))
    np.testing.assert_array_equal(partial.maximum, np.full((ROWS, HEADS), EMPTY_MAXIMUM, np.float32))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_rows_that_no_list_names_may_hold_anything(poison):
    """Row 0 is where -1 is clamped to; it must not leak either."""
    queries, pool = random_case(1)
    indices = np.array([[2, -1, 4, -1, 5], [-1] * 5, [4, 4, -1, 2, -1], [5, -1, -1, -1, -1]], np.int32)
    poisoned = np.full_like(pool, poison)
    named = [2, 4, 5]
    poisoned[named] = pool[named]
    clean = attend(queries, pool, indices, scale=SCALE)
    for left, right in zip(attend(queries, poisoned, indices, scale=SCALE), clean, strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_row_is_independent_of_the_others():
    queries, pool = random_case(2)
    indices = np.array([[0, 1, 2, 3, 4], [6, -1, 5, -1, -1], [-1] * 5, [3, 3, 3, 3, 3]], np.int32)
    whole = attend(queries, pool, indices, scale=SCALE)
    poisoned = queries.copy()
    poisoned[[0, 2]] = np.nan
    for left, right in zip(attend(poisoned, pool, indices, scale=SCALE), whole, strict=True):
        np.testing.assert_array_equal(np.asarray(left)[[1, 3]], np.asarray(right)[[1, 3]])


@pytest.mark.parametrize("rows", [127, 128, 129, 300])
def test_many_rows_are_the_same_rows(rows):
    """The reference gathers in blocks (128 rows of this shape); full, partial and single blocks agree with the loop."""
    queries, pool = random_case(3, rows=rows, pool_rows=50, head_dim=64)
    indices = np.random.default_rng(4).integers(-1, 50, (rows, 64)).astype(np.int32)
    indices[rows // 2] = -1
    assert_close(attend(queries, pool, indices, scale=0.125), reference(queries, pool, indices, 0.125), 2e-5)


def test_uint16_pools_hold_bfloat16_bits():
    queries, pool = random_case(5)
    indices = np.random.default_rng(6).integers(-1, POOL_ROWS, (ROWS, SELECTED)).astype(np.int32)
    half = pool.astype(ml_dtypes.bfloat16)
    bits = attend(jnp.asarray(queries, jnp.bfloat16), half.view(np.uint16), indices, scale=SCALE)
    values = attend(jnp.asarray(queries, jnp.bfloat16), half, indices, scale=SCALE)
    for left, right in zip(bits, values, strict=True):
        assert left.dtype == jnp.float32
        np.testing.assert_array_equal(left, right)
    rounded = queries.astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = reference(rounded, half.astype(np.float32), indices, SCALE)
    np.testing.assert_allclose(bits.maximum, expected.maximum, rtol=1e-5)
    np.testing.assert_allclose(bits.denominator, expected.denominator, rtol=1e-5)
    np.testing.assert_allclose(bits.accumulator, expected.accumulator, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_gather_rows_takes_any_index_shape(shape):
    pool = np.random.default_rng(7).standard_normal((5, 3)).astype(np.float32)
    pool[0] = np.nan
    indices = np.random.default_rng(8).integers(-1, 5, shape).astype(np.int32)
    indices = np.where(indices == 0, -1, indices)
    gathered = jax.jit(gather_rows, static_argnums=2)(pool, indices, jnp.float32)
    expected = np.where((indices >= 0)[..., None], pool[indices], 0.0)
    np.testing.assert_array_equal(gathered, expected)


def test_gather_rows_reads_bits():
    pool = np.array([[1.0, -2.5], [np.nan, 3.0]], ml_dtypes.bfloat16)
    gathered = gather_rows(jnp.asarray(pool.view(np.uint16)), jnp.array([0, -1]), jnp.float32)
    assert gathered.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(gathered, np.float32), [[1.0, -2.5], [0.0, 0.0]])


def test_eager_equals_compiled():
    case = (*random_case(9), np.random.default_rng(10).integers(-1, POOL_ROWS, (ROWS, SELECTED)).astype(np.int32))
    eager = sparse_attention(*map(jnp.asarray, case), scale=SCALE, implementation="reference")
    assert_close(attend(*case, scale=SCALE), eager, 1e-6)


@pytest.mark.parametrize(
    ("queries", "pool", "indices"),
    [((3, 2, 4), (7, 4), (4, 5)), ((4, 2, 4), (7, 3), (4, 5)), ((4, 4), (7, 4), (4, 5)), ((4, 2, 4), (7, 4), (5,))],
)
def test_shapes_that_disagree_are_refused(queries, pool, indices):
    with pytest.raises(Exception, match="rows|head_dim|selected"):
        sparse_attention(jnp.zeros(queries), jnp.zeros(pool), jnp.zeros(indices, jnp.int32), scale=1.0)
