"""The shape of a step: the smallest of a ladder that all chunks of all shards fit. No model runs."""

import numpy as np
import pytest

from deepinfer_jax.assembly import choose_shape
from deepinfer_jax.replay import Replay
from deepinfer_jax.runtime.batch import Chunk, StepShape, pack
from deepinfer_jax.settings import EngineSettings

LADDER = EngineSettings(slots=4, decode_rows=(1, 4), prefill_tiles=(1, 3), block_tokens=16).shapes()
ONE, FOUR, SHORT, LONG = LADDER
ALONE = EngineSettings(slots=1, decode_rows=(1,), prefill_tiles=(1,), block_tokens=16).shapes()


def chunk(slot=0, count=1, image=False, **fields):
    if image:
        fields |= {"image": np.ones(count, bool), "image_embeddings": np.zeros((count, 8), np.float32)}
    return Chunk(slot, 0, [5] * count, **fields)


@pytest.mark.parametrize(
    ("chunks", "shape"),
    [
        ([], ONE),
        ([chunk()], ONE),
        ([chunk(), chunk(1)], FOUR),
        ([chunk(0, 16)], SHORT),
        ([chunk(0, 16), *map(chunk, range(1, 4))], SHORT),
        ([chunk(0, 17)], LONG),
        ([chunk(0, 2), chunk(1, 2)], LONG),
        ([chunk(0, 48)], LONG),
    ],
)
def test_the_smallest_that_fits(chunks, shape):
    assert choose_shape([chunks], LADDER) == shape
    assert choose_shape([[], chunks, []], LADDER) == shape


def test_the_shard_that_needs_most_decides():
    assert choose_shape([[chunk()], [chunk(0, 3)], []], LADDER) == SHORT


def test_a_single_image_token_needs_a_step_that_takes_embeddings():
    """The end of a prompt, alone behind a tile or a hit, may be part of an image."""
    assert choose_shape([[chunk(image=True)]], LADDER) == SHORT
    assert choose_shape([[chunk(0, image=True), chunk(1), chunk(2), chunk(3)]], LADDER) == SHORT
    packed = pack([chunk(image=True)], SHORT, embedded=8)
    assert packed.starts == [0]
    assert packed.batch.image_embeddings.shape == (SHORT.rows, 8)


def test_a_prefill_step_without_decode_rows_runs_single_tokens_in_a_tile():
    decode, prefill = ALONE
    assert (decode, prefill) == (StepShape(1), StepShape(0, 1, 16))
    assert choose_shape([[chunk()]], ALONE) == decode
    assert choose_shape([[chunk(image=True)]], ALONE) == prefill
    packed = pack([chunk(image=True)], prefill, embedded=8)
    assert (packed.starts, packed.ends) == ([0], [0])


def test_kept_tiles_are_counted_too():
    settings = EngineSettings(slots=4, decode_rows=(4,), prefill_tiles=(2,), block_tokens=16)
    ladder = EngineSettings(
        slots=4, decode_rows=(4,), prefill_tiles=(2,), block_tokens=16, replay=Replay("exact", "compact")
    ).shapes()
    assert [shape.kept_tiles for shape in ladder] == [0, 0, 1, 2]
    assert [choose_shape([[chunk(0, 32, decoder_floor=floor)]], ladder).kept_tiles for floor in (32, 20, 0)] == [
        0,
        1,
        2,
    ]
    assert settings.shapes()[-1].kept_tiles is None


def test_more_than_any_step_holds_is_a_mistake_of_the_scheduler():
    for chunks in ([chunk(0, 49)], [*map(chunk, range(5)), chunk(5, 48)]):
        with pytest.raises(AssertionError, match="more than any step holds"):
            choose_shape([chunks], LADDER)
