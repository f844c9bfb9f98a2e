"""The engine's loop, its refusals and its answers beyond random traffic.

Deterministic f32 over a tiny model, replay mode exact, unless a test says otherwise.
"""

import ast
import asyncio
import dataclasses
import math
from pathlib import Path

import jax
import jax._src.array as jax_array
import numpy as np
import pytest

import deepinfer_jax.engine
from deepinfer_jax.async_engine import AsyncEngine, EngineClosedError
from deepinfer_jax.errors import InputError, OverloadError
from deepinfer_jax.handover import Handover
from deepinfer_jax.recorder import DISPATCH, READ, load_steps, run_again
from deepinfer_jax.request import Request, SamplingParams
from deepinfer_jax.runtime.inflight import InFlight
from tests.running_engines import built, encoder, fresh_engine, gather, run

PROMPT = tuple(np.random.default_rng(7).integers(3, 95, 40).tolist())
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
# What the loop is made of: everything between a request and the device.
LOOP = (
    "engine",
    "admission",
    "results",
    "books",
    "preemption",
    "sequence",
    "arrival",
    "handover",
    "checkpoints",
    "scheduler",
    "store_traffic",
)
ARRAY_ATTRIBUTES = {
    "block_until_ready",
    "device_buffer",
    "copy_to_host_async",
    "addressable_data",
    "addressable_shards",
    "item",
    "__array__",
}


LOOKS = ("__array__", "__int__", "__float__", "__bool__", "__index__", "item", "tolist", "block_until_ready")


@pytest.mark.parametrize("name", LOOP)
def test_the_loop_reaches_no_attribute_of_device_arrays(name):
    """Of what may wait for the device, only ``read`` of work in flight is called, and in two places."""
    source = Path(deepinfer_jax.engine.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not used & ARRAY_ATTRIBUTES
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert "jax" not in imported or name == "preemption"
    assert not any("jax.numpy" in module for module in imported)


@pytest.fixture
def tripwire(monkeypatch):
    """Device arrays may be looked into inside ``InFlight.read`` only."""
    reading = []
    read, value = InFlight.read, jax_array.ArrayImpl._value

    def guarded_read(self):
        reading.append(True)
        try:
            return read(self)
        finally:
            reading.pop()

    def guarded(function):
        def look(self, *arguments, **options):
            assert reading, "a device array was looked into outside InFlight.read"
            return function(self, *arguments, **options)

        return look

    monkeypatch.setattr(InFlight, "read", guarded_read)
    monkeypatch.setattr(jax_array.ArrayImpl, "_value", property(guarded(value.fget)))
    for name in LOOKS:
        monkeypatch.setattr(jax_array.ArrayImpl, name, guarded(getattr(jax_array.ArrayImpl, name)))
    # On a CPU numpy takes the memory of a device array without asking it.
    for name in ("asarray", "array"):
        function = getattr(np, name)
        look = guarded(function)

        def convert(value, *arguments, function=function, look=look, **options):
            return (look if isinstance(value, jax.Array) else function)(value, *arguments, **options)

        monkeypatch.setattr(np, name, convert)


REQUESTS = [
    Request(PROMPT, GREEDY),
    Request(PROMPT[:17], dataclasses.replace(GREEDY, n=2, temperature=1.0, seed=1)),
    Request(PROMPT[5:], dataclasses.replace(GREEDY, logprobs=2, repetition_penalty=1.2)),
    Request(PROMPT[9:], dataclasses.replace(GREEDY, prompt_logprobs=1)),
    Request((*PROMPT, 5, 6), GREEDY),
]


def test_nothing_but_results_in_flight_is_read(tripwire):
    engine = fresh_engine("f32", preemption="snapshot")
    assert len(run(engine, REQUESTS)) == 6


@pytest.mark.parametrize(
    "look",
    [
        lambda array: np.asarray(array),
        lambda array: np.array(array),
        lambda array: array.item(),
        lambda array: array.tolist(),
        jax.device_get,
        int,
        float,
        bool,
    ],
)
def test_the_tripwire_fires(tripwire, look):
    with pytest.raises(AssertionError, match="outside"):
        look(jax.numpy.zeros(()))


def late_reads(engine):
    """Steps that were read before the next one was dispatched, though there was something to run."""
    order = list(engine.recorder.events)
    return [
        number
        for place, (kind, number) in enumerate(order)
        if kind == READ and (DISPATCH, number + 1) in order[place:] and number not in engine.drained_steps
    ]


def test_the_next_step_is_dispatched_before_a_step_is_read():
    engine = fresh_engine("f32")
    run(engine, REQUESTS)
    order = list(engine.recorder.events)
    assert late_reads(engine) == []
    assert order.index((DISPATCH, 2)) < order.index((READ, 1))
    assert len(order) > 20


def test_a_loop_that_reads_early_is_found(monkeypatch):
    """The check above can fail: a loop that reads its step at once breaks the order."""
    engine = fresh_engine("f32")
    dispatch = engine._dispatch

    def read_at_once(assembled):
        record = dispatch(assembled)
        engine.recorder.events.append((READ, record.number))
        return record

    monkeypatch.setattr(engine, "_dispatch", read_at_once)
    run(engine, REQUESTS[:1])
    assert late_reads(engine) != []


def test_host_buffers_of_a_step_may_be_overwritten_after_its_dispatch(monkeypatch):
    expected = run(fresh_engine("f32"), REQUESTS)
    engine = fresh_engine("f32")
    dispatch = engine._device.dispatch

    def scribbling(shape, step, choices):
        flight = dispatch(shape, step, choices)
        for leaf in jax.tree.leaves((step, choices)):
            leaf[...] = 1
        return flight

    monkeypatch.setattr(engine._device, "dispatch", scribbling)
    assert [answer.tokens for answer in run(engine, REQUESTS)] == [answer.tokens for answer in expected]


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Request((), GREEDY), "prompt"),
        (lambda: Request((3, 96), GREEDY), "token id"),
        (lambda: Request((3, -1), GREEDY), "token id"),
        (lambda: Request(PROMPT * 2, dataclasses.replace(GREEDY, max_tokens=60)), "prompt and new tokens"),
        (lambda: Request(PROMPT, dataclasses.replace(GREEDY, temperature=math.nan)), "temperature"),
        (lambda: Request(PROMPT, dataclasses.replace(GREEDY, min_tokens=9)), "min_tokens"),
        (lambda: Request(PROMPT, dataclasses.replace(GREEDY, stop=("a",))), "stop"),
        (lambda: Request(PROMPT, GREEDY, deadline=0.0), "deadline"),
        (lambda: Request(PROMPT, dataclasses.replace(GREEDY, stop_ids=frozenset({96}))), "stop_ids"),
        (lambda: Request(PROMPT, dataclasses.replace(GREEDY, logit_bias={96: 1.0})), "logit_bias"),
    ],
)
def test_bad_input_is_one_typed_error_before_anything_is_queued(make, key):
    engine = fresh_engine("f32")
    with pytest.raises(InputError) as refused:
        engine.submit(make())
    assert refused.value.key == key
    assert not engine.busy


def test_more_than_may_wait_is_refused():
    engine = fresh_engine("f32", max_waiting=2)
    engine.submit(REQUESTS[0])
    with pytest.raises(OverloadError):
        engine.submit(REQUESTS[1])
    assert engine.submit(REQUESTS[0]) == 1


def test_the_exact_restart_is_equal_at_the_bound_and_differs_at_one_window():
    """A hit of 80 of 96 tokens over three layers with windows of 16 restarts at 35; at 64 the result is another one."""
    tokens = tuple(np.random.default_rng(3).integers(3, 95, 88).tolist())
    asked = dataclasses.replace(GREEDY, max_tokens=1, logprobs=20)

    def top(mode):
        engine = fresh_engine("f32", mode=mode, window_checkpoints=0)
        run(engine, [Request(tokens[:81], GREEDY)])
        (answer,) = run(engine, [Request(tokens, asked)])
        assert answer.last.receipt.hit_tokens == 80
        return dict(answer.logprobs[0].top), answer.last.receipt

    (cold,) = run(fresh_engine("f32"), [Request(tokens, asked)])
    exact, receipt = top("exact")
    assert exact == dict(cold.logprobs[0].top)
    assert (receipt.replays, receipt.replayed_tokens) == ((), 45)
    bounded, receipt = top("bounded")
    assert (receipt.replays, receipt.replayed_tokens) == ((80,), 16)
    shared = exact.keys() & bounded.keys()
    assert max(abs(exact[token] - bounded[token]) for token in shared) > 1e-3


def test_exact_requests_never_take_what_descends_from_a_bounded_replay():
    """Blocks behind a bounded hit carry its length; an exact engine over the same books leaves them alone."""
    tokens = tuple(np.random.default_rng(4).integers(3, 95, 88).tolist())
    engine = fresh_engine("f32", mode="bounded", window_checkpoints=0)
    run(engine, [Request(tokens[:41], GREEDY)])
    run(engine, [Request(tokens[:81], GREEDY)])
    (answer,) = run(engine, [Request(tokens, GREEDY)])
    assert answer.last.receipt.replays == (32, 80)
    engine.settings = dataclasses.replace(
        engine.settings, replay=dataclasses.replace(engine.settings.replay, mode="exact")
    )
    engine._admissions._settings = engine.settings
    (answer,) = run(engine, [Request(tokens, GREEDY)])
    assert answer.last.receipt.hit_tokens == 32
    assert answer.last.receipt.replays == ()
    (cold,) = run(fresh_engine("f32"), [Request(tokens, GREEDY)])
    assert answer.tokens == cold.tokens


def test_a_resend_hits_everything_but_its_last_partial_block():
    engine = fresh_engine("f32")
    (first,) = run(engine, [Request(PROMPT, dataclasses.replace(GREEDY, max_tokens=9))])
    (again,) = run(engine, [Request((*PROMPT, *first.tokens, 9), GREEDY)])
    assert again.last.receipt.hit_tokens == 48


def test_salts_keep_prefixes_apart():
    engine = fresh_engine("f32")
    run(engine, [Request(PROMPT, GREEDY, salt=b"one")])
    (other,) = run(engine, [Request(PROMPT, GREEDY, salt=b"two")])
    (same,) = run(engine, [Request(PROMPT, GREEDY, salt=b"one")])
    assert (other.last.receipt.hit_tokens, same.last.receipt.hit_tokens) == (0, 32)


def test_the_flight_recorder_replays_its_steps(tmp_path):
    engine = fresh_engine("f32")
    run(engine, [dataclasses.replace(request, read_cache=False) for request in REQUESTS[:1]])
    engine.recorder.save(tmp_path / "steps")
    steps = load_steps(tmp_path / "steps")
    engine._device.reset()
    for recorded, tokens in zip(steps, run_again(steps, engine._device), strict=True):
        used = recorded.choices.positions > 0
        np.testing.assert_array_equal(recorded.tokens[used], tokens[used])


def test_metrics_count_what_happened():
    engine = fresh_engine("f32")
    run(engine, [Request(PROMPT, GREEDY)])
    run(engine, [Request(PROMPT, GREEDY)])
    value = engine.metrics.value
    assert value("prompt_tokens_total") == 80
    assert value("hit_tokens_total") == 32
    assert value("generated_tokens_total") == 16
    assert value("finished_requests_total", reason="length") == 2
    assert value("first_token_seconds_count") == 2
    assert "deepinfer_steps_total" in engine.metrics.text()


@pytest.mark.parametrize(("decoder", "prefilled", "replayed", "kept"), [("off", 48, 0, 62), ("compact", 80, 32, 54)])
def test_rows_are_counted_without_padding(decoder, prefilled, replayed, kept):
    """A prompt of 40 tokens and 7 rows behind it, twice; of the second one 32 tokens are a hit.

    With windows held at the hit 8 rows are run then. Decoder layers that keep 20 rows leave no windows there, so that
    the hit is replayed.
    """
    engine = fresh_engine("f32", decoder)
    for _ in range(2):
        run(engine, [Request(PROMPT, GREEDY)])
    value = engine.metrics.value
    assert (value("prefill_rows_total"), value("replayed_rows_total")) == (prefilled, replayed)
    assert (value("decode_rows_total"), value("decoder_rows_total")) == (14, kept)


def test_scores_that_are_not_finite_end_one_request_alone():
    engine = fresh_engine("f32")
    (expected,) = run(engine, [Request(PROMPT, GREEDY)])
    engine = fresh_engine("f32")
    numbers = [engine.submit(Request(PROMPT, GREEDY)), engine.submit(Request(PROMPT[::-1], GREEDY))]
    answers = {}
    for _ in range(3):
        gather(answers, engine.step())
    bad = next(sequence for sequence in engine._running.values() if sequence.request_id == numbers[1])
    engine._device.poison([], [engine.books.number(bad)])
    while engine.busy:
        gather(answers, engine.step())
    assert answers[numbers[0], 0].tokens == expected.tokens
    assert answers[numbers[1], 0].last.finish_reason == "error"


async def _collect(engine, request):
    return [output async for output in engine.stream(request)]


def test_streams_of_the_asynchronous_engine_are_those_of_the_loop():
    expected = [answer.tokens for answer in run(fresh_engine("f32"), [REQUESTS[0], REQUESTS[2]])]

    async def both(engine):
        return await asyncio.gather(_collect(engine, REQUESTS[0]), _collect(engine, REQUESTS[2]))

    with AsyncEngine(fresh_engine("f32")) as engine:
        news = asyncio.run(both(engine))
    assert [[token for output in part for token in output.tokens] for part in news] == expected


def test_leaving_a_stream_aborts_its_request():
    inner = fresh_engine("f32")

    async def leave(engine):
        async for _ in engine.stream(Request(PROMPT, dataclasses.replace(GREEDY, max_tokens=50))):
            break
        return await _collect(engine, REQUESTS[0])

    with AsyncEngine(inner) as engine:
        asyncio.run(leave(engine))
    assert inner.metrics.value("finished_requests_total", reason="abort") == 1


def test_a_closed_engine_says_so():
    engine = AsyncEngine(fresh_engine("f32"))
    engine.close()
    with pytest.raises(EngineClosedError):
        asyncio.run(_collect(engine, REQUESTS[0]))


def test_bad_input_reaches_the_caller_of_a_stream():
    with AsyncEngine(fresh_engine("f32")) as engine, pytest.raises(InputError):
        asyncio.run(_collect(engine, Request((), GREEDY)))


def test_every_decoding_request_runs_in_every_step():
    """Three requests decode side by side: from then on each step has a row of every one until the first one ends."""
    engine = fresh_engine("f32")
    for seed in range(3):
        prompt = tuple(np.random.default_rng(seed).integers(3, 95, 8).tolist())
        engine.submit(Request(prompt, dataclasses.replace(GREEDY, max_tokens=20)))
    news = []
    while engine.busy:
        news.append(len(engine.step()))
    full = news.index(3)
    assert news[full : full + 18] == [3] * 18


@pytest.mark.parametrize("half", [False, True])
def test_pages_of_a_chunk_that_is_not_finite_are_nobodys(half):
    """Chunks of 32 tokens: the second one reads a window that was damaged behind the first, and samples nothing."""
    engine = fresh_engine("f32", "compact", build=encoder if half else built, window_checkpoints=0)
    prompt = tuple(np.random.default_rng(8).integers(3, 95, 90).tolist())
    handover = Handover(engine.receiver.form)
    how = {"handover": handover, "encoder_only": True} if half else {}
    number = engine.submit(Request(prompt, dataclasses.replace(GREEDY, max_tokens=4)), **how)
    engine.step()
    engine._device.poison([], [0])
    answers = {}
    while engine.busy:
        gather(answers, engine.step())
    assert answers[number, 0].last.finish_reason == "error"
    assert engine.books.used_blocks == engine.books.used_slots == 0
    if half:
        assert handover.meta is None
        assert handover.failure == "error"
        assert handover.ready == 2
    again = engine.submit(Request(prompt, dataclasses.replace(GREEDY, max_tokens=4)), **how)
    while engine.busy:
        gather(answers, engine.step())
    assert answers[again, 0].last.receipt.hit_tokens == 32
    assert answers[again, 0].last.finish_reason == ("handover" if half else "length")
