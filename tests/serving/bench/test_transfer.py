"""The parts that need two processes, with a small state: every kind of stream carries all of it."""

import dataclasses

from serving.bench.transfer import measure_transfer
from tests.serving.held_states import FORM


def test_every_stream_carries_the_state(tmp_path):
    rounds = []
    figures = measure_transfer(
        FORM, tokens=120, rounds=2, lanes=2, chunk_bytes=1 << 16, shared=tmp_path, progress=lambda: rounds.append(1)
    )
    assert len(rounds) == figures.rounds == 2
    assert all(value > 0 for value in dataclasses.asdict(figures).values())
    assert list(tmp_path.iterdir()) == []
