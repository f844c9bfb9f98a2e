"""Engines over one store: what one computed another need not, and whatever the store does, the tokens are the same.

Deterministic f32 over a tiny model, replay mode exact, unless a test says otherwise.
"""

import asyncio
import dataclasses
import threading
import time

import numpy as np
import pytest

from deepinfer_jax.async_engine import AsyncEngine
from deepinfer_jax.cache.store import MemoryStore
from deepinfer_jax.request import Request, SamplingParams
from tests.running_engines import fresh_engine, gather, run, state_format

TOKENS = tuple(np.random.default_rng(11).integers(3, 95, 96).tolist())
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)
ASKED = Request(TOKENS[:70], GREEDY)
# Long enough for any look-up in memory; an answer ends the wait.
LONG = 60.0


def engine_over(store, **changes):
    return fresh_engine("f32", store=store, **{"store_patience": LONG, "window_checkpoints": 0} | changes)


def outcome(answer):
    return answer.tokens, answer.logprobs


def served(store, *requests, **changes):
    """Answers of a new engine over the store, all blocks saved, and its counters."""
    engine = engine_over(store, **changes)
    answers = [run(engine, [request])[0] for request in requests]
    engine.flush()
    engine.close()
    return answers, engine.metrics.value


@pytest.fixture(scope="module")
def cold():
    return run(fresh_engine("f32"), [ASKED])[0]


@pytest.fixture
def filled():
    """A store that has all full blocks of the prompt and its answer."""
    store = MemoryStore(1 << 30)
    served(store, ASKED)
    return store


class Odd:
    """A store over another one, in which some calls do something else."""

    def __init__(self, inner, **calls):
        self._inner, self._calls = inner, calls

    def contains_many(self, keys):
        return self._call("contains_many", keys)

    def get_many(self, keys):
        return self._call("get_many", keys)

    def put_many(self, items):
        return self._call("put_many", items)

    def _call(self, name, argument):
        return self._calls.get(name, getattr(self._inner, name))(argument)


def fail(*arguments):
    raise RuntimeError("no store")


def changed(inner, change):
    """``change``: of place and value of each value found."""

    def get_many(keys):
        values = inner.get_many(keys)
        return [value and change(place, value) for place, value in enumerate(values)]

    return Odd(inner, get_many=get_many)


def test_a_second_engine_goes_on_from_what_the_first_computed(cold, filled):
    assert filled.counters().values == 77 // 16
    (answer,), value = served(filled, ASKED)
    assert outcome(answer) == outcome(cold)
    receipt = answer.last.receipt
    assert (receipt.hit_tokens, receipt.stored_tokens, receipt.replays) == (64, 64, ())
    assert (value("stored_tokens_total"), value("hit_tokens_total")) == (64, 64)
    assert receipt.computed_tokens < 70 + 7
    assert value("recompiles_total") == value("store_failures_total") == 0


@pytest.mark.parametrize(
    ("numerics", "decoder"), [("bf16", "off"), pytest.param("f32q", "compact", marks=pytest.mark.slow)]
)
def test_other_numerics_and_decoder_replay(numerics, decoder):
    store = MemoryStore(1 << 30)
    answers = []
    for _ in range(2):
        engine = fresh_engine(numerics, decoder, store=store, store_patience=LONG)
        answers += run(engine, [ASKED])
        engine.flush()
        engine.close()
    assert outcome(answers[0]) == outcome(answers[1])
    assert [answer.last.receipt.stored_tokens for answer in answers] == [0, 64]


def test_the_last_blocks_reach_the_store_without_another_turn():
    arrived = threading.Event()
    store = MemoryStore(1 << 30)

    def put_many(items):
        store.put_many(items)
        if store.counters().values == 77 // 16:
            arrived.set()

    engine = engine_over(Odd(store, put_many=put_many))
    run(engine, [dataclasses.replace(ASKED, params=dataclasses.replace(GREEDY, max_tokens=1))])
    assert arrived.wait(LONG)
    engine.close()


def test_blocks_filled_by_generated_tokens_are_stored_too(filled, cold):
    longer = Request((*ASKED.prompt, *cold.tokens, *TOKENS[70:74]), GREEDY)
    (expected,) = run(fresh_engine("f32"), [longer])
    (answer,), _ = served(filled, longer)
    # 64 of the prompt alone, 77 with the answer: the last generated token was never run.
    assert answer.last.receipt.stored_tokens == 64
    assert outcome(answer) == outcome(expected)
    asked = dataclasses.replace(ASKED, params=dataclasses.replace(GREEDY, max_tokens=12))
    (first,), _ = served(filled, asked)
    longer = Request((*ASKED.prompt, *first.tokens[:11], 9), dataclasses.replace(GREEDY, max_tokens=4))
    (answer,), _ = served(filled, longer)
    assert answer.last.receipt.stored_tokens == 80
    assert outcome(answer) == outcome(run(fresh_engine("f32"), [longer])[0])


def test_device_pages_come_first_and_the_store_continues_them(filled, cold):
    (_, answer, again), value = served(filled, Request(TOKENS[:33], GREEDY, read_cache=False), ASKED, ASKED)
    receipt = answer.last.receipt
    assert (receipt.hit_tokens, receipt.stored_tokens) == (64, 32)
    # What came from the store is in the device's own index from then on.
    assert (again.last.receipt.hit_tokens, again.last.receipt.stored_tokens) == (64, 0)
    assert outcome(answer) == outcome(again) == outcome(cold)
    assert value("stored_tokens_total") == 32


def test_requests_that_read_no_cache_read_no_store(filled, cold):
    plain = dataclasses.replace(ASKED, read_cache=False)
    scored = dataclasses.replace(ASKED, params=dataclasses.replace(GREEDY, prompt_logprobs=0))
    other = dataclasses.replace(ASKED, salt=b"another")
    before = filled.counters().hits
    answers, _ = served(filled, plain, scored, other)
    assert [answer.last.receipt.stored_tokens for answer in answers] == [0, 0, 0]
    assert all(outcome(answer) == outcome(cold) for answer in answers)
    assert filled.counters().hits == before


@pytest.mark.parametrize(
    ("change", "stored"),
    [
        (lambda place, value: value[:-1] + bytes([value[-1] ^ 1]), 0),
        (lambda place, value: value if place < 2 else value[: len(value) // 2], 32),
        (lambda place, value: value if place != 1 else None, 16),
        (lambda place, value: b"", 0),
        (lambda place, value: "no bytes", 0),
    ],
)
def test_values_that_are_damaged_or_lost_end_the_hit(filled, cold, change, stored):
    (answer,), _ = served(changed(filled, change), ASKED)
    assert answer.last.receipt.stored_tokens == stored
    assert outcome(answer) == outcome(cold)


def test_values_of_other_blocks_are_not_taken(filled, cold):
    (answer,), value = served(Odd(filled, get_many=lambda keys: filled.get_many(keys)[::-1]), ASKED)
    assert answer.last.receipt.stored_tokens == 0
    assert value("damaged_blocks_total") == 4
    assert outcome(answer) == outcome(cold)


def test_values_of_another_fingerprint_are_not_taken(cold):
    """Even where another model's blocks have the same names."""
    store = MemoryStore(1 << 30)
    engine = engine_over(store)
    engine._traffic._worker._form = state_format("f32", bytes([1] * 32))
    run(engine, [ASKED])
    engine.flush()
    engine.close()
    (answer,), value = served(store, ASKED)
    assert answer.last.receipt.stored_tokens == 0
    assert value("damaged_blocks_total") == 4
    assert outcome(answer) == outcome(cold)


@pytest.mark.parametrize("calls", [{"get_many": fail}, {"put_many": fail}, {"get_many": lambda keys: []}])
def test_a_store_that_fails_costs_recomputation(calls, cold):
    (answer, again), value = served(Odd(MemoryStore(1 << 30), **calls), ASKED, ASKED)
    assert outcome(answer) == outcome(again) == outcome(cold)
    assert value("store_failures_total") >= 1
    assert value("finished_requests_total", reason="length") == 2


def test_a_store_without_room_keeps_nothing(cold):
    store = MemoryStore(100)
    answers, _ = served(store, ASKED, ASKED)
    assert all(outcome(answer) == outcome(cold) for answer in answers)
    assert store.counters().values == 0


def test_a_store_that_sleeps_delays_a_request_by_no_more_than_the_patience(filled, cold):
    awake = threading.Event()

    def get_many(keys):
        awake.wait(LONG)
        return filled.get_many(keys)

    engine = engine_over(Odd(filled, get_many=get_many), store_patience=0.05)
    begin = time.monotonic()
    (answer,) = run(engine, [ASKED])
    assert time.monotonic() - begin < LONG / 2
    assert (outcome(answer), answer.last.receipt.stored_tokens) == (outcome(cold), 0)
    awake.set()
    engine.flush()
    engine.close()


def test_a_store_that_takes_nothing_for_long_stalls_nobody_and_loses_the_oldest(cold):
    awake, kept = threading.Event(), []

    def put_many(items):
        items = list(items)
        awake.wait(LONG)
        kept.extend(key for key, _ in items)

    engine = engine_over(Odd(MemoryStore(0), put_many=put_many), store_queue=2, store_patience=0.01)
    assert outcome(run(engine, [ASKED])[0]) == outcome(cold)
    other = Request(TOKENS[20:90], dataclasses.replace(GREEDY, max_tokens=4))
    run(engine, [other])
    assert not engine.busy
    lost = engine.metrics.value("unsaved_blocks_total")
    assert lost > 0
    awake.set()
    engine.flush()
    engine.close()
    assert engine.metrics.value("saved_blocks_total") == len(kept) == 8 - lost
    assert engine.metrics.value("recompiles_total") == 0


def test_others_run_while_a_request_waits_for_the_store(filled, cold):
    """Time stands still, so that only the answer ends the wait."""
    awake = threading.Event()

    def get_many(keys):
        awake.wait(LONG)
        return filled.get_many(keys)

    engine = engine_over(Odd(filled, get_many=get_many), clock=lambda: 0.0)
    waiting, answers = engine.submit(ASKED), {}
    free = engine.submit(Request(TOKENS[:9], GREEDY))
    while (free, 0) not in answers or answers[free, 0].last is None:
        gather(answers, engine.step())
    assert (waiting, 0) not in answers
    assert engine.busy
    awake.set()
    while engine.busy:
        gather(answers, engine.step())
    assert outcome(answers[waiting, 0]) == outcome(cold)
    assert answers[waiting, 0].last.receipt.stored_tokens == 64
    engine.close()


def test_nothing_is_saved_of_steps_that_are_not_finite():
    """The first step's two blocks are sound; what runs behind it reads a damaged window."""
    store = MemoryStore(1 << 30)
    engine = engine_over(store)
    engine.submit(ASKED)
    engine.step()
    while engine.busy and not engine._running:
        engine.step()
    (sequence,) = engine._running.values()
    engine._device.poison([], [engine.books.number(sequence)])
    answers = {}
    while engine.busy:
        gather(answers, engine.step())
    assert answers[0, 0].last.finish_reason == "error"
    engine.flush()
    engine.close()
    assert store.counters().values == 2


def test_an_asynchronous_engine_closes_its_engine(filled, cold):
    async def collect(engine):
        return [output async for output in engine.stream(ASKED)]

    inner = engine_over(filled)
    with AsyncEngine(inner) as engine:
        news = asyncio.run(collect(engine))
    assert [token for output in news for token in output.tokens] == cold.tokens
    assert news[-1].receipt.stored_tokens == 64
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("store")]
    # A closed engine serves without its store.
    (answer,) = run(inner, [dataclasses.replace(ASKED, salt=b"another")])
    assert outcome(answer) == outcome(cold)


def test_branches_and_preempted_requests_share_a_store(filled):
    """Three long requests in a pool that is too small for them."""
    requests = [
        Request(TOKENS[:60], dataclasses.replace(GREEDY, n=3, temperature=1.0, seed=5, max_tokens=30)),
        *(Request(TOKENS[start : start + 60], dataclasses.replace(GREEDY, max_tokens=36)) for start in (10, 20, 30)),
    ]
    expected = [outcome(answer) for request in requests for answer in run(fresh_engine("f32"), [request])]
    for way in ("snapshot", "recompute"):
        engine = engine_over(filled, preemption=way)
        assert [outcome(answer) for answer in run(engine, requests)] == expected
        assert engine.metrics.value("preemptions_total", way=way) > 0
        engine.flush()
        engine.close()
        assert engine.books.used_blocks == 0


def test_replays_travel_with_bounded_content_and_exact_engines_leave_it():
    turns = [Request(TOKENS[:41], GREEDY), Request(TOKENS[:81], GREEDY), Request(TOKENS[:88], GREEDY)]
    bounded = {"mode": "bounded"}
    store = MemoryStore(1 << 30)
    expected, _ = served(None, *turns, **bounded)
    served(store, *turns[:2], **bounded)
    (answer,), _ = served(store, turns[2], **bounded)
    receipt = answer.last.receipt
    assert (receipt.hit_tokens, receipt.stored_tokens, receipt.replays) == (80, 80, (32, 80))
    assert receipt.replays == expected[2].last.receipt.replays
    assert outcome(answer) == outcome(expected[2])

    (exact,), _ = served(store, turns[2])
    assert (exact.last.receipt.stored_tokens, exact.last.receipt.replays) == (32, ())
    assert outcome(exact) == outcome(run(fresh_engine("f32"), [turns[2]])[0])
    # The exact engine has stored the whole prompt by now, and exact content is preferred.
    (answer,), _ = served(store, turns[2], **bounded)
    assert (answer.last.receipt.stored_tokens, answer.last.receipt.replays) == (80, (80,))


def test_a_history_that_does_not_continue_the_hit_ends_it():
    """The device has a history of one replay, the store what follows behind another."""
    store = MemoryStore(1 << 30)
    served(store, Request(TOKENS[:65], GREEDY), Request(TOKENS[:88], GREEDY), mode="bounded")
    behind_64 = Odd(store, put_many=list, get_many=lambda keys: [bounded_alone(store, key) for key in keys])
    turns = [Request(TOKENS[:count], GREEDY) for count in (41, 72, 88)]
    answers, value = served(behind_64, *turns, mode="bounded")
    receipt = answers[2].last.receipt
    assert (receipt.hit_tokens, receipt.stored_tokens, receipt.replays) == (64, 0, (32, 64))
    assert value("damaged_blocks_total") == 0
    # With the same history on the device the block is taken.
    answers, _ = served(behind_64, turns[0], Request(TOKENS[:65], GREEDY, read_cache=False), turns[2], mode="bounded")
    receipt = answers[2].last.receipt
    assert (receipt.hit_tokens, receipt.stored_tokens, receipt.replays) == (80, 16, (64, 80))


def bounded_alone(store, key):
    """The value of a key for content of bounded histories, none for others."""
    return store.get_many([key])[0] if key.endswith(b"b") else None
