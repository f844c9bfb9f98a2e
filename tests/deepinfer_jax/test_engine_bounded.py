"""Bounded replay in a running engine: an answer is a function of its tokens, replay list, prompt length and keep.

The oracle knows neither pages nor rings nor steps: it computes whole sequences and hides what replay leaves out. It
agrees with golden data of its own (``tests/examples/train_tiny/test_replay.py``), as the engine does with the same
(``test_engine_golden_replay.py``). Numerics f32.
"""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.engine import Engine
from deepinfer_jax.model.params import initialise
from deepinfer_jax.model.transformer import Model, logits
from deepinfer_jax.numerics import F32
from deepinfer_jax.request import Request, SamplingParams
from examples.train_tiny.replay import Replay as Cut
from examples.train_tiny.replay import nothing_held, replay_pass
from tests.running_engines import BLOCK_TOKENS, KEEP, SEED, Answer, fresh_engine, gather, run, tiny_model

# Logits may differ by 2e-4, and then log-probabilities by twice that, as their normaliser moves too. Log-probabilities
# are held to the bound of logits all the same.
TOLERANCE = 2e-4
CLEAR_MARGIN = 1e-3


def log_softmax(scores: np.ndarray) -> np.ndarray:
    scores = scores.astype(np.float64)
    highest = scores.max(axis=-1, keepdims=True)
    return scores - highest - np.log(np.exp(scores - highest).sum(axis=-1, keepdims=True))


def worst_difference(answer: Answer, wanted: np.ndarray) -> float:
    """Between reported log-probabilities and ``wanted`` ``[generated vocabulary]``, at all reported tokens."""
    assert len(answer.logprobs) == len(wanted)
    return max(
        (
            abs(value - row[token])
            for reported, row in zip(answer.logprobs, wanted, strict=True)
            for token, value in ((reported.token, reported.logprob), *reported.top)
        ),
        default=0.0,
    )


CONTEXT = 96
passed = jax.jit(replay_pass, static_argnames=("config",))


@functools.cache
def whole_model() -> Model:
    """The weights of the tiny model as they are drawn, before they are laid out for the engine."""
    return initialise(Model.describe(tiny_model("f32")[0]), jax.random.key(SEED), F32)


@functools.cache
def raw_scores(tokens: tuple[int, ...], replays: tuple[int, ...], prompt: int, keep: int | None) -> np.ndarray:
    """Scores ``[generated vocabulary]`` behind a prompt, of which ``tokens`` generated the rest.

    Entries of tokens from one hit of the list on, up to the next, are those of a pass that held the entries before and
    saw one window of them again; those below the first hit are exact. No entry depends on where a prompt ended, nor on
    rows of decoder layers, so that it is all the same which request wrote it, as its prompt's token or as its answer's.
    """
    config = tiny_model("f32")[0]
    padded = jnp.asarray([[*tokens, *[0] * (CONTEXT - len(tokens))]], jnp.int32)
    held = nothing_held(padded, config)
    for hit in (0, *replays[:-1]) if replays else ():
        _, held = passed(whole_model(), padded, held, Cut(hit).cuts(prompt, config.sliding_window), config)
    cuts = Cut(replays[-1] if replays else 0, keep).cuts(prompt, config.sliding_window)
    hidden, _ = passed(whole_model(), padded, held, cuts, config)
    return np.asarray(logits(whole_model(), hidden[0, prompt - 1 : len(tokens) - 1]))


def oracle(tokens: tuple[int, ...], replays: tuple[int, ...], prompt: int, keep: int | None) -> np.ndarray:
    """Log-probabilities ``[generated vocabulary]``, see :func:`raw_scores`."""
    return log_softmax(raw_scores(tokens, replays, prompt, keep))


def check(request: Request, answer: Answer, decoder: str) -> None:
    """A finished answer against the oracle: log-probabilities, and tokens where the oracle's choice is clear."""
    assert answer.last.finish_reason == "length"
    cut = decoder != "off" and request.params.prompt_logprobs is None
    wanted = oracle(
        (*request.prompt, *answer.tokens),
        answer.last.receipt.replays,
        len(request.prompt),
        KEEP if cut else None,
    )
    worst = worst_difference(answer, wanted)
    assert worst <= TOLERANCE, answer.last.receipt
    second, first = np.sort(wanted, axis=-1)[:, -2:].T
    clear = first - second >= CLEAR_MARGIN
    np.testing.assert_array_equal(np.asarray(answer.tokens)[clear], wanted.argmax(axis=-1)[clear])


def greedy(count: int, **changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": count, "temperature": 0.0, "ignore_eos": True, "logprobs": 20} | changes)


def stream(seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 95, CONTEXT).tolist())


class Traffic:
    """Seeded requests that share beginnings, come back with their answers, and stand in each other's way."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.random = engine, np.random.default_rng(seed)
        self.streams = [stream(seed * 10 + number) for number in range(2)]
        self.requests: dict[int, Request] = {}
        self.answers: dict[tuple[int, int], Answer] = {}

    def run(self, count: int) -> list[tuple[Request, Answer]]:
        """So many requests to their end."""
        for _ in range(count):
            request = self.next_request()
            self.requests[self.engine.submit(request)] = request
            for _ in range(self.random.integers(0, 20)):
                gather(self.answers, self.engine.step())
        while self.engine.busy:
            gather(self.answers, self.engine.step())
        assert self.engine.books.used_blocks == 0
        return [(self.requests[number], answer) for (number, _), answer in self.answers.items()]

    def next_request(self) -> Request:
        random, count = self.random, int(self.random.integers(1, 40))
        done = [key for key, answer in self.answers.items() if answer.last]
        if done and random.random() < 0.6:
            number, branch = done[random.integers(len(done))]
            prompt = (*self.requests[number].prompt, *self.answers[number, branch].tokens)
            prompt = prompt[: random.integers(len(prompt) // 2, len(prompt) + 1)]
            prompt += self.streams[0][: random.integers(1, 20)]
        else:
            prompt = self.streams[random.integers(len(self.streams))][: random.integers(1, CONTEXT)]
        # A few read no cache, so that exact blocks stand beside bounded ones of the same tokens.
        kind = random.random()
        changes = {"n": 2} if kind < 0.1 else {"prompt_logprobs": 0} if kind < 0.2 else {}
        return Request(prompt[: CONTEXT - count], greedy(count, **changes), read_cache=kind < 0.9)


CELLS = [(decoder, checkpoints) for decoder in ("off", "compact") for checkpoints in (0, 2)]


@pytest.mark.parametrize(("decoder", "checkpoints"), CELLS)
def test_answers_among_traffic_are_those_of_whole_sequences(decoder, checkpoints):
    """Numerics f32, deterministic, bounded replay, decoder replay and held window checkpoints as named."""
    seen: Counter[str] = Counter()
    for seed, way in enumerate(("snapshot", "recompute") * 2):
        engine = fresh_engine("f32", decoder, mode="bounded", preemption=way, window_checkpoints=checkpoints)
        for request, answer in Traffic(engine, seed).run(40):
            check(request, answer, decoder)
            receipt = answer.last.receipt
            seen["chains"] += len(receipt.replays) > 1
            seen["gave way"] += bool(receipt.preemptions)
            seen["gave way behind a replay"] += bool(receipt.preemptions and receipt.replays)
            held = receipt.hit_tokens > BLOCK_TOKENS and receipt.hit_tokens not in receipt.replays
            seen["windows held"] += held and answer.last.branch == 0
            seen["unlike exact"] += unlike_exact(request, answer)
    for what in ("chains", "gave way", "gave way behind a replay", "unlike exact"):
        assert seen[what], what
    assert bool(seen["windows held"]) == bool(checkpoints)


def unlike_exact(request: Request, answer: Answer) -> bool:
    """Whether an answer would fail the check if its replays were left out."""
    exact = oracle((*request.prompt, *answer.tokens), (), len(request.prompt), None)
    return worst_difference(answer, exact) > 5 * TOLERANCE


@pytest.mark.parametrize("decoder", ["off", "compact"])
@pytest.mark.parametrize("checkpoints", [0, 3])
def test_requests_that_give_way_behind_a_hit_go_on_where_they_were(decoder, checkpoints):
    """Numerics f32, deterministic, bounded replay, decoder replay and held window checkpoints as named.

    Three hits of 48 tokens grow to six blocks each, of which there are 13.
    """
    engine = fresh_engine("f32", decoder, mode="bounded", preemption="snapshot", window_checkpoints=checkpoints)
    streams = [stream(seed) for seed in (21, 22, 23)]
    for tokens in streams:
        run(engine, [Request(tokens[:33], greedy(1))])
        run(engine, [Request(tokens[:49], greedy(1))])
    requests = [Request(tokens[:60], greedy(34)) for tokens in streams]
    answers = run(engine, requests)
    receipts = [answer.last.receipt for answer in answers]
    assert [receipt.hit_tokens for receipt in receipts] == [48] * 3
    assert any(receipt.preemptions for receipt in receipts)
    if not checkpoints:
        assert [receipt.replays for receipt in receipts] == [(32, 48)] * 3
    for request, answer in zip(requests, answers, strict=True):
        check(request, answer, decoder)


def test_a_hit_does_not_join_exact_blocks_to_those_behind_an_earlier_replay():
    """Numerics f32, deterministic, bounded replay, decoder replay off.

    Blocks of tokens 32 to 64 are there twice: behind a hit of 32, and exact. What follows them descends from the first.
    """
    tokens = stream(4)
    engine = fresh_engine("f32", mode="bounded", window_checkpoints=0)
    run(engine, [Request(tokens[:41], greedy(1))])
    run(engine, [Request(tokens[:81], greedy(1))])
    run(engine, [Request(tokens[:65], greedy(1), read_cache=False)])
    request = Request(tokens[:88], greedy(8))
    (answer,) = run(engine, [request])
    receipt = answer.last.receipt
    check(request, answer, "off")
    assert (receipt.hit_tokens, receipt.replays) == (64, (64,))


def test_masked_rows_and_kept_rows_alone_give_the_same_bits():
    """Numerics f32, deterministic, bounded replay, decoder replay mask and compact."""
    answers = []
    for decoder in ("mask", "compact"):
        engine = fresh_engine("f32", decoder, mode="bounded", preemption="snapshot", window_checkpoints=0)
        answers.append([answer for _, answer in Traffic(engine, 7).run(25)])
    for mask, compact in zip(*answers, strict=True):
        assert mask.tokens == compact.tokens
        assert mask.logprobs == compact.logprobs
        assert mask.last.receipt == dataclasses.replace(compact.last.receipt, seed=mask.last.receipt.seed)
    assert any(answer.last.receipt.replays for answer in answers[0])
