"""Keys that are not finite: they end their own request before anyone can find the blocks they are in.

Deterministic f32 over a tiny model whose embedding of one token is NaN; replay mode exact.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache.store import MemoryStore
from deepinfer_jax.request import Request, SamplingParams
from tests.running_engines import BLOCK_TOKENS, fresh_engine, run, tiny_model

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=3)
BAD = 50
CHUNK = 32  # prompt tokens of a step


@pytest.fixture
def engine(monkeypatch):
    """With a store, and the poisoned parameters."""
    _, _, params = tiny_model("f32")
    store = MemoryStore(1 << 30)
    engine = fresh_engine("f32", store=store)
    poisoned = dataclasses.replace(params, embedding=params.embedding.at[BAD].set(jnp.nan))
    monkeypatch.setattr(engine._device, "_params", poisoned)
    yield engine, store
    engine.close()


def tokens(length: int, seed: int = 1) -> list[int]:
    drawn = np.random.default_rng(seed).integers(3, 95, length)
    return np.where(drawn == BAD, BAD + 1, drawn).tolist()


def with_bad(place: int, length: int = 88) -> Request:
    prompt = tokens(length)
    prompt[place] = BAD
    return Request(tuple(prompt), GREEDY)


@pytest.mark.parametrize(("place", "computed"), [(0, 64), (3, 64), (20, 64), (40, 88), (87, 89)])
def test_nan_anywhere_in_a_prompt_ends_the_request_at_its_step(place, computed, engine):
    """A step behind the bad one is on its way by then: another chunk, or the first token's row.

    Selection passes NaN by and windows forget it: behind an early one the scores of the prompt's end are finite.
    """
    engine, store = engine
    (answer,) = run(engine, [with_bad(place)])
    assert (answer.last.finish_reason, answer.tokens) == ("error", [])
    assert answer.last.error == "the model's cached keys are not finite"
    sound = place // CHUNK * CHUNK
    assert answer.last.receipt.computed_tokens == computed
    assert engine.books.pool.cached(0) == sound // BLOCK_TOKENS
    assert engine.books.used_blocks == 0
    engine.flush()
    assert store.counters().values == sound // BLOCK_TOKENS


def test_others_in_the_step_go_on_and_find_nothing_of_it(engine):
    engine, store = engine
    prompts = [tuple(tokens(30, seed)) for seed in (2, 3)]
    expected = [run(fresh_engine("f32"), [Request(prompt, GREEDY)])[0] for prompt in prompts]
    (first, bad, second) = run(engine, [Request(prompts[0], GREEDY), with_bad(5, 40), Request(prompts[1], GREEDY)])
    assert bad.last.finish_reason == "error"
    for answer, wanted in zip((first, second), expected, strict=True):
        assert (answer.tokens, answer.logprobs) == (wanted.tokens, wanted.logprobs)
    (again,) = run(engine, [with_bad(5, 40)])
    assert (again.last.finish_reason, again.last.receipt.hit_tokens) == ("error", 0)
    engine.flush()
    assert store.counters().values == 4


def test_looking_at_the_pages_copies_none_of_them():
    engine = fresh_engine("f32")
    state = engine._device._state
    shapes = {",".join(map(str, pool.shape)) for pool in jax.tree.leaves((state.main, state.index))}
    for shape in engine._device.shapes:
        text = engine._device._programs["forward", shape].as_text()
        copies = [line for line in text.splitlines() if " copy(" in line]
        assert not [line for line in copies if any(f"[{shape}]" in line for shape in shapes)]
