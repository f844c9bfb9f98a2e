"""Random traffic: whatever shares the engine, a request's answer is the one it gets alone.

Deterministic execution, replay mode exact; numerics and decoder replay as named. Tokens and log-probabilities are equal
bit for bit. The state starts as NaN, and freed slots and blocks are filled with NaN again.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from deepinfer_jax.cache.store import MemoryStore
from deepinfer_jax.engine import Engine
from deepinfer_jax.recorder import DISPATCH, READ
from deepinfer_jax.request import Request, SamplingParams
from deepinfer_jax.text.tokenizer import Tokenizer
from tests.running_engines import Answer, built, fresh_engine, gather, run

VOCABULARY = 96
STORE_BYTES = 1 << 16


@functools.cache
def stream(seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, VOCABULARY - 1, 96).tolist())


@functools.cache
def store_of(numerics: str, decoder: str) -> MemoryStore:
    """One store for all examples, with too little room for what they compute."""
    return MemoryStore(STORE_BYTES)


ALONE: dict[str, list[Answer]] = {}
Build = Callable[[str, str], Engine]


def alone(
    numerics: str, decoder: str, request: Request, tokenizer: Tokenizer | None = None, build: Build = built
) -> list[Answer]:
    """The branches of a request that has the engine to itself; nothing is cached."""
    key = f"{numerics} {decoder} {build} {request}"
    if key not in ALONE:
        ALONE[key] = run(fresh_engine(numerics, decoder, build=build, tokenizer=tokenizer), [request])
    return ALONE[key]


FIELDS = {
    "max_tokens": st.integers(0, 20),
    "temperature": st.sampled_from([0.0, 0.8, 1.5]),
    "top_k": st.sampled_from([0, 0, 5]),
    "top_p": st.sampled_from([1.0, 1.0, 0.9]),
    "min_p": st.sampled_from([0.0, 0.0, 0.05]),
    "presence_penalty": st.sampled_from([0.0, 0.0, 1.0]),
    "frequency_penalty": st.sampled_from([0.0, 0.0, 0.5]),
    "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
    "logit_bias": st.sampled_from([(), ((5, 3.0), (7, -100.0))]).map(dict),
    "stop_ids": st.sampled_from([frozenset(), frozenset(range(10, 25))]),
    "ignore_eos": st.booleans(),
    "seed": st.integers(0, 3),
    "n": st.sampled_from([1, 1, 1, 2, 3]),
    "logprobs": st.sampled_from([None, 0, 3]),
    "prompt_logprobs": st.sampled_from([None, None, None, 2]),
}
PARAMETERS = st.builds(SamplingParams, **FIELDS)


class Traffic(RuleBasedStateMachine):
    """Arrivals, aborts, deadlines and turns in any order over a pool that is too small for three long requests."""

    numerics, decoder = "f32", "off"

    @initialize(
        way=st.sampled_from(["auto", "snapshot", "recompute"]),
        checkpoints=st.sampled_from([0, 2]),
        stored=st.booleans(),
    )
    def begin(self, way: str, checkpoints: int, stored: bool) -> None:
        self.now = 0.0
        self.engine = fresh_engine(
            self.numerics,
            self.decoder,
            clock=lambda: self.now,
            store=store_of(self.numerics, self.decoder) if stored else None,
            preemption=way,
            window_checkpoints=checkpoints,
        )
        self.requests: dict[int, Request] = {}
        self.answers: dict[tuple[int, int], Answer] = {}
        self.cut_short: set[int] = set()

    @rule(
        seed=st.integers(0, 2),
        length=st.integers(1, 70),
        params=PARAMETERS,
        priority=st.integers(0, 1),
        deadline=st.sampled_from([None, None, None, 5.0]),
    )
    def arrive(self, seed: int, length: int, params: SamplingParams, priority: int, deadline: float | None) -> None:
        self.submit(Request(stream(seed)[:length], params, priority=priority, deadline=deadline))

    @precondition(lambda self: any(answer.last for answer in self.answers.values()))
    @rule(data=st.data(), more=st.integers(1, 20), params=PARAMETERS)
    def come_back(self, data: st.DataObject, more: int, params: SamplingParams) -> None:
        """The next turn of a chat: an earlier prompt, its answer, and some more."""
        done = [key for key, answer in self.answers.items() if answer.last]
        number, branch = data.draw(st.sampled_from(done))
        prompt = (*self.requests[number].prompt, *self.answers[number, branch].tokens)
        self.submit(Request((*prompt, *stream(9)[:more])[: 96 - params.max_tokens], params))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(list(self.requests)))
        self.engine.abort(number)
        self.cut_short.add(number)

    @rule(turns=st.integers(1, 12))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.now += 0.1
            if self.engine._traffic._worker is not None:
                # What happens does not depend on how fast threads are.
                self.engine._traffic._worker.flush()
            gather(self.answers, self.engine.step())

    @rule()
    def time_passes(self) -> None:
        self.now += 6.0

    def submit(self, request: Request) -> None:
        self.requests[self.engine.submit(request)] = request

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.busy:
            self.turn(1)
        self.engine.flush()
        self.engine.close()
        self.everything_is_back()
        self.order_of_steps()
        for number, request in self.requests.items():
            timeless = dataclasses.replace(request, deadline=None, priority=0)
            expected = alone(self.numerics, self.decoder, timeless)
            for branch in range(request.params.n):
                self.equal(number, branch, expected[branch])

    def everything_is_back(self) -> None:
        books = self.engine.books
        assert books.used_blocks == 0
        assert books.used_slots == 0
        assert self.engine.metrics.value("recompiles_total") == 0
        assert self.engine.metrics.value("store_failures_total") == 0
        assert self.engine.metrics.value("damaged_blocks_total") == 0
        assert not (books.tables != 0).any()

    def order_of_steps(self) -> None:
        """Step N + 1 is dispatched before step N is read, wherever there is a step N + 1 right behind."""
        order = list(self.engine.recorder.events)
        for place, (kind, number) in enumerate(order[1:], 1):
            if kind == READ and (DISPATCH, number + 1) in order[place:]:
                # Nothing was left to run when step N was read, and more came later.
                assert number in self.drained, number

    @property
    def drained(self) -> set[int]:
        return self.engine.drained_steps

    def equal(self, number: int, branch: int, expected: Answer) -> None:
        answer = self.answers[number, branch]
        assert answer.last is not None
        if answer.last.finish_reason in ("abort", "deadline"):
            count = len(answer.tokens)
            assert answer.tokens == expected.tokens[:count]
            assert answer.logprobs == expected.logprobs[:count]
            return
        assert answer.tokens == expected.tokens
        assert answer.logprobs == expected.logprobs
        assert answer.prompt_logprobs == expected.prompt_logprobs
        assert answer.last.finish_reason == expected.last.finish_reason
        assert answer.last.receipt.replays == ()


def machine(numerics: str, decoder: str) -> type[Traffic]:
    return type(f"Traffic_{numerics}_{decoder}", (Traffic,), {"numerics": numerics, "decoder": decoder})


CELLS = [("f32", "off"), ("f32", "compact"), ("f32", "mask"), ("bf16", "off"), ("f32q", "compact")]


@pytest.mark.parametrize(("numerics", "decoder"), CELLS)
def test_answers_do_not_depend_on_the_traffic(numerics: str, decoder: str) -> None:
    # Without shrinking: every example of a smaller failure runs all its requests again.
    few = settings(max_examples=6, stateful_step_count=25, deadline=None, phases=[Phase.generate])
    run_state_machine_as_test(machine(numerics, decoder), settings=few)
