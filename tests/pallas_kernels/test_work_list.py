"""Work lists: every chunk of every tile comes up once, each lane has its share, and runs are told apart."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.work_list import WorkList

TILES = 4


@jax.jit
def turn_of_three(chunks, turn):
    work = WorkList.of(chunks, 3)
    return work.share, work.runs, work.at(turn), work.runs_of_tiles()


@jax.jit
def turn_of_one(chunks, turn):
    work = WorkList.of(chunks, 1)
    return work.share, work.runs, work.at(turn), work.runs_of_tiles()


@pytest.mark.parametrize(("lanes", "look"), [(3, turn_of_three), (1, turn_of_one)])
@given(chunks=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 20)), min_size=TILES, max_size=TILES))
def test_every_chunk_comes_up_once_in_a_run_of_its_tile(lanes, look, chunks):
    """Within a run chunks ascend, and along a tile's runs too; the runs of a tile are those that it names."""
    chunks = np.array(chunks, np.int32)
    share, runs, _, (first, further) = look(chunks, 0)
    assert share == max(1, -(-chunks.sum() // lanes))
    seen = {}
    for turn in range(int(share)):
        _, _, place, _ = look(chunks, turn)
        live = [tuple(map(int, item)) for item in zip(*place, strict=True) if item[2] < runs]
        assert len({run for _, _, run in live}) == len(live)
        for tile, chunk, run in live:
            seen.setdefault((tile, run), []).append(chunk)
    for tile, count in enumerate(chunks):
        own = [seen.pop((tile, run), []) for run in range(int(first[tile]), int(first[tile] + further[tile]) + 1)]
        assert [chunk for run in own for chunk in run] == list(range(count))
        assert all(own) or count == 0
    assert not seen


def test_runs_are_told_apart_where_a_tile_is_empty():
    """An empty tile has a run that nothing was put in, even behind a list that fills every lane."""
    chunks = np.array([6, 0, 3, 0], np.int32)
    share, runs, _, (first, further) = turn_of_three(chunks, 0)
    used = {int(run) for turn in range(int(share)) for run in turn_of_three(chunks, turn)[2].run}
    assert not used & {int(first[1]), int(first[3])}
    assert further[1] == further[3] == 0
    assert max(first) < runs


def test_a_long_tile_is_shared_by_all_lanes():
    share, _, _, (first, further) = turn_of_three(np.array([1, 97, 1, 1], np.int32), 0)
    assert share == 34
    assert list(further) == [0, 2, 0, 0]
    assert list(first) == [0, 1, 4, 5]
