"""Index selection against golden candidate masks, and against sorting written out in NumPy.

Scores reach the op through two opposite one-dimensional index heads with weights +1 and -1: relu(s) - relu(-s) is
exactly s, so a test can prescribe every score, ties included.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import candidate_entries, index_scores, index_selection
from pallas_kernels.index_selection import candidate_blocks
from tests.golden import tensors

OPTIONS = ("top_k", "block_size", "publish_blocks", "implementation")
select = jax.jit(index_selection, static_argnames=OPTIONS)
member = jax.jit(candidate_entries, static_argnames=("block_size", "entries"))


def select_by_scores(scores, visible, **options):
    """Index selection of prescribed scores ``[queries entries]``; every query is a tile of its own."""
    scores = np.asarray(scores, np.float32)
    queries = np.tile(np.array([[1.0], [-1.0]], np.float32), (len(scores), 1, 1, 1))
    weights = np.tile(np.array([1.0, -1.0], np.float32), (len(scores), 1, 1))
    if options.get("candidates") is not None:
        options["candidates"] = np.asarray(options["candidates"], np.int32)[:, None]
    chosen = select(queries, weights, scores[:, :, None], np.asarray(visible, np.int32)[:, None], **options)
    return tuple(None if part is None else np.asarray(part)[:, 0] for part in chosen)


def expected_entries(scores, visible, top_k, eligible=None):
    """The best eligible entries of one query by (score descending, index ascending), in ascending order, then -1."""
    allowed = [entry for entry in range(min(visible, len(scores))) if eligible is None or eligible[entry]]
    best = sorted(allowed, key=lambda entry: (-scores[entry], entry))[:top_k]
    return sorted(best) + [-1] * (top_k - len(best))


def expected_blocks(scores, visible, block_size, blocks):
    """The best blocks of one query; the block of the newest visible entry beats all others."""
    values = {}
    for entry in range(min(visible, len(scores))):
        block = entry // block_size
        values[block] = max(values.get(block, -np.inf), scores[entry])
    if visible > 0:
        values[(visible - 1) // block_size] = np.inf
    best = sorted(values, key=lambda block: (-values[block], block))[:blocks]
    return sorted(best) + [-1] * (blocks - len(best))


def golden_case(kept, block_size):
    golden = tensors("units/units.safetensors")
    mask = golden[f"candidates.mask_top{kept}_block{block_size}"].astype(bool)
    visible = golden["candidates.compress_lens"]
    seen = np.arange(mask.shape[1])[None] < visible[:, None]
    # The newest block counts whole in the golden mask; only its visible entries matter.
    return golden["candidates.logits"], visible, mask & seen, seen


golden_masks = pytest.mark.parametrize(("kept", "block_size"), [(3, 4), (2, 8), (20, 4), (1, 16)])


@golden_masks
def test_golden_candidate_blocks(kept, block_size):
    logits, visible, mask, seen = golden_case(kept, block_size)
    _, blocks = select_by_scores(logits, visible, top_k=1, block_size=block_size, publish_blocks=kept)
    entries = member(blocks, block_size=block_size, entries=logits.shape[1])
    np.testing.assert_array_equal(np.asarray(entries) & seen, mask)
    np.testing.assert_array_equal((blocks >= 0).sum(axis=1), np.minimum(kept, -(-visible // block_size)))


@golden_masks
def test_golden_masks_bound_the_selection(kept, block_size):
    """Publishing and consuming in turn: with room for all, the selection is exactly the golden mask."""
    logits, visible, mask, _ = golden_case(kept, block_size)
    _, blocks = select_by_scores(logits, visible, top_k=1, block_size=block_size, publish_blocks=kept)
    everything, _ = select_by_scores(logits, visible, top_k=40, block_size=block_size, candidates=blocks)
    few, _ = select_by_scores(logits, visible, top_k=3, block_size=block_size, candidates=blocks)
    for query, allowed in enumerate(mask):
        assert list(everything[query][everything[query] >= 0]) == list(np.flatnonzero(allowed))
        assert list(few[query]) == expected_entries(logits[query], visible[query], 3, allowed)


score_lists = st.lists(st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0]), min_size=11, max_size=11)


@given(scores=st.lists(score_lists, min_size=3, max_size=3), visible=st.tuples(*[st.integers(0, 11)] * 3))
def test_ties_keep_the_lower_index(scores, visible):
    """Few distinct scores, zeros of both signs among them: nearly every boundary is a tie."""
    entries, blocks = select_by_scores(scores, visible, top_k=4, block_size=2, publish_blocks=3)
    for query in range(3):
        assert list(entries[query]) == expected_entries(scores[query], visible[query], 4)
        assert list(blocks[query]) == expected_blocks(scores[query], visible[query], 2, 3)


@given(
    scores=st.lists(score_lists, min_size=2, max_size=2),
    visible=st.tuples(*[st.integers(0, 11)] * 2),
    candidates=st.lists(
        st.lists(st.integers(-1, 3), min_size=3, max_size=3, unique_by=lambda block: object() if block < 0 else block),
        min_size=2,
        max_size=2,
    ),
)
def test_any_candidates_bound_the_selection(scores, visible, candidates):
    """Blocks of three entries, the last one cut short; unused places (-1) anywhere; blocks beyond what is visible."""
    entries, published = select_by_scores(scores, visible, top_k=4, block_size=3, candidates=candidates)
    assert published is None
    for query in range(2):
        allowed = [entry // 3 in candidates[query] for entry in range(11)]
        assert list(entries[query]) == expected_entries(scores[query], visible[query], 4, allowed)


@pytest.mark.parametrize("zeros", [[-0.0, 0.0, -0.0, 0.0], [0.0, -0.0, 0.0, -0.0], [-0.0, -0.0, 0.0, 0.0]])
def test_zeros_of_either_sign_are_equal(zeros):
    """Negative head weights times a rectified zero give -0, which no order may tell from 0."""
    scores = jnp.array([[*zeros, -5.0]])
    blocks = jax.jit(candidate_blocks, static_argnames=("block_size", "blocks"))
    np.testing.assert_array_equal(blocks(scores, jnp.array([5]), block_size=1, blocks=3), [[0, 1, 4]])
    # With one head the sign of the weight becomes the sign of the zero.
    query, weight, keys = jnp.ones((1, 1, 1, 1)), -jnp.ones((1, 1, 1)), jnp.array([[[1.0], [-0.0], [-3.0], [0.0]]])
    np.testing.assert_array_equal(select(query, weight, keys, jnp.array([[4]]), top_k=2).entries, [[[1, 2]]])


def test_nothing_visible_selects_nothing():
    scores = np.ones((2, 5))
    for visible in ([0, 0], [0, 3]):
        entries, blocks = select_by_scores(scores, visible, top_k=3, block_size=2, publish_blocks=2)
        np.testing.assert_array_equal(entries[0], [-1, -1, -1])
        np.testing.assert_array_equal(blocks[0], [-1, -1])


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_entries_than_top_k(count):
    """A short prompt has fewer entries than places, or none at all: the rest is -1, never a filler."""
    scores = np.arange(2 * count, dtype=np.float32).reshape(2, count) - 1
    entries, blocks = select_by_scores(scores, [count, count], top_k=4, block_size=2, publish_blocks=3)
    np.testing.assert_array_equal(entries, [[*range(count), *[-1] * (4 - count)]] * 2)
    used = -(-count // 2)
    np.testing.assert_array_equal(blocks, [[*range(used), *[-1] * (3 - used)]] * 2)


def test_fewer_candidates_than_top_k_leave_places_empty():
    """Golden README 5.2: entries outside the candidates never fill up."""
    entries, _ = select_by_scores([[9.0, 8, 7, 6, 5, 4, 3, 2]], [8], top_k=6, block_size=2, candidates=[[3, 1, -1]])
    np.testing.assert_array_equal(entries, [[2, 3, 6, 7, -1, -1]])


def test_the_newest_block_is_pinned_and_counts_as_one():
    scores = [[5.0, 5, 4, 4, 3, 3, -9]]
    _, blocks = select_by_scores(scores, [7], top_k=1, block_size=2, publish_blocks=2)
    np.testing.assert_array_equal(blocks, [[0, 3]])
    _, blocks = select_by_scores(scores, [5], top_k=1, block_size=2, publish_blocks=1)
    np.testing.assert_array_equal(blocks, [[2]])


def test_a_publishing_layer_is_not_restricted_by_what_it_publishes():
    scores = [[5.0, 4, 3, 2, 1, 0]]
    entries, blocks = select_by_scores(scores, [6], top_k=4, block_size=2, publish_blocks=2)
    np.testing.assert_array_equal(entries, [[0, 1, 2, 3]])
    np.testing.assert_array_equal(blocks, [[0, 2]])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_keys_beyond_the_visible_entries_may_hold_anything(poison):
    queries, weights, keys = random_case(0)
    visible = np.array([[0, 3, 5], [6, 2, 6]], np.int32)
    options = {"top_k": 4, "block_size": 2, "publish_blocks": 3}
    clean = select(queries, weights, keys, visible, **options)
    poisoned = keys.copy()
    poisoned[0, 5:] = poison
    poisoned[1, 6:] = poison
    for left, right in zip(select(queries, weights, poisoned, visible, **options), clean, strict=True):
        np.testing.assert_array_equal(left, right)


def test_padding_rows_do_not_touch_others():
    queries, weights, keys = random_case(1)
    visible = np.array([[4, 0, 7], [0, 0, 9]], np.int32)
    options = {"top_k": 4, "block_size": 2, "publish_blocks": 3}
    clean = select(queries, weights, keys, visible, **options)
    poisoned = queries.copy()
    poisoned[visible == 0] = np.nan
    for left, right in zip(select(poisoned, weights, keys, visible, **options), clean, strict=True):
        np.testing.assert_array_equal(left, right)
        assert (np.asarray(left)[visible == 0] == -1).all()


def test_scores_follow_the_definition():
    queries, weights, keys = random_case(2)
    expected = np.zeros((2, 3, 9))
    for tile, row, head, entry in np.ndindex(2, 3, 4, 9):
        dot = queries[tile, row, head].astype(np.float64) @ keys[tile, entry]
        expected[tile, row, entry] += max(dot, 0.0) * weights[tile, row, head]
    np.testing.assert_allclose(jax.jit(index_scores)(queries, weights, keys), expected, rtol=1e-5, atol=1e-5)


def test_selection_follows_the_scores():
    queries, weights, keys = random_case(3)
    visible = np.array([[9, 3, 5], [6, 1, 8]], np.int32)
    chosen = select(queries, weights, keys, visible, top_k=4, block_size=2, publish_blocks=3)
    scores = np.asarray(index_scores(*map(jnp.asarray, (queries, weights, keys))))
    for tile, row in np.ndindex(2, 3):
        case = scores[tile, row], visible[tile, row]
        assert list(chosen.entries[tile, row]) == expected_entries(*case, 4)
        assert list(chosen.candidates[tile, row]) == expected_blocks(*case, 2, 3)


def test_bfloat16_inputs_give_float32_scores():
    queries, weights, keys = (jnp.asarray(item, jnp.bfloat16) for item in random_case(4))
    scores = index_scores(queries, weights, keys)
    assert scores.dtype == jnp.float32
    exact = index_scores(*(item.astype(jnp.float32) for item in (queries, weights, keys)))
    np.testing.assert_allclose(scores, exact, rtol=1e-5, atol=1e-5)


def test_results_are_int32_and_eager_equals_compiled():
    queries, weights, keys = map(jnp.asarray, random_case(5))
    visible = jnp.array([[9, 0, 5], [6, 1, 8]], jnp.int32)
    options = {"top_k": 4, "block_size": 4, "publish_blocks": 2, "implementation": "reference"}
    eager, compiled = (function(queries, weights, keys, visible, **options) for function in (index_selection, select))
    for left, right in zip(eager, compiled, strict=True):
        assert left.dtype == jnp.int32
        np.testing.assert_array_equal(left, right)


def random_case(seed):
    """Two tiles of three queries with four heads, and nine entries."""
    random = np.random.default_rng(seed)
    shapes = (2, 3, 4, 8), (2, 3, 4), (2, 9, 8)
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)
