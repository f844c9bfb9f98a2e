"""Packing chunks into a step: which rows they take, what stands in the rows, and what does not fit."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.errors import InputError
from deepinfer_jax.runtime.batch import PADDING_POSITION, Chunk, StepShape, pack

SHAPE = StepShape(decode_rows=2, prefill_tiles=3, tile_rows=4)
FIELDS = ("tokens", "slots", "positions", "floors", "held", "image", "image_embeddings")


def chunk(slot, start, count, **fields):
    """Tokens that name slot and position."""
    return Chunk(slot, start, [100 * slot + start + offset for offset in range(count)], **fields)


def refusal(chunks, shape):
    with pytest.raises(InputError) as refused:
        pack(chunks, shape)
    return str(refused.value)


@pytest.mark.parametrize(
    ("shape", "rows", "tiles"),
    [
        (StepShape(4), 4, ((4, 1),)),
        (StepShape(0, 3, 16), 48, ((3, 16),)),
        (StepShape(2, 3, 4), 14, ((2, 1), (3, 4))),
        (StepShape(2, 0, 16), 2, ((2, 1),)),
        (StepShape(0), 0, ()),
    ],
)
def test_a_shape_counts_its_rows_and_names_its_tile_groups(shape, rows, tiles):
    assert (shape.rows, shape.tiles) == (rows, tiles)


@pytest.mark.parametrize(
    ("chunks", "starts"),
    [
        ([], []),
        ([chunk(0, 9, 1)], [0]),
        ([chunk(0, 0, 2)], [2]),
        ([chunk(0, 9, 1), chunk(1, 3, 1)], [0, 1]),
        ([chunk(0, 9, 1), chunk(1, 3, 1), chunk(2, 5, 1)], [0, 1, 2]),
        ([chunk(0, 0, 5), chunk(1, 7, 1), chunk(2, 0, 4)], [2, 0, 10]),
        ([chunk(0, 0, 12)], [2]),
        ([chunk(0, 0, 4), chunk(1, 0, 5)], [2, 6]),
    ],
    ids=[
        "nothing",
        "one decode row",
        "one tile",
        "two decode rows",
        "a third single token takes a tile",
        "decode rows between tiles",
        "all tiles",
        "a second request starts a tile",
    ],
)
def test_places(chunks, starts):
    """Single tokens take decode rows while there are any; everything else starts at a tile of its own."""
    batch, got, _ = pack(chunks, SHAPE)
    assert got == starts
    for item, start in zip(chunks, starts, strict=True):
        span = slice(start, start + len(item.tokens))
        np.testing.assert_array_equal(batch.tokens[span], item.tokens)
        np.testing.assert_array_equal(batch.slots[span], [item.slot] * len(item.tokens))
        np.testing.assert_array_equal(batch.positions[span], np.arange(len(item.tokens)) + item.start)
    assert (batch.positions != PADDING_POSITION).sum() == sum(len(item.tokens) for item in chunks)


def test_padding_rows_are_zero_at_position_minus_one():
    batch, *_ = pack([chunk(2, 5, 2, floor=3)], SHAPE)
    padding = np.ones(SHAPE.rows, bool)
    padding[2:4] = False
    for name in FIELDS[:-1]:
        expected = PADDING_POSITION if name == "positions" else 0
        np.testing.assert_array_equal(getattr(batch, name)[padding], np.full(12, expected), name)
    assert batch.image_embeddings is None
    assert batch.tiles == SHAPE.tiles


def test_floors_and_image_types_are_those_of_the_chunks():
    image = np.array([True, False, True])
    batch, *_ = pack([chunk(0, 4, 3, floor=2, image=image), chunk(1, 8, 1, floor=7), chunk(2, 0, 1)], SHAPE)
    np.testing.assert_array_equal(batch.floors, [7, 0, 2, 2, 2, *[0] * 9])
    np.testing.assert_array_equal(np.flatnonzero(batch.image), [2, 4])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_image_embeddings_stand_at_the_rows_of_their_chunk(dtype):
    """Chunks without embeddings leave zeros; the dtype is the embeddings' own."""
    embeddings = np.arange(6, dtype=dtype).reshape(3, 2) + 1
    batch, starts, _ = pack(
        [chunk(0, 0, 4), chunk(1, 0, 3, image=np.ones(3, bool), image_embeddings=embeddings)],
        SHAPE,
    )
    expected = np.zeros((SHAPE.rows, 2), dtype)
    expected[starts[1] : starts[1] + 3] = embeddings
    assert batch.image_embeddings.dtype == dtype
    np.testing.assert_array_equal(batch.image_embeddings, expected)


@pytest.mark.parametrize("tokens", [[3, 4], (3, 4), range(3, 5)], ids=["list", "tuple", "range"])
def test_tokens_of_any_sequence_become_int32(tokens):
    batch, *_ = pack([Chunk(1, 0, tokens)], SHAPE)
    np.testing.assert_array_equal(batch.tokens[2:4], [3, 4])
    for name in ("tokens", "slots", "positions", "floors"):
        assert getattr(batch, name).dtype == np.int32
    assert batch.image.dtype == np.bool_


@pytest.mark.parametrize(
    ("chunks", "shape"),
    [
        ([chunk(slot, 0, 1) for slot in range(3)], StepShape(2)),
        ([chunk(0, 0, 2)], StepShape(8)),
        ([chunk(0, 0, 13)], SHAPE),
        ([chunk(0, 0, 5), chunk(1, 0, 5)], SHAPE),
        ([chunk(slot, 0, 1) for slot in range(6)], SHAPE),
        ([chunk(0, 0, 1)], StepShape(0)),
        ([chunk(0, 0, 2)], StepShape(2, 0, 16)),
    ],
    ids=[
        "too many single tokens",
        "two tokens without tiles",
        "too long for all tiles",
        "two chunks of two tiles in three",
        "single tokens beyond the tiles",
        "nothing fits an empty shape",
        "no tile of the given size",
    ],
)
def test_what_does_not_fit_is_refused(chunks, shape):
    expected = f"input 'step' is '{len(chunks)} chunks'; accepted: what fits {shape} (split or postpone chunks)"
    assert refusal(chunks, shape) == expected


def test_every_call_returns_fresh_arrays():
    """A dispatched step may still read its host arrays, so no call may hand out or write an earlier call's."""
    embeddings = np.ones((2, 3), np.float32)
    given = [chunk(0, 0, 2, image=np.ones(2, bool), image_embeddings=embeddings)]
    first, *_ = pack(given, SHAPE)
    kept = {name: getattr(first, name).copy() for name in FIELDS}
    second, *_ = pack(given, SHAPE)
    for name in FIELDS:
        assert not np.shares_memory(getattr(first, name), getattr(second, name)), name
        getattr(second, name)[:] = 1
        np.testing.assert_array_equal(getattr(first, name), kept[name], name)
    assert not np.shares_memory(first.image_embeddings, embeddings)


def test_rows_of_a_batch():
    """The model's view: the same fields as device arrays, and where each request begins and ends."""
    image = np.array([False, True, True, False, False])
    embeddings = np.arange(10, dtype=np.float32).reshape(5, 2)
    chunks = [chunk(1, 6, 5, floor=2, image=image, image_embeddings=embeddings), chunk(0, 3, 1)]
    batch, *_ = pack(chunks, SHAPE)
    rows = batch.to_rows()
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(rows, name), getattr(batch, name), name)
    assert rows.tiles == SHAPE.tiles
    np.testing.assert_array_equal(rows.first_row[2:7], [2] * 5)
    np.testing.assert_array_equal(rows.last_row[2:7], [6] * 5)
    assert (int(rows.first_row[0]), int(rows.last_row[0])) == (0, 0)
    assert pack([chunk(0, 3, 1)], SHAPE)[0].to_rows().image_embeddings is None
    assert rows.tokens.dtype == jnp.int32


@given(counts=st.lists(st.integers(1, 9), max_size=6))
def test_chunks_never_share_a_tile(counts):
    """Whatever fits: every token has one row, every tile and every decode row belongs to one chunk."""
    chunks = [chunk(slot, 3 * slot, count) for slot, count in enumerate(counts)]
    singles = sum(count == 1 for count in counts)
    tiles = sum(-(-count // SHAPE.tile_rows) for count in counts) - min(singles, SHAPE.decode_rows)
    if tiles > SHAPE.prefill_tiles:
        assert "what fits" in refusal(chunks, SHAPE)
        return
    batch, starts, _ = pack(chunks, SHAPE)
    owners = np.full(SHAPE.rows, -1)
    for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
        assert (owners[start : start + count] == -1).all()
        owners[start : start + count] = number
    np.testing.assert_array_equal(owners >= 0, batch.positions >= 0)
    for tile in owners[SHAPE.decode_rows :].reshape(SHAPE.prefill_tiles, SHAPE.tile_rows):
        assert len(set(tile.tolist()) - {-1}) <= 1
