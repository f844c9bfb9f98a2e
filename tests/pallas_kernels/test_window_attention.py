"""Window attention against golden sink attention, golden window index sets, and a float64 loop over single keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import EMPTY_MAXIMUM, AttentionPartial, merge_partials, window_attention
from tests.golden import tensors

attend = jax.jit(window_attention, static_argnames=("scale", "implementation"))
TILES, ROWS, KEYS, HEADS, HEAD_DIM = 2, 3, 5, 2, 4
SCALE = HEAD_DIM**-0.5


def reference(queries, keys, key_positions, first, last, scale):
    """The partial result by its definition, one query and head at a time, in float64."""
    tiles, rows, heads, head_dim = queries.shape
    accumulator = np.zeros((tiles, rows, heads, head_dim))
    maximum = np.full((tiles, rows, heads), EMPTY_MAXIMUM)
    denominator = np.zeros((tiles, rows, heads))
    for tile, row, head in np.ndindex(tiles, rows, heads):
        seen = [
            key.astype(np.float64)
            for key, position in zip(keys[tile], key_positions[tile], strict=True)
            if position >= 0 and first[tile, row] <= position <= last[tile, row]
        ]
        if seen:
            scores = np.array([queries[tile, row, head].astype(np.float64) @ key * scale for key in seen])
            weights = np.exp(scores - scores.max())
            maximum[tile, row, head] = scores.max()
            denominator[tile, row, head] = weights.sum()
            accumulator[tile, row, head] = weights @ np.array(seen)
    return AttentionPartial(accumulator, maximum, denominator)


def random_case(seed, tiles=TILES, rows=ROWS, keys=KEYS):
    random = np.random.default_rng(seed)
    return (
        random.standard_normal((tiles, rows, HEADS, HEAD_DIM)).astype(np.float32) * 3,
        random.standard_normal((tiles, keys, HEAD_DIM)).astype(np.float32),
    )


def indices(values):
    return np.asarray(values, np.int32)


def assert_close(actual, expected, tolerance=1e-5):
    for name, left, right in zip(AttentionPartial._fields, actual, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance, err_msg=name)


def test_golden_sink_attention():
    """The golden keys of each query become a tile of their own; a golden index of -1 becomes an absent key."""
    golden = tensors("units/units.safetensors")
    rows, selected = golden["attn.idx"].shape
    keys = golden["attn.kv"][np.maximum(golden["attn.idx"], 0)]
    positions = np.where(golden["attn.idx"] >= 0, np.arange(selected)[None], -1)
    partial = attend(
        golden["attn.q"][:, None],
        keys,
        indices(positions),
        indices(np.zeros((rows, 1))),
        indices(np.full((rows, 1), selected - 1)),
        scale=float(golden["attn.scale"]),
    )
    merged = merge_partials((partial,), jnp.asarray(golden["attn.sink"]))
    np.testing.assert_allclose(merged[:, 0], golden["attn.out_f32"], rtol=1e-5, atol=1e-6)
    empty = (golden["attn.idx"] < 0).all(axis=1)
    assert empty.any()
    assert not np.asarray(merged[:, 0])[empty].any()


@pytest.mark.parametrize("length", [10, 20])
def test_golden_prefill_window_sets(length):
    """Zero queries weigh all visible keys alike and one-hot keys name themselves: the result lists what was seen."""
    golden = tensors("units/units.safetensors")[f"window.idx_w8_prefill{length}"]
    positions = np.arange(length)
    partial = attend(
        np.zeros((1, length, 1, length), np.float32),
        np.eye(length, dtype=np.float32)[None],
        indices(positions[None]),
        indices(np.maximum(positions - 7, 0)[None]),
        indices(positions[None]),
        scale=1.0,
    )
    expected = np.zeros((length, length + 1), np.float32)
    expected[positions[:, None], golden] = 1.0
    np.testing.assert_array_equal(partial.accumulator[0, :, 0], expected[:, :length])
    np.testing.assert_array_equal(partial.denominator[0, :, 0], (golden >= 0).sum(axis=1))


@given(
    seed=st.integers(0, 2**32 - 1),
    positions=st.lists(st.lists(st.integers(-1, 12), min_size=KEYS, max_size=KEYS), min_size=TILES, max_size=TILES),
    first=st.lists(st.lists(st.integers(-9, 12), min_size=ROWS, max_size=ROWS), min_size=TILES, max_size=TILES),
    width=st.lists(st.lists(st.integers(-2, 9), min_size=ROWS, max_size=ROWS), min_size=TILES, max_size=TILES),
)
def test_any_positions_and_ranges(seed, positions, first, width):
    """Keys in any order, doubled or absent; ranges that are empty, negative, or see all."""
    case = (*random_case(seed), indices(positions), indices(first), indices(first) + indices(width))
    assert_close(attend(*case, scale=SCALE), reference(*case, SCALE))


def test_range_ends_are_inclusive():
    queries, keys = random_case(0, tiles=1, rows=4, keys=6)
    positions, first, last = indices([[4, 5, 6, 7, 8, 9]]), indices([[5, 5, 9, 4]]), indices([[7, 5, 20, 4]])
    seen = attend(queries * 0, np.ones_like(keys), positions, first, last, scale=1.0).denominator[0, :, 0]
    np.testing.assert_array_equal(seen, [3, 1, 1, 1])


def test_the_order_of_keys_does_not_matter():
    queries, keys = random_case(1, keys=16)
    positions = indices(np.tile(np.arange(16), (TILES, 1)))
    first, last = indices(np.full((TILES, ROWS), 2)), indices(np.full((TILES, ROWS), 12))
    order = np.random.default_rng(2).permutation(16)
    straight = attend(queries, keys, positions, first, last, scale=SCALE)
    shuffled = attend(queries, keys[:, order], positions[:, order], first, last, scale=SCALE)
    assert_close(shuffled, straight, 2e-6)


def test_padding_rows_and_absent_keys_see_nothing():
    """A padding row has last -1. Rows that see nothing give exact zeros, whatever finite keys and queries lie there."""
    queries, keys = random_case(3)
    padding = attend(
        queries,
        keys,
        indices(np.tile(np.arange(KEYS), (TILES, 1))),
        indices(np.full((TILES, ROWS), -KEYS)),
        indices(np.full((TILES, ROWS), -1)),
        scale=SCALE,
    )
    absent = attend(
        queries,
        keys,
        indices(np.full((TILES, KEYS), -1)),
        indices(np.full((TILES, ROWS), -KEYS)),
        indices(np.full((TILES, ROWS), KEYS)),
        scale=SCALE,
    )
    for partial in (padding, absent):
        assert not np.asarray(partial.accumulator).any()
        assert not np.asarray(partial.denominator).any()
        np.testing.assert_array_equal(partial.maximum, np.full((TILES, ROWS, HEADS), EMPTY_MAXIMUM, np.float32))


def test_a_row_is_independent_of_its_tile():
    """What other rows of the tile hold, NaN included, changes nothing in a row."""
    queries, keys = random_case(4)
    positions, last = indices(np.tile(np.arange(KEYS), (TILES, 1))), indices([[1, 4, 2], [0, 3, 4]])
    first = indices(np.zeros((TILES, ROWS)))
    whole = attend(queries, keys, positions, first, last, scale=SCALE)
    poisoned = queries.copy()
    poisoned[:, 1] = np.nan
    partial = attend(poisoned, keys, positions, first, last, scale=SCALE)
    for left, right in zip(whole, partial, strict=True):
        np.testing.assert_array_equal(np.asarray(left)[:, [0, 2]], np.asarray(right)[:, [0, 2]])


def test_large_scores_do_not_overflow():
    queries, keys = random_case(5)
    case = (queries * 3e3, keys, indices([[0, 1, 2, 3, 4]] * 2), indices([[0] * 3] * 2), indices([[4] * 3] * 2))
    actual, expected = attend(*case, scale=1.0), reference(*case, 1.0)
    assert max(np.abs(expected.maximum).ravel()) > 1e4
    np.testing.assert_allclose(actual.maximum, expected.maximum, rtol=1e-5)
    for leaf in actual:
        assert np.isfinite(leaf).all()


def test_bfloat16_keys_accumulate_in_float32():
    queries, keys = random_case(6, keys=64)
    case = (
        jnp.asarray(queries, jnp.bfloat16),
        jnp.asarray(keys, jnp.bfloat16),
        indices(np.tile(np.arange(64), (TILES, 1))),
        indices(np.zeros((TILES, ROWS))),
        indices(np.full((TILES, ROWS), 63)),
    )
    partial = attend(*case, scale=SCALE)
    assert {leaf.dtype for leaf in partial} == {jnp.dtype(jnp.float32)}
    expected = reference(*(np.asarray(item, np.float32) for item in case[:2]), *case[2:], SCALE)
    np.testing.assert_allclose(partial.maximum, expected.maximum, rtol=1e-5)
    np.testing.assert_allclose(partial.denominator, expected.denominator, rtol=1e-5)
    # Only the probabilities are rounded to bfloat16 before the value product.
    np.testing.assert_allclose(partial.accumulator, expected.accumulator, rtol=2e-2, atol=2e-2)


def test_eager_equals_compiled():
    queries, keys = random_case(7)
    case = (queries, keys, indices([[3, 1, -1, 0, 2]] * 2), indices([[0, 1, 2]] * 2), indices([[3, 2, 2]] * 2))
    eager = window_attention(*map(jnp.asarray, case), scale=SCALE, implementation="reference")
    assert_close(attend(*case, scale=SCALE), eager, 1e-6)


@pytest.mark.parametrize("argument", range(5))
def test_arguments_of_different_tiles_are_refused(argument):
    queries, keys = random_case(8)
    case = [queries, keys, indices([[0] * KEYS] * 2), indices([[0] * ROWS] * 2), indices([[0] * ROWS] * 2)]
    case = [jnp.asarray(item) for item in case]
    functools.partial(window_attention, scale=SCALE)(*case)
    case[argument] = case[argument][:1]
    with pytest.raises(Exception, match="tiles"):
        window_attention(*case, scale=SCALE)
