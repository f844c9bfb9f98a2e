"""An engine for one request at a time, as commands use it, against golden greedy chains and golden logits.

Numerics f32, replay exact, not deterministic.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.engine import Engine
from deepinfer_jax.engine_build import build_engine
from deepinfer_jax.numerics import F32
from deepinfer_jax.replay import Replay
from deepinfer_jax.request import Completion, Request, SamplingParams
from deepinfer_jax.runtime.batch import StepShape
from deepinfer_jax.runtime.sampler import gumbel_noise, seed_words
from deepinfer_jax.settings import EngineSettings
from deepinfer_jax.text.tokenizer import Tokenizer
from tests.checkpoints import golden_model, prompts
from tests.golden import DATA, document, tensors

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CHAINS = document("tiny-a/greedy_f32.json")
# Scores closer than this could change places by rounding; design, section 3.
CLEAR = 1e-3
# Room for prompt and answer, the same for all tests, so that they share two compiled steps.
ROOM = 250
TILE = EngineSettings.block_tokens
DECODE, PREFILL = StepShape(1), StepShape(0, 1, TILE)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(DATA / "tiny-a" / "bf16")


def new_engine(**changes) -> Engine:
    config, params = golden_model("bf16", "f32")
    return build_engine(params, config, F32, EngineSettings.for_one(ROOM), tokenizer=tokenizer(), **changes)


@functools.cache
def shared_engine() -> Engine:
    return new_engine()


def complete(prompt, count, engine=None, **params) -> Completion:
    asked = SamplingParams(**{"max_tokens": count, "temperature": 0.0, "ignore_eos": True} | params)
    ((answer,),) = (engine or shared_engine()).generate([Request(tuple(prompt), asked, read_cache=False)])
    return answer


def tokens_after(prompt, count, **params) -> list[int]:
    return list(complete(prompt, count, **params).tokens)


@functools.cache
def golden_logits():
    return tensors("tiny-a/logits_f32.safetensors")


def test_prompts_of_similar_length_ask_for_the_same_shapes():
    settings = [EngineSettings.for_one(tokens) for tokens in (129, 130, 200, 256)]
    assert len(set(settings)) == 1
    assert (settings[0].blocks, settings[0].max_context) == (2, 256)
    assert [EngineSettings.for_one(tokens).blocks for tokens in (1, 128, 257, 512, 513)] == [1, 1, 4, 4, 8]
    assert settings[0].shapes() == (DECODE, PREFILL)


def test_a_prefill_step_of_one_request_keeps_a_row_for_compact_replay():
    settings = dataclasses.replace(EngineSettings.for_one(ROOM), replay=Replay("exact", "compact"))
    assert all(shape.kept_rows for shape in settings.shapes())


def test_the_first_token_does_not_wait_for_the_compilation_of_a_decode_step():
    engine = new_engine()
    device = engine._device
    assert not device.ready(PREFILL)
    asked = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    engine.submit(Request(tuple(prompts()["pw"]), asked))
    news = []
    while not news:
        news = engine.step()
    assert device.ready(PREFILL)
    assert not device.ready(DECODE)
    while engine.busy:
        news += engine.step()
    assert [token for output in news for token in output.tokens] == CHAINS["pw"]["tokens"][:3]
    assert device.ready(DECODE)


def test_the_golden_prompts_cover_the_ways_of_prefill():
    """A single token, less than a tile, and several tiles of which the last is partly filled."""
    lengths = sorted(len(prompt) for prompt in prompts().values())
    assert lengths[0] == 1
    assert lengths[-1] > TILE
    assert prompts().keys() == CHAINS.keys()
    assert len(CHAINS) == 8


@pytest.mark.parametrize("name", CHAINS)
def test_greedy_tokens_equal_the_golden_chain(name):
    chain = CHAINS[name]
    assert min(chain["margins"]) > CLEAR
    assert tokens_after(prompts()[name], len(chain["tokens"])) == chain["tokens"]


@pytest.mark.parametrize("length", [TILE - 1, TILE, TILE + 1, TILE + 2])
def test_any_length_beside_the_tile_size(length):
    """The next token after a prefix is the arg-max of the golden logits at its end."""
    prompt, logits = prompts()["p200"][:length], golden_logits()["p200"][length - 1]
    best = np.sort(logits)
    assert best[-1] - best[-2] > CLEAR
    assert tokens_after(prompt, 1) == [logits.argmax()]


@pytest.mark.parametrize("place", [0, 1, 6])
def test_a_stop_id_ends_the_answer_and_is_no_part_of_it(place):
    chain = CHAINS["pw"]["tokens"]
    stop = chain[place]
    answer = complete(prompts()["pw"], 32, stop_ids=frozenset({stop, 511}))
    assert list(answer.tokens) == chain[: chain.index(stop)]
    assert (answer.finish_reason, answer.matched) == ("stop", stop)


def test_no_tokens_on_request():
    assert tokens_after(prompts()["p2"], 0) == []


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


def test_text_ends_before_a_stop_string():
    whole = tokenizer().decode(CHAINS["pw"]["tokens"])
    stop = whole[5:8]
    answer = complete(prompts()["pw"], 32, stop=("absent", stop))
    assert answer.text == whole[: whole.index(stop)]
    assert (answer.finish_reason, answer.matched) == ("stop", stop)
    assert tokenizer().decode(list(answer.tokens)).startswith(whole[: whole.index(stop) + len(stop)])


def test_an_id_without_a_spelling_ends_its_request_alone():
    """A vocabulary may be larger than its tokenizer's."""
    chain = CHAINS["pw"]["tokens"]
    known = dataclasses.replace(tokenizer(), vocabulary_size=max(chain[:4]) + 1)
    assert max(chain) > max(chain[:4])
    engine = Engine(
        (shared := shared_engine())._device,
        shared.config,
        shared.settings,
        blocks=shared.settings.blocks,
        form=shared.receiver.form,
        costs={},
        tokenizer=known,
    )
    answer = complete(prompts()["pw"], 32, engine=engine)
    unknown = next(place for place, token in enumerate(chain) if token >= known.vocabulary_size)
    assert (list(answer.tokens), answer.finish_reason) == (chain[:unknown], "error")
    assert answer.error.startswith(f"input 'token id' is {chain[unknown]}; accepted: the ids of ")
    assert not engine.busy
    assert list(complete(prompts()["pw"], unknown, engine=engine).tokens) == chain[:unknown]
