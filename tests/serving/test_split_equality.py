"""Split equals one engine: 200 random requests through every kind of cluster, as real servers over real engines.

Numerics f32, deterministic; decoder replay and replay mode as named. In mode exact every answer is, bit for bit, that
of the request alone on one engine. In mode bounded this holds for answers that descend from no replay, and the others
agree with whole sequences that are folded over the replays of their receipts: log-probabilities within 2e-4, tokens
where their choice is clear. Engines have other pools, slots, ring lengths and tiles; freed slots and blocks are NaN.
Requests share beginnings and continue each other, several are open at a time, and states are fetched while they are
computed. The same once more with delays drawn for every place where threads, tasks and servers meet: nothing may depend
on what comes first there, and no worker may have to be tried twice.
"""

import logging
from collections import Counter

import pytest

from tests.serving.cells import Cell, check_alone, check_hand_over, check_replayed, tally, through
from tests.serving.delays import delays
from tests.serving.random_requests import features, plans, tokenizer

FEW, ALL = 40, 200
WAYS = (("full", "off"), ("full", "compact"), ("encoder_only", "compact"))
CELLS = [
    Cell(prefillers, decoders, *way, replay)
    for prefillers, decoders in ((1, 1), (2, 2), (0, 0))
    for way in WAYS
    for replay in ("exact", "bounded")
    # Nothing is handed over there, whatever the mode.
    if decoders or way[0] == "full"
]
LATE = [
    (Cell(2, 2, "full", "off", "exact"), 0),
    (Cell(1, 1, "encoder_only", "compact", "bounded"), 0),
    *(pytest.param(cell, seed, marks=pytest.mark.slow) for seed in range(1, 20) for cell in CELLS if cell.decoders),
]
every_cell = pytest.mark.parametrize("cell", CELLS, ids=str)
counts = pytest.mark.parametrize("count", [FEW, pytest.param(ALL, marks=pytest.mark.slow)])


def check(cell, one):
    """An answer of any cell. Returns what was seen, for the counts of a run."""
    check_hand_over(cell, one)
    if one.receipt.engine.replays:
        assert cell.replay == "bounded"
        return check_replayed(cell, one)
    check_alone(cell, one)
    return Counter({"equal bit for bit": 1})


@pytest.mark.parametrize("count", [FEW, ALL])
def test_the_requests_are_of_all_kinds(count):
    seen, names, done = Counter(), set(), []
    for plan in plans(count):
        prompt, params = plan.resolved(None if plan.parent is None else done[plan.parent], tokenizer())
        done.append((prompt, (17,) * params.max_tokens))
        has, names = features(plan, prompt, params)
        seen += has
    assert names - set(seen) == set()


@pytest.fixture
def untroubled(caplog):
    """No worker fails a request."""
    yield
    assert [record for record in caplog.get_records("call") if record.levelno >= logging.WARNING] == []


@every_cell
@counts
@pytest.mark.usefixtures("untroubled")
def test_answers_are_those_of_one_engine(cell, count):
    asked = through(cell, count)
    seen = tally(asked)
    for one in asked:
        seen += check(cell, one)
    assert seen["requests"] == count
    assert seen["hits"]
    assert bool(seen["handed over"]) == bool(cell.decoders)
    if cell.decoders:
        assert seen["handed over inside a block"]
        assert seen["handed over at an odd length"]
        for number in range(cell.decoders):
            assert seen[f"prompts on p{number}"]
            assert seen[f"answers on d{number}"]
    assert seen["ended by str"]
    assert seen["ended by int"]
    if cell.replay == "exact":
        assert not seen["behind replays"]
    elif count == ALL:
        # Which hits there are depends on which worker has computed what by then.
        assert seen["clear tokens"] > seen["behind replays"] > 0
        assert seen["unlike exact"]


@pytest.mark.parametrize(("cell", "seed"), LATE, ids=str)
@pytest.mark.usefixtures("untroubled")
def test_answers_do_not_depend_on_what_comes_late(cell, seed):
    with delays(seed):
        asked = through(cell, FEW)
    assert tally(asked)["handed over"]
    for one in asked:
        check(cell, one)
