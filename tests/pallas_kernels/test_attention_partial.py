"""Merging partial attention: any split of the keys gives the attention over their union, with one sink."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import EMPTY_MAXIMUM, AttentionPartial, merge_partials, sparse_attention, window_attention

merge = jax.jit(merge_partials)
ROWS, HEADS, HEAD_DIM = 3, 2, 4


def partial_over(scores, values):
    """The partial result over keys with given scores ``[rows heads keys]``, float32 from a float64 computation."""
    if scores.shape[-1] == 0:
        return empty_partial(*scores.shape[:-1], values.shape[-1])
    maximum = scores.max(axis=-1)
    weights = np.exp(scores - maximum[..., None])
    leaves = (weights @ values, maximum, weights.sum(axis=-1))
    return AttentionPartial(*(leaf.astype(np.float32) for leaf in leaves))


def empty_partial(rows, heads, head_dim):
    zeros = np.zeros((rows, heads), np.float32)
    return AttentionPartial(np.zeros((rows, heads, head_dim), np.float32), zeros + np.float32(EMPTY_MAXIMUM), zeros)


def reference(scores, values, sink):
    """Softmax over the keys and the sink, which has the value zero; float64."""
    logits = np.concatenate([scores, np.broadcast_to(sink[None, :, None], (*scores.shape[:-1], 1))], axis=-1)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True))[..., :-1] @ values


def random_case(seed, keys, spread=2.0):
    random = np.random.default_rng(seed)
    return (
        random.standard_normal((ROWS, HEADS, keys)) * spread,
        random.standard_normal((keys, HEAD_DIM)),
        random.standard_normal(HEADS).astype(np.float32),
    )


@given(
    seed=st.integers(0, 2**32 - 1),
    cuts=st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted),
    spread=st.sampled_from([0.01, 2.0, 60.0]),
)
def test_three_parts_equal_the_whole(seed, cuts, spread):
    """Parts may be empty, and any of them may hold the largest score."""
    scores, values, sink = random_case(seed, 9, spread)
    bounds = [0, *cuts, 9]
    parts = tuple(partial_over(scores[..., a:b], values[a:b]) for a, b in itertools.pairwise(bounds))
    np.testing.assert_allclose(merge(parts, sink), reference(scores, values, sink), rtol=2e-5, atol=2e-6)


def test_the_order_of_parts_does_not_matter():
    scores, values, sink = random_case(0, 9)
    parts = [partial_over(scores[..., a:b], values[a:b]) for a, b in ((0, 2), (2, 7), (7, 9))]
    results = [merge(tuple(order), sink) for order in itertools.permutations(parts)]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-6, atol=1e-7)


def test_rows_without_keys_are_exactly_zero():
    parts = (empty_partial(ROWS, HEADS, HEAD_DIM),) * 2
    for sink in (0.0, -80.0, 80.0):
        merged = np.asarray(merge(parts, np.full(HEADS, sink, np.float32)))
        np.testing.assert_array_equal(merged, np.zeros_like(merged))


def test_an_empty_part_changes_nothing():
    scores, values, sink = random_case(1, 5)
    part, empty = partial_over(scores, values), empty_partial(ROWS, HEADS, HEAD_DIM)
    alone = merge((part,), sink)
    np.testing.assert_array_equal(merge((part, empty), sink), alone)
    np.testing.assert_array_equal(merge((empty, part), sink), alone)


def test_the_sink_is_counted_once_and_per_head():
    """Two keys of score 0 and value 1 in two parts; a sink logit s leaves 2 / (2 + e^s)."""
    part = AttentionPartial(*(np.float32(leaf) for leaf in (np.ones((1, 3, 1)), np.zeros((1, 3)), np.ones((1, 3)))))
    sink = np.array([-np.inf, 0.0, np.log(6.0)], np.float32)
    np.testing.assert_allclose(merge((part, part), sink)[0, :, 0], [1.0, 2 / 3, 1 / 4], rtol=1e-6)


def test_a_large_sink_does_not_overflow():
    scores, values, _ = random_case(2, 5)
    sink = np.array([500.0, -500.0], np.float32)
    merged = merge((partial_over(scores, values),), sink)
    np.testing.assert_allclose(merged, reference(scores, values, sink), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [(2, 3), (6,)])
def test_leading_axes_are_free(batch):
    scores, values, sink = random_case(3, 5)
    part = partial_over(np.concatenate([scores, scores]), values)
    shaped = AttentionPartial(*(leaf.reshape(*batch, *leaf.shape[1:]) for leaf in part))
    np.testing.assert_array_equal(merge((shaped,), sink), merge((part,), sink).reshape(*batch, HEADS, HEAD_DIM))


def test_gradients_are_those_of_the_definition():
    """Training differentiates through both ops and the merge; a row that sees nothing must give zero, not NaN."""
    random = np.random.default_rng(4)
    arguments = tuple(random.standard_normal(shape) for shape in ((4, 2, 8), (6, 8), 2))
    first, last = np.array([[0, 0, 2, 0]]), np.array([[3, -1, 5, -1]])
    indices = np.array([[0, 5, -1], [3, -1, -1], [-1, -1, -1], [-1, -1, -1]])

    def loss(queries, keys, sink):
        ranges = jnp.arange(6)[None], jnp.asarray(first), jnp.asarray(last)
        window = window_attention(queries[None], keys[None], *ranges, scale=0.5)
        sparse = sparse_attention(queries, keys, jnp.asarray(indices), scale=0.5)
        return jnp.square(merge_partials((AttentionPartial(*(leaf[0] for leaf in window)), sparse), sink)).sum()

    def loss_by_definition(queries, keys, sink):
        total = 0.0
        for row in range(4):
            seen = keys[[*range(first[0, row], last[0, row] + 1), *indices[row][indices[row] >= 0]]]
            total += (reference((queries[row] @ seen.T)[None] * 0.5, seen, sink) ** 2).sum()
        return total

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*(jnp.asarray(item, jnp.float32) for item in arguments))
    for place, gradient in enumerate(gradients):
        expected = central_differences(loss_by_definition, arguments, place)
        assert np.abs(expected).max() > 0.05
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(gradients[0][3], np.zeros((2, 8)))


def central_differences(function, arguments, place, step=1e-5):
    """The gradient of a scalar float64 function with respect to one of its arguments, value by value."""
    gradient = np.zeros_like(arguments[place])
    for index in np.ndindex(gradient.shape):
        ends = []
        for sign in (1.0, -1.0):
            moved = arguments[place].copy()
            moved[index] += sign * step
            ends.append(function(*arguments[:place], moved, *arguments[place + 1 :]))
        gradient[index] = (ends[0] - ends[1]) / (2 * step)
    return gradient
