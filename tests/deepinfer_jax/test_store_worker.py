"""The thread that talks to a store, without an engine: order, bounds and ends."""

import threading

import numpy as np
import pytest

from deepinfer_jax.cache.store import MemoryStore, store_key, unpack_block
from deepinfer_jax.metrics import Metrics
from deepinfer_jax.store_worker import StoreWorker, Unsaved
from tests.running_engines import state_format

FORM = state_format("f32")
KEYS = [bytes([number] * 32) for number in range(20)]
LONG = 60.0


class Gated(MemoryStore):
    """Notes every call; calls wait while the gate is shut."""

    def __init__(self):
        super().__init__(1 << 30)
        self.gate, self.calls = threading.Event(), []
        self.gate.set()

    def get_many(self, keys):
        self.calls.append("get")
        assert self.gate.wait(LONG)
        return super().get_many(keys)

    def put_many(self, items):
        self.calls.append("put")
        assert self.gate.wait(LONG)
        super().put_many(items)


@pytest.fixture
def store():
    return Gated()


@pytest.fixture
def make(store):
    made = []

    def worker(**options):
        defaults = {"bounded": False, "most_unsaved": 100, "most_found": 100}
        made.append(StoreWorker(store, FORM, Metrics(), **defaults | options))
        return made[-1]

    yield worker
    store.gate.set()
    for one in made:
        one.close()


def block(number, replays=()):
    return Unsaved(KEYS[number], replays, FORM.empty_blocks(2, float(number)), 1)


def test_what_is_saved_is_found_in_order(make):
    worker = make()
    worker.save([block(number) for number in range(20) if number != 9])
    worker.flush()
    lookup = worker.look_up(KEYS)
    worker.wait([lookup], LONG)
    assert lookup.done
    assert sorted(lookup.found) == [number for number in range(20) if number != 9]
    for number, (found,) in lookup.found.items():
        assert found.replays == ()
        np.testing.assert_array_equal(found.planes.main, FORM.empty_blocks(1, float(number)).main)


def test_both_histories_are_found_where_bounded_content_is_asked_for(make, store):
    worker = make(bounded=True)
    worker.save([block(0), block(0, (16,)), block(1, (16, 32))])
    worker.flush()
    lookup = worker.look_up(KEYS[:2])
    worker.wait([lookup], LONG)
    assert [[found.replays for found in lookup.found[place]] for place in (0, 1)] == [[(), (16,)], [(16, 32)]]
    key = store_key(KEYS[0], bounded=True)
    assert unpack_block(key, store.get_many([key])[0], FORM).replays == (16,)


def test_look_ups_come_before_blocks_that_wait(make, store):
    worker = make()
    store.gate.clear()
    worker.save([block(0)])
    while not store.calls:
        pass
    worker.save([block(number) for number in range(1, 4)])
    lookup = worker.look_up(KEYS[:2])
    worker.wait([lookup], 0.01)
    assert not lookup.done
    store.gate.set()
    worker.flush()
    assert lookup.done
    assert store.calls == ["put", "get", "put"]


def test_the_oldest_blocks_are_given_up(make, store):
    worker = make(most_unsaved=2)
    store.gate.clear()
    lookup = worker.look_up(KEYS[:1])
    worker.save([block(number) for number in range(5)])
    store.gate.set()
    worker.flush()
    assert lookup.done
    held = store.contains_many([store_key(key, bounded=False) for key in KEYS[:5]])
    assert held == [False, False, False, True, True]
    assert worker._metrics.value("unsaved_blocks_total") == 3


def test_look_ups_hold_no_more_than_they_may_until_released(make):
    worker = make(most_found=3)
    worker.save([block(number) for number in range(4)])
    worker.flush()
    first, second = worker.look_up(KEYS[:2]), worker.look_up(KEYS[:4])
    worker.flush()
    assert (sorted(first.found), sorted(second.found)) == ([0, 1], [0])
    worker.release(first)
    worker.release(second)
    third = worker.look_up(KEYS[:4])
    worker.flush()
    assert sorted(third.found) == [0, 1, 2]


def test_an_answer_in_pieces_may_be_used_early_and_ends_when_nobody_waits(make, store):
    worker = make()
    worker.save([block(number) for number in range(20)])
    worker.flush()
    store.calls.clear()
    get_many, second = store.get_many, threading.Event()

    def one_piece(keys):
        if store.calls:
            second.set()
            store.gate.clear()
        return get_many(keys)

    store.get_many = one_piece
    lookup = worker.look_up(KEYS)
    assert second.wait(LONG)
    assert (lookup.done, sorted(lookup.found)) == (False, list(range(8)))
    worker.release(lookup)
    store.gate.set()
    worker.flush()
    assert (lookup.done, lookup.found, store.calls) == (True, {}, ["get", "get"])


def test_closing_ends_what_waits(make, store):
    worker = make()
    store.gate.clear()
    first, second = worker.look_up(KEYS), worker.look_up(KEYS)
    worker.save([block(0)])
    closing = threading.Thread(target=worker.close)
    closing.start()
    worker.wait([second], LONG)
    assert second.done
    store.gate.set()
    closing.join(LONG)
    assert first.done
    assert worker.look_up(KEYS).done
    worker.flush()
    assert store.counters().values == 0
