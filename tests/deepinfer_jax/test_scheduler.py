"""The planner: room is respected, nobody starves, and requests go where they weigh least."""

import dataclasses

import hypothesis.strategies as st
from hypothesis import given

from deepinfer_jax.scheduler import (
    PATIENCE,
    Admission,
    Piece,
    Room,
    Running,
    Shard,
    Waiting,
    admit,
    place,
    plan_step,
    victim,
)

ROOM = Room(decode_rows=3, tiles=2, tile_rows=8)
RUNNING = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 30), st.integers(0, 5), st.integers(0, 1)),
    max_size=8,
).map(
    lambda items: [
        Running(number, shard, start, start + more, served, priority)
        for number, (shard, start, more, served, priority) in enumerate(items)
    ]
)


@given(RUNNING)
def test_a_step_has_room_for_its_pieces(running):
    pieces = plan_step(running, ROOM)
    by_id = {request.id: request for request in running}
    assert len({piece.id for piece in pieces}) == len(pieces)
    for shard in (0, 1):
        here = [piece for piece in pieces if by_id[piece.id].shard == shard]
        decodes = [piece for piece in here if by_id[piece.id].decodes]
        tiles = sum(-(-piece.count // ROOM.tile_rows) for piece in here if not by_id[piece.id].decodes)
        assert len(decodes) <= ROOM.decode_rows
        assert tiles <= ROOM.tiles
        waiting = [request for request in running if request.shard == shard and request.length > request.start]
        assert len(decodes) == min(ROOM.decode_rows, sum(request.decodes for request in waiting))
        wanted = sum(-(-(r.length - r.start) // ROOM.tile_rows) for r in waiting if not r.decodes)
        assert tiles == min(ROOM.tiles, wanted)
    for piece in pieces:
        assert piece.start == by_id[piece.id].start
        assert 1 <= piece.count <= by_id[piece.id].length - piece.start


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(0, 6))
def test_nobody_starves(prompts, decoding):
    """Every prompt is through, and every decoding request served, within the steps that fair turns need."""
    requests = {number: Running(number, 0, 0, length + 1, 0) for number, length in enumerate(prompts)}
    requests |= {100 + number: Running(100 + number, 0, 50, 51, 0) for number in range(decoding)}
    last_served = dict.fromkeys(requests, 0)
    tiles = sum(-(-(length + 1) // ROOM.tile_rows) for length in prompts)
    for step in range(1, tiles + len(prompts) + 2):
        for piece in plan_step(list(requests.values()), ROOM):
            request = requests[piece.id]
            last_served[piece.id] = step
            length = request.length + 1 if request.decodes else request.length
            requests[piece.id] = dataclasses.replace(
                request, start=piece.start + piece.count, length=length, served=step
            )
        for number in range(decoding):
            assert step - last_served[100 + number] <= -(-(decoding + len(prompts)) // ROOM.decode_rows) + 1
    assert all(requests[number].length - requests[number].start <= 1 for number in range(len(prompts)))


def test_a_long_prompt_shares_the_tiles_with_a_short_one():
    long, short = Running(0, 0, 0, 1000, 0), Running(1, 0, 0, 6, 0)
    assert plan_step([long, short], ROOM) == [Piece(0, 0, 8), Piece(1, 0, 6)]
    assert plan_step([long], ROOM) == [Piece(0, 0, 16)]


def test_higher_priority_comes_first():
    low, high = Running(0, 0, 0, 100, 0), Running(1, 0, 0, 100, 3, priority=1)
    assert plan_step([low, high], Room(3, 1, 8)) == [Piece(1, 0, 8)]


def shards(*items):
    return {number: Shard(*item) for number, item in enumerate(items)}


def test_one_that_does_not_fit_lets_later_ones_pass_until_its_patience_ends():
    large, small = Waiting(0, blocks=9, tokens=90, arrival=0), Waiting(1, blocks=1, tokens=9, arrival=1)
    spare = shards((2, 5, 0, 0))
    assert admit([large, small], spare) == [Admission(1, 0)]
    assert admit([dataclasses.replace(large, passed=PATIENCE), small], spare) == []


def test_admissions_use_up_slots_and_blocks():
    waiting = [Waiting(number, blocks=2, tokens=20, arrival=number) for number in range(5)]
    assert admit(waiting, shards((2, 9, 0, 0), (9, 3, 0, 0))) == [Admission(0, 0), Admission(1, 1), Admission(2, 0)]


def test_long_requests_go_to_short_caches_and_short_ones_to_few_requests():
    spare = shards((5, 50, 1, 900), (5, 50, 4, 100))
    assert place(Waiting(0, 1, 800, 0), spare) == 1
    assert place(Waiting(0, 1, 10, 0), spare) == 0
    assert place(Waiting(0, 60, 10, 0), spare) is None


def test_the_latest_request_of_the_lowest_priority_gives_way():
    running = [
        Running(0, 0, 9, 10, 0),
        Running(1, 0, 9, 10, 0),
        Running(2, 0, 9, 10, 0, priority=1),
        Running(3, 1, 1, 2, 0),
    ]
    assert victim(running, 0).id == 1
    assert victim(running, 2) is None


def test_single_tokens_take_tiles_where_a_step_has_no_decode_rows():
    running = [Running(1, 0, 30, 31, 5), Running(2, 0, 0, 40, 4)]
    pieces = plan_step(running, Room(0, 3, 16))
    assert sorted(pieces, key=lambda piece: piece.id) == [Piece(1, 30, 1), Piece(2, 0, 32)]
