"""Paged index selection against :func:`pallas_kernels.index_selection` over the same keys in one piece.

Small whole numbers make every score exact and most of them ties. Blocks are scattered over a pool in which everything
that no query sees is NaN. Chunks are of 8 entries, so that a context has up to six.
"""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import CachedRows, IndexPages, gather_rows, index_selection, paged_index_selection

# The package exports the op under its module's name.
MODULE = importlib.import_module("pallas_kernels.paged_index_selection")
CHUNK, BLOCK_ENTRIES, BLOCKS = 8, 4, 12
ENTRIES = BLOCK_ENTRIES * BLOCKS
TOP_K, BLOCK_SIZE, KEPT = 5, 2, 6
HEADS, DIM = 2, 4
NUMBERS = ("top_k", "block_size", "publish_blocks")
# Nothing, a single entry, both sides of chunk and block borders, everything.
LENGTHS = st.one_of(st.sampled_from([0, 1, 2, 7, 8, 9, 16, 17, 47, 48]), st.integers(0, ENTRIES))

# Tiles, rows of a tile, and rows that are scored side by side: a lane for each tile, several tiles to a lane, one lane.
every_shape = pytest.mark.parametrize("shape", [(5, 1, 8), (5, 1, 2), (3, 3, 1)], ids=["rows", "shared lanes", "tiles"])
whole = jax.jit(index_selection, static_argnames=NUMBERS)


@functools.cache
def paged(lane_rows, chunk=CHUNK):
    """The compiled op with small chunks."""

    @functools.partial(jax.jit, static_argnames=("block_entries", *NUMBERS))
    def select(queries, weights, pool, first_rows, visible, *, block_entries=BLOCK_ENTRIES, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MODULE, "CHUNK_ENTRIES", chunk)
            patch.setattr(MODULE, "LANE_ROWS", lane_rows)
            pages = IndexPages(pool, first_rows, block_entries)
            return paged_index_selection(queries, weights, pages, visible, **options)

    return select


def case(seed, visible, dim=DIM):
    """Queries, weights, a pool, its block table, and the keys in one piece; NaN is what no row of a tile sees."""
    random = np.random.default_rng(seed)
    tiles, rows = visible.shape
    queries = random.integers(-2, 3, (tiles, rows, HEADS, dim)).astype(np.float32)
    weights = random.integers(-1, 3, (tiles, rows, HEADS)).astype(np.float32)
    keys = random.integers(-1, 2, (tiles, ENTRIES, dim)).astype(np.float32)
    keys[np.arange(ENTRIES)[None] >= visible.max(axis=1)[:, None]] = np.nan
    first_rows = (random.permutation(tiles * BLOCKS + 3)[: tiles * BLOCKS] * BLOCK_ENTRIES).reshape(tiles, BLOCKS)
    pool = np.full(((tiles * BLOCKS + 3) * BLOCK_ENTRIES, dim), np.nan, np.float32)
    pool[first_rows[..., None] + np.arange(BLOCK_ENTRIES)] = keys.reshape(tiles, BLOCKS, BLOCK_ENTRIES, dim)
    return queries, weights, pool, first_rows.astype(np.int32), keys


def assert_same(got, want):
    for left, right in zip(got, want, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            assert left.dtype == jnp.int32
            np.testing.assert_array_equal(left, right)


def visible_of(data, shape):
    tiles, rows, _ = shape
    visible = data.draw(st.lists(st.lists(LENGTHS, min_size=rows, max_size=rows), min_size=tiles, max_size=tiles))
    return np.array(visible, np.int32)


@every_shape
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_plain_and_publishing_selections_are_those_over_whole_contexts(shape, data, seed):
    """Entries and candidate blocks, ties and the pinned newest block included."""
    visible = visible_of(data, shape)
    queries, weights, pool, first_rows, keys = case(seed, visible)
    options = {"top_k": TOP_K, "block_size": BLOCK_SIZE, "publish_blocks": KEPT}
    got = paged(shape[2])(queries, weights, pool, first_rows, visible, **options)
    assert_same(got, whole(queries, weights, keys, visible, **options))


@every_shape
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_selections_inside_candidates_are_those_over_whole_contexts(shape, data, seed):
    """With candidates from another layer's scores; more of them than a chunk holds."""
    visible = visible_of(data, shape)
    queries, weights, pool, first_rows, keys = case(seed, visible)
    publishing = {"top_k": 1, "block_size": BLOCK_SIZE, "publish_blocks": KEPT}
    _, candidates = whole(-queries, weights, keys, visible, **publishing)
    options = {"top_k": TOP_K, "block_size": BLOCK_SIZE, "candidates": candidates}
    got = paged(shape[2])(queries, weights, pool, first_rows, visible, **options)
    assert_same(got, whole(queries, weights, keys, visible, **options))


@pytest.mark.parametrize("rows", [1, 3])
def test_keys_outside_of_the_candidates(rows):
    """A row of its own reads the keys of its candidate blocks alone: the others are NaN, and no selection notices."""
    visible = np.array([[48] * rows, [31] * rows], np.int32)
    queries, weights, pool, first_rows, keys = case(1, visible)
    candidates = np.full((2, rows, KEPT), -1, np.int32)
    candidates[0], candidates[1, :, :2] = [0, 3, 4, 11, 12, 23], [2, 15]
    options = {"top_k": TOP_K, "block_size": BLOCK_SIZE, "candidates": candidates}
    want = whole(queries, weights, keys, visible, **options)
    for tile, kept in enumerate(candidates[:, 0]):
        outside = ~np.isin(np.arange(ENTRIES) // BLOCK_SIZE, kept)
        entries = np.flatnonzero(outside)
        pool[first_rows[tile, entries // BLOCK_ENTRIES] + entries % BLOCK_ENTRIES] = np.nan
    assert_same(paged(2)(queries, weights, pool, first_rows, visible, **options), want)
    assert (np.asarray(want.entries)[1, :, 4] == -1).all()


@pytest.mark.parametrize("publish", [0, KEPT])
@pytest.mark.parametrize("form", ["bfloat16", "bits", "packed"])
def test_every_form_of_the_pool(form, publish):
    visible = np.array([[48], [0], [9], [31], [17]], np.int32)
    queries, weights, pool, first_rows, _ = case(2, visible, dim=32)
    stored = jnp.asarray(pool, jnp.bfloat16)
    if form == "bits":
        stored = jax.lax.bitcast_convert_type(stored, jnp.uint16)
    if form == "packed":
        stored = CachedRows.pack(jnp.asarray(np.nan_to_num(pool, nan=6.0)), "fp4_32")
    queries, weights = jnp.asarray(queries, jnp.bfloat16), jnp.asarray(weights, jnp.bfloat16)
    rows = (first_rows[..., None] + np.arange(BLOCK_ENTRIES)).reshape(5, ENTRIES)
    keys = gather_rows(stored, jnp.asarray(rows), jnp.bfloat16)
    assert keys.dtype == jnp.bfloat16
    options = {"top_k": TOP_K, "block_size": BLOCK_SIZE, "publish_blocks": publish}
    got = paged(8)(queries, weights, stored, first_rows, visible, **options)
    assert_same(got, whole(queries, weights, keys, visible, **options))


@pytest.mark.parametrize(("chunk", "block_size"), [(5, 2), (1, 2), (7, 0), (9, 3)])
def test_chunks_hold_whole_candidate_blocks(chunk, block_size):
    """Whatever the wanted size, a chunk is a multiple of the block size and at least one block."""
    visible = np.array([[48], [0], [9], [31], [17]], np.int32)
    queries, weights, pool, first_rows, keys = case(3, visible)
    options = {"top_k": TOP_K, "block_size": block_size, "publish_blocks": KEPT if block_size else 0}
    got = paged(8, chunk)(queries, weights, pool, first_rows, visible, **options)
    assert_same(got, whole(queries, weights, keys, visible, **options))


def test_a_context_of_one_chunk_is_taken_whole():
    """No loop where the pages hold no more than a chunk."""
    visible = np.array([[48], [0], [9], [31], [17]], np.int32)
    queries, weights, pool, first_rows, keys = case(4, visible)
    options = {"top_k": TOP_K, "block_size": BLOCK_SIZE, "publish_blocks": KEPT}
    for chunk, loops in ((ENTRIES, False), (ENTRIES - 2, True)):
        select = functools.partial(paged(8, chunk), **options)
        assert_same(
            select(queries, weights, pool, first_rows, visible), whole(queries, weights, keys, visible, **options)
        )
        jaxpr = jax.make_jaxpr(select)(queries, weights, pool, first_rows, visible)
        assert ("while[" in str(jaxpr)) == loops


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("inside", [False, True], ids=["publishing", "inside"])
def test_no_array_grows_with_the_longest_context(rows, inside):
    """Apart from the block tables themselves, tables of 12 and of 120 blocks make the same arrays."""
    visible = np.full((2, rows), 48, np.int32)
    queries, weights, pool, first_rows, _ = case(5, visible)
    options = {"top_k": TOP_K, "block_size": BLOCK_SIZE, "publish_blocks": 0 if inside else KEPT}
    candidates = {"candidates": np.zeros((2, rows, KEPT), np.int32)} if inside else {}
    found = []
    for width in (BLOCKS, 10 * BLOCKS):
        table = np.resize(first_rows, (2, width))
        select = functools.partial(paged(2), **options)
        jaxpr = jax.make_jaxpr(select)(queries, weights, pool, table, visible, **candidates)
        found.append(sorted(shape for shape in shapes(jaxpr.jaxpr) if shape != table.shape))
    assert found[0] == found[1]
    assert any(CHUNK in shape for shape in found[0])


def shapes(jaxpr):
    """Shapes of everything that a program computes, inner programs included."""
    for equation in jaxpr.eqns:
        yield from (value.aval.shape for value in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda item: hasattr(item, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from shapes(inner)
