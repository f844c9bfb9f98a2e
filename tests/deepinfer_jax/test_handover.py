"""A request that begins in one engine and goes on in another gets the answer it would have had in one.

Deterministic execution, replay mode exact unless a test says otherwise; numerics and decoder replay as named. The two
engines have other pools, slots, ring lengths and tiles. Freed slots and blocks, and rows that snapshots leave open, are
NaN.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from deepinfer_jax.cache.snapshot import META
from deepinfer_jax.errors import InputError, SnapshotError
from deepinfer_jax.handover import Handover
from deepinfer_jax.request import Request, SamplingParams
from tests.deepinfer_jax.test_engine_machine import FIELDS, alone, stream
from tests.running_engines import KEEP, Answer, built, encoder, fresh_engine, gather, receiver, run

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
LONG = pytest.param("f32q", "compact", marks=pytest.mark.slow)
CELLS = [("f32", "off"), ("f32", "compact"), LONG, ("bf16", "off")]
LENGTHS = st.integers(1, 70)
# Parameters are built in the tests, since their checks choose at random what to look at, which strategies must not.
DRAWN = st.fixed_dictionaries({name: FIELDS[name] for name in FIELDS if name not in ("n", "prompt_logprobs")})


def prefill(engine, requests: list[Request], **how) -> list[tuple[Answer, Handover]]:
    """All requests at once, up to their first token; pages are read as they come."""
    handovers = [Handover(engine.receiver.form) for _ in requests]
    pairs = list(zip(requests, handovers, strict=True))
    numbers = [engine.submit(request, handover=handover, **how) for request, handover in pairs]
    answers: dict = {}
    early: list[dict] = [{} for _ in requests]
    while engine.busy:
        gather(answers, engine.step())
        for pages, handover in zip(early, handovers, strict=True):
            pages |= handover.pages(len(pages) // len(engine.receiver.form.layout.ratios), handover.ready)
    for pages, handover in zip(early, handovers, strict=True):
        if handover.meta is not None:
            assert pages == handover.pages(0, handover.ready)
    return [(answers[number, 0], handover) for number, handover in zip(numbers, handovers, strict=True)]


def decode(engine, requests: list[Request], begun: list[tuple[Answer, Handover]]) -> list[Answer]:
    """The whole answers: what the first engine gave, and what comes behind it."""
    going: dict[int, int] = {}
    for place, (request, (first, handover)) in enumerate(zip(requests, begun, strict=True)):
        if first.last.finish_reason == "handover":
            arrival = engine.receiver.open(handover.snapshot())
            number = engine.submit(dataclasses.replace(request, answer=tuple(first.tokens)), arrival=arrival)
            going[number] = place
        else:
            assert handover.failure == first.last.finish_reason
    answers: dict = {}
    while engine.busy:
        gather(answers, engine.step())
    whole = [first for first, _ in begun]
    for number, place in going.items():
        rest = answers[number, 0]
        whole[place] = Answer(
            whole[place].tokens + rest.tokens, whole[place].logprobs + rest.logprobs, None, rest.text, rest.last
        )
    return whole


def is_empty(engine) -> bool:
    return engine.books.used_blocks == 0 and engine.books.used_slots == 0


@pytest.mark.parametrize(("numerics", "decoder"), CELLS)
@settings(max_examples=8, phases=[Phase.generate])
@given(
    drawn=st.lists(st.tuples(st.integers(0, 2), LENGTHS, DRAWN), min_size=1, max_size=6),
    way=st.sampled_from(["snapshot", "recompute"]),
)
def test_two_engines_answer_like_one(numerics: str, decoder: str, drawn: list, way: str) -> None:
    requests = [Request(stream(seed)[:length], SamplingParams(**fields)) for seed, length, fields in drawn]
    requests = [request for request in requests if request.params.max_tokens]
    expected = [alone(numerics, decoder, request)[0] for request in requests]
    sender = fresh_engine(numerics, decoder, preemption=way)
    begun = prefill(sender, requests)
    assert is_empty(sender)
    other = fresh_engine(numerics, decoder, build=receiver)
    answers = decode(other, requests, begun)
    assert is_empty(other)
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.tokens == wanted.tokens
        assert answer.logprobs == wanted.logprobs
        assert answer.last.finish_reason == wanted.last.finish_reason
    assert other.metrics.value("recompiles_total") == 0


def test_blocks_are_handed_over_once_they_are_full() -> None:
    """Tiles are half a block here, and two prompts take turns: every second step of one ends inside a block."""
    requests = [Request(stream(seed)[:length], GREEDY) for seed, length in ((0, 61), (1, 58))]
    expected = [alone("f32", "off", request)[0] for request in requests]
    begun = prefill(fresh_engine("f32", build=receiver), requests)
    for answer, wanted in zip(decode(fresh_engine("f32"), requests, begun), expected, strict=True):
        assert (answer.tokens, answer.logprobs) == (wanted.tokens, wanted.logprobs)


@pytest.mark.parametrize(
    ("numerics", "half"), [("f32", True), ("f32", False), pytest.param("f32q", True, marks=pytest.mark.slow)]
)
@settings(max_examples=6, phases=[Phase.generate])
@given(
    drawn=st.lists(st.tuples(st.integers(0, 2), st.integers(KEEP + 1, 70), DRAWN), min_size=1, max_size=5),
    way=st.sampled_from(["snapshot", "recompute"]),
)
def test_an_encoder_and_an_engine_answer_like_one_engine(numerics: str, half: bool, drawn: list, way: str) -> None:
    """Rows that decoder layers do not keep run elsewhere, with or without the weights of those layers."""
    requests = [Request(stream(seed)[:length], SamplingParams(**fields)) for seed, length, fields in drawn]
    requests = [request for request in requests if request.params.max_tokens]
    expected = [alone(numerics, "compact", request)[0] for request in requests]
    sender = fresh_engine(numerics, "compact", build=encoder if half else built, preemption=way)
    begun = prefill(sender, requests, encoder_only=True)
    assert is_empty(sender)
    assert all(handover.meta.computed == handover.meta.prompt_length - KEEP for _, handover in begun)
    other = fresh_engine(numerics, "compact", build=receiver)
    for answer, wanted in zip(decode(other, requests, begun), expected, strict=True):
        assert answer.tokens == wanted.tokens
        assert answer.logprobs == wanted.logprobs
        assert answer.last.finish_reason == wanted.last.finish_reason
    assert is_empty(other)
    assert sender.metrics.value("recompiles_total") == other.metrics.value("recompiles_total") == 0


def test_an_encoder_continues_prefix_hits_of_its_own() -> None:
    """Only up to the rows that run elsewhere, though a longer prompt has left blocks of those too."""
    sender, hits = fresh_engine("f32", "compact", build=encoder), []
    prompts = [(*stream(0)[:49], *stream(more)[:21]) for more in (5, 6)] + [stream(0)[:90], stream(0)[:70]]
    requests = [Request(prompt, GREEDY) for prompt in prompts]
    expected = [alone("f32", "compact", request)[0] for request in requests]
    for request, wanted in zip(requests, expected, strict=True):
        begun = prefill(sender, [request], encoder_only=True)
        (answer,) = decode(fresh_engine("f32", "compact", build=receiver), [request], begun)
        assert (answer.tokens, answer.logprobs) == (wanted.tokens, wanted.logprobs)
        hits.append(begun[0][0].last.receipt.hit_tokens)
    # Whole blocks of the 50 tokens that are run here, or of the 49 that are shared.
    assert hits == [0, 48, 48, 48]


def test_encoders_refuse_what_they_cannot_do() -> None:
    engine = fresh_engine("f32", "compact", build=encoder)
    form = engine.receiver.form
    for request, how in (
        (Request(stream(0)[:40], GREEDY), {}),
        (Request(stream(0)[:40], GREEDY), {"handover": Handover(form)}),
        (Request(stream(0)[:40], GREEDY), {"encoder_only": True}),
        (Request(stream(0)[:KEEP], GREEDY), {"handover": Handover(form), "encoder_only": True}),
        (
            Request(stream(0)[:40], dataclasses.replace(GREEDY, prompt_logprobs=1)),
            {"handover": Handover(form), "encoder_only": True},
        ),
    ):
        with pytest.raises(InputError):
            engine.submit(request, **how)
    with pytest.raises(InputError, match="encoder_only"):
        fresh_engine("f32").submit(Request(stream(0)[:40], GREEDY), handover=Handover(form), encoder_only=True)
    assert not engine.busy


@pytest.mark.parametrize("count", [1, 3, 5])
def test_an_answer_goes_on_behind_tokens_without_state(count: int) -> None:
    """What a gateway does when a worker is lost: the prompt and what was said run again elsewhere."""
    request = Request(stream(1)[:37], dataclasses.replace(GREEDY, repetition_penalty=1.3, min_tokens=3, seed=4))
    (wanted,) = alone("f32", "compact", request)
    engine = fresh_engine("f32", "compact", build=receiver)
    (rest,) = run(engine, [dataclasses.replace(request, answer=tuple(wanted.tokens[:count]))])
    assert rest.tokens == wanted.tokens[count:]
    assert rest.logprobs == wanted.logprobs[count:]
    assert is_empty(engine)


def test_a_hit_is_handed_over_with_its_pages() -> None:
    sender = fresh_engine("f32")
    first = Request(stream(0)[:50], GREEDY)
    run(sender, [first])
    again = Request((*stream(0)[:50], *stream(5)[:9]), GREEDY)
    begun = prefill(sender, [again])
    assert begun[0][0].last.receipt.hit_tokens == 48
    engine = fresh_engine("f32", build=receiver)
    (answer,) = decode(engine, [again], begun)
    (wanted,) = alone("f32", "off", again)
    assert (answer.tokens, answer.logprobs) == (wanted.tokens, wanted.logprobs)
    assert answer.last.receipt.received_tokens == 59
    assert answer.last.receipt.computed_tokens == GREEDY.max_tokens - 1


def test_bounded_states_carry_their_replays_and_are_refused_by_exact_engines() -> None:
    sender = fresh_engine("f32", mode="bounded", window_checkpoints=0)
    run(sender, [Request(stream(0)[:50], GREEDY)])
    again = Request((*stream(0)[:50], *stream(5)[:9]), GREEDY)
    ((first, handover),) = prefill(sender, [again])
    assert first.last.receipt.replays == (48,)
    taken = dataclasses.replace(again, answer=tuple(first.tokens))
    exact = fresh_engine("f32", build=receiver)
    with pytest.raises(InputError, match="replays of the state"):
        exact.submit(taken, arrival=exact.receiver.open(handover.snapshot()))
    bounded = fresh_engine("f32", mode="bounded", build=receiver)
    number = bounded.submit(taken, arrival=bounded.receiver.open(handover.snapshot()))
    answers: dict = {}
    while bounded.busy:
        gather(answers, bounded.step())
    sender = fresh_engine("f32", mode="bounded", window_checkpoints=0)
    run(sender, [Request(stream(0)[:50], GREEDY)])
    (whole,) = run(sender, [again])
    assert first.tokens + answers[number, 0].tokens == whole.tokens
    assert first.logprobs + answers[number, 0].logprobs == whole.logprobs
    assert answers[number, 0].last.receipt.replays == (48,)


def test_nothing_is_handed_over_of_an_answer_that_ends_at_once() -> None:
    engine = fresh_engine("f32")
    one = Request(stream(0)[:20], dataclasses.replace(GREEDY, max_tokens=1))
    ((answer, handover),) = prefill(engine, [one])
    assert answer.last.finish_reason == "length"
    assert (handover.failure, handover.meta) == ("length", None)


def test_an_aborted_request_hands_nothing_over() -> None:
    engine = fresh_engine("f32")
    handover = Handover(engine.receiver.form)
    number = engine.submit(Request(stream(0)[:60], GREEDY), handover=handover)
    engine.step()
    engine.abort(number)
    while engine.busy:
        engine.step()
    assert (handover.failure, handover.meta) == ("abort", None)
    assert is_empty(engine)


def complete_snapshot() -> tuple[Request, dict[str, bytes]]:
    request = Request(stream(0)[:21], GREEDY)
    ((first, handover),) = prefill(fresh_engine("f32"), [request])
    return dataclasses.replace(request, answer=tuple(first.tokens)), handover.snapshot()


def test_states_of_other_requests_are_refused_before_anything_is_queued() -> None:
    request, snapshot = complete_snapshot()
    engine = fresh_engine("f32", build=receiver)
    arrival = engine.receiver.open(snapshot)
    earlier = dataclasses.replace(request, prompt=request.prompt[:-1], answer=(request.prompt[-1], *request.answer))
    for changed, match in (
        (dataclasses.replace(request, prompt=(*request.prompt[:-1], 4)), "tokens of the state"),
        (dataclasses.replace(request, answer=()), "tokens of the state"),
        (earlier, "prompt length"),
        (dataclasses.replace(request, params=dataclasses.replace(GREEDY, n=2)), "'n' is 2"),
    ):
        with pytest.raises(InputError, match=match):
            engine.submit(changed, arrival=arrival)
    assert not engine.busy


def test_damaged_snapshots_are_refused() -> None:
    _, snapshot = complete_snapshot()
    engine = fresh_engine("f32", build=receiver)
    for name, content in snapshot.items():
        flipped = bytearray(content)
        flipped[np.random.default_rng(len(name)).integers(len(content))] ^= 1
        with pytest.raises(SnapshotError):
            engine.receiver.open(snapshot | {name: bytes(flipped)})
        with pytest.raises(SnapshotError, match="missing"):
            engine.receiver.open({key: value for key, value in snapshot.items() if key != name})
    assert META in snapshot


def test_requests_that_cannot_hand_over_are_refused() -> None:
    engine = fresh_engine("f32")
    for params in (dataclasses.replace(GREEDY, n=2), dataclasses.replace(GREEDY, max_tokens=0)):
        with pytest.raises(InputError):
            engine.submit(Request(stream(0)[:20], params), handover=Handover(engine.receiver.form))
    assert not engine.busy
