"""Generation end to end against golden greedy chains and golden logits.

Numerics f32, replay exact, not deterministic.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.errors import InputError
from deepinfer_jax.generation import PREFILL_ROWS, Sampling, check_prompt, generate
from deepinfer_jax.numerics import F32
from deepinfer_jax.runtime.sampler import gumbel_noise, seed_words
from tests.checkpoints import golden_model, prompts
from tests.golden import document, tensors

CHAINS = document("tiny-a/greedy_f32.json")
# Scores closer than this could change places by rounding; design, section 3.
CLEAR = 1e-3
# Room for prompt and answer: as all tests ask for the same room, all share two compiled steps.
ROOM = 250


def answer(prompt, count, **sampling):
    """The tokens that ``generate`` yields where it may yield ``count``."""
    config, params = golden_model("bf16", "f32")
    return generate(params, config, F32, prompt, Sampling(count, **sampling))


def tokens_after(prompt, count, **sampling):
    """The first ``count`` tokens of an answer that could be longer."""
    return list(itertools.islice(answer(prompt, ROOM - len(prompt), **sampling), count))


@functools.cache
def golden_logits():
    return tensors("tiny-a/logits_f32.safetensors")


def refusal(action):
    with pytest.raises(InputError) as refused:
        action()
    return str(refused.value)


def test_the_golden_prompts_cover_the_ways_of_prefill():
    """A single token, less than a chunk, and several chunks of which the last is partly filled."""
    lengths = sorted(len(prompt) for prompt in prompts().values())
    assert lengths[0] == 1
    assert lengths[-1] > PREFILL_ROWS
    assert prompts().keys() == CHAINS.keys()
    assert len(CHAINS) == 8


@pytest.mark.parametrize("name", CHAINS)
def test_greedy_tokens_equal_the_golden_chain(name):
    chain = CHAINS[name]
    assert min(chain["margins"]) > CLEAR
    assert tokens_after(prompts()[name], len(chain["tokens"])) == chain["tokens"]


@pytest.mark.parametrize("length", [PREFILL_ROWS - 1, PREFILL_ROWS, PREFILL_ROWS + 1, PREFILL_ROWS + 2])
def test_any_length_beside_the_chunk_size(length):
    """The next token after a prefix is the arg-max of the golden logits at its end."""
    prompt, logits = prompts()["p200"][:length], golden_logits()["p200"][length - 1]
    best = np.sort(logits)
    assert best[-1] - best[-2] > CLEAR
    assert tokens_after(prompt, 1) == [logits.argmax()]


def test_tokens_are_yielded_one_by_one_and_end():
    """A long prompt, so that its few tokens ask for the same room as the other tests."""
    tokens = answer(prompts()["p200"], 3)
    for expected in CHAINS["p200"]["tokens"][:3]:
        assert next(tokens) == expected
    with pytest.raises(StopIteration):
        next(tokens)


@pytest.mark.parametrize("place", [0, 1, 6])
def test_a_stop_id_ends_the_answer_and_is_no_part_of_it(place):
    chain = CHAINS["pw"]["tokens"]
    stop = chain[place]
    assert tokens_after(prompts()["pw"], 32, stop_ids=frozenset({stop, 511})) == chain[: chain.index(stop)]


def test_no_tokens_on_request():
    assert list(answer(prompts()["p2"], 0)) == []


def test_the_sampled_token_is_the_noisy_arg_max_of_the_golden_logits():
    """The noise belongs to the absolute position that is sampled: the prompt's length for the first token."""
    clear = 0
    for name, prompt in prompts().items():
        for seed in range(4):
            noise = gumbel_noise(jnp.asarray(seed_words(seed)[None]), jnp.asarray([len(prompt)], jnp.int32), 512)[0]
            scores = golden_logits()[name][-1] / 1.5 + np.asarray(noise)
            best = np.sort(scores)
            if best[-1] - best[-2] > CLEAR:
                clear += 1
                assert tokens_after(prompt, 1, temperature=1.5, seed=seed) == [scores.argmax()], (name, seed)
    assert clear >= 30


def test_a_seed_names_its_answer():
    """Same seed, same tokens; other seeds, other tokens; and every prefix of an answer continues to it."""
    prompt = prompts()["pw_plus1"]
    warm = functools.partial(tokens_after, prompt, temperature=1.0)
    first = warm(12, seed=7)
    assert warm(12, seed=7) == first
    assert warm(5, seed=7) == first[:5]
    assert tokens_after([*prompt, *first[:4]], 8, temperature=1.0, seed=7) == first[4:]
    answers = {tuple(warm(12, seed=seed)) for seed in (7, 8, 1 << 32, (1 << 64) - 1)}
    assert len(answers) == 4
    assert first != tokens_after(prompt, 12)


def test_a_seed_means_nothing_to_a_greedy_answer():
    assert tokens_after(prompts()["p2"], 8, seed=99) == CHAINS["p2"]["tokens"][:8]


def test_parameters_survive_an_answer():
    """A step donates its state; nothing else may be gone after it."""
    _, params = golden_model("bf16", "f32")
    tokens_after(prompts()["p1"], 2)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("prompt", "count", "sentence"),
    [
        ([], 4, "input 'prompt' is []; accepted: at least one token"),
        ([5, 512, -1], 4, "input 'token id' is 512; accepted: 0 to 511, the ids of this model's vocabulary"),
        ([5, -1], 0, "input 'token id' is -1; accepted: 0 to 511, the ids of this model's vocabulary"),
        (
            [1] * 10,
            1015,
            "input 'prompt and new tokens' is 1025; accepted: at most max_position_embeddings 1024 "
            "(shorten the prompt or ask for fewer tokens)",
        ),
    ],
    ids=["empty", "beyond the vocabulary", "negative", "too long"],
)
def test_prompts_that_cannot_run_are_refused(prompt, count, sentence):
    config, _ = golden_model("bf16", "f32")
    assert refusal(lambda: check_prompt(prompt, config, count)) == sentence
    assert refusal(lambda: list(answer(prompt, count))) == sentence


def test_a_prompt_may_fill_every_position():
    config, _ = golden_model("bf16", "f32")
    check_prompt([511, 0] * 400, config, config.max_position_embeddings - 800)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": -1}, "input 'max_tokens' is -1; accepted: 0 or more"),
        ({"temperature": -0.5}, "input 'temperature' is -0.5; accepted: 0 (greedy) to 100"),
        ({"temperature": 100.5}, "input 'temperature' is 100.5; accepted: 0 (greedy) to 100"),
        ({"temperature": math.nan}, "input 'temperature' is nan; accepted: 0 (greedy) to 100"),
        ({"temperature": math.inf}, "input 'temperature' is inf; accepted: 0 (greedy) to 100"),
        ({"seed": -1}, "input 'seed' is -1; accepted: 0 to 2^64 - 1"),
        ({"seed": 1 << 64}, f"input 'seed' is {1 << 64}; accepted: 0 to 2^64 - 1"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_sampling_that_means_nothing_is_refused(fields, sentence):
    assert refusal(lambda: Sampling(**({"max_tokens": 4} | fields))) == sentence
