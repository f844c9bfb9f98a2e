"""Prompts with images through a running engine: golden numbers, however chunks, hits and restarts cut an image.

The golden multimodal prompt has an image at positions 9 to 26; blocks and tiles of 8 tokens cut it at 16 and 24.
Deterministic f32, replay mode exact.
"""

import dataclasses
import functools

import numpy as np
import pytest

from deepinfer_jax.engine import Engine
from deepinfer_jax.engine_build import build_engine
from deepinfer_jax.numerics import F32
from deepinfer_jax.request import ImageSpan, Request, SamplingParams
from deepinfer_jax.settings import EngineSettings
from tests.checkpoints import golden_model
from tests.golden import tensors
from tests.running_engines import Answer, run

pytestmark = pytest.mark.usefixtures("quickly_compiled")

# Logits may differ by 2e-4; log-probabilities are held to the same.
TOLERANCE = 2e-4
CLEAR = 1e-3
BLOCK = 8
SETTINGS = EngineSettings(
    slots=2,
    blocks=60,
    block_tokens=BLOCK,
    max_context=224,
    decode_rows=(2,),
    prefill_tiles=(1,),
    deterministic=True,
    window_checkpoints=2,
    poison=True,
)
GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=20)
GOLDEN = tensors("tiny-a/multimodal.safetensors")
IMAGE = np.flatnonzero(GOLDEN["token_types"] >= 0)
START, STOP = int(IMAGE[0]), int(IMAGE[-1]) + 1
TOKENS = tuple(GOLDEN["input_ids"].tolist())


@functools.cache
def built() -> Engine:
    config, params = golden_model("bf16", "f32")
    return build_engine(params, config, F32, SETTINGS)


def fresh_engine(*, blocks: int = SETTINGS.blocks, **changes) -> Engine:
    """Over an empty state, of which it uses ``blocks``."""
    first = built()
    first._device.reset()
    settings = dataclasses.replace(SETTINGS, **changes)
    return Engine(first._device, first.config, settings, blocks=blocks, form=first.receiver.form, costs=first._costs)


def image(stop: int = STOP, digest: bytes = b"picture", scale: float = 1.0) -> ImageSpan:
    return ImageSpan(START, stop, digest, scale * GOLDEN["embeds_f32"][START:stop])


def prompt(stop: int, params: SamplingParams = GREEDY, **fields) -> Request:
    """The golden prompt up to ``stop``, image and all."""
    return Request(TOKENS[:stop], params, images=(image(min(stop, STOP), **fields),))


def golden_logprobs(position: int) -> np.ndarray:
    scores = GOLDEN["logits_f32"][position].astype(np.float64)
    return scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()


def assert_golden(answer: Answer, position: int) -> None:
    """The first token of an answer is that behind ``position``."""
    wanted, (reported,) = golden_logprobs(position), answer.logprobs
    best = np.sort(wanted)
    assert best[-1] - best[-2] > CLEAR
    assert answer.tokens == [int(wanted.argmax())]
    for token, value in ((reported.token, reported.logprob), *reported.top):
        assert abs(value - wanted[token]) <= TOLERANCE


def test_the_golden_image_crosses_blocks_and_tiles():
    np.testing.assert_array_equal(IMAGE, np.arange(START, STOP))
    assert [border for border in range(BLOCK, len(TOKENS), BLOCK) if START < border < STOP] == [16, 24]


def test_every_row_of_a_prompt_with_an_image_scores_its_token_as_golden():
    asked = dataclasses.replace(GREEDY, prompt_logprobs=20)
    (answer,) = run(fresh_engine(), [prompt(len(TOKENS), asked)])
    assert_golden(answer, len(TOKENS) - 1)
    assert len(answer.prompt_logprobs) == len(TOKENS) - 1
    for position, reported in enumerate(answer.prompt_logprobs):
        wanted = golden_logprobs(position)
        assert reported.token == TOKENS[position + 1]
        for token, value in ((reported.token, reported.logprob), *reported.top):
            assert abs(value - wanted[token]) <= TOLERANCE


@pytest.mark.parametrize("stop", [16, 17, 24, 25, 26])
def test_a_prompt_may_end_anywhere_in_an_image(stop):
    """At 17 and 25 a single image token is left for the last step."""
    (answer,) = run(fresh_engine(), [prompt(stop)])
    assert_golden(answer, stop - 1)


@pytest.mark.parametrize(("stop", "checkpoints", "replayed"), [(25, 0, 24), (25, 2, 0), (26, 0, 24), (47, 0, 40)])
def test_a_hit_may_end_in_an_image(stop, checkpoints, replayed):
    """Windows of the hit are computed again, or held at just its end."""
    engine = fresh_engine(window_checkpoints=checkpoints)
    (cold,) = run(engine, [prompt(stop)])
    (warm,) = run(engine, [prompt(stop)])
    receipt = warm.last.receipt
    assert (receipt.hit_tokens, receipt.replayed_tokens) == ((stop - 1) // BLOCK * BLOCK, replayed)
    assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
    assert_golden(warm, stop - 1)


def test_a_restart_may_begin_in_an_image():
    """A hit of 184 tokens over eleven layers with windows of 16 restarts at 19; Engram looks at tokens 17 and 18."""
    config, _ = golden_model("bf16", "f32")
    tokens = (*TOKENS[:STOP], *np.random.default_rng(5).integers(3, 508, 187 - STOP).tolist())
    asked = dataclasses.replace(GREEDY, max_tokens=4)
    request = Request(tokens, asked, images=(image(),))
    restart = 184 - config.num_hidden_layers * (config.sliding_window - 1)
    assert START < restart - (config.engram.max_ngram_size - 1) < restart < STOP
    engine = fresh_engine(window_checkpoints=0)
    (cold,) = run(engine, [request])
    (warm,) = run(engine, [request])
    assert (warm.last.receipt.hit_tokens, warm.last.receipt.replayed_tokens) == (184, 184 - restart)
    assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)


def test_equal_ids_of_another_image_share_no_block_that_it_reaches():
    """The block before the image is shared; an image of the same digest shares everything."""
    engine = fresh_engine()
    (first,) = run(engine, [prompt(len(TOKENS))])
    (other,) = run(engine, [prompt(len(TOKENS), digest=b"another", scale=-1.0)])
    (same,) = run(engine, [prompt(len(TOKENS))])
    (text,) = run(engine, [Request(TOKENS, GREEDY)])
    assert [answer.last.receipt.hit_tokens for answer in (first, other, same, text)] == [0, 8, 40, 8]
    assert same.logprobs == first.logprobs
    assert first.logprobs not in (other.logprobs, text.logprobs)
    (alone,) = run(fresh_engine(), [prompt(len(TOKENS), digest=b"another", scale=-1.0)])
    assert other.logprobs == alone.logprobs


def test_images_and_texts_share_steps_and_give_way():
    """Three requests in two slots, one with branches behind a prompt that ends in an image: each as it is alone."""
    asked = dataclasses.replace(GREEDY, max_tokens=6)
    requests = [
        prompt(25, dataclasses.replace(asked, n=2, temperature=1.0, seed=4)),
        Request(TOKENS[STOP:], asked),
        prompt(len(TOKENS), asked, digest=b"another", scale=-1.0),
    ]
    together = run(fresh_engine(), requests)
    alone = [answer for request in requests for answer in run(fresh_engine(), [request])]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert [answer.logprobs for answer in together] == [answer.logprobs for answer in alone]


@pytest.mark.parametrize("way", ["recompute", "snapshot"])
def test_a_request_with_an_image_that_gave_way_comes_back(way):
    """Eight blocks for two requests of six: the one that came last gives way."""
    asked = dataclasses.replace(GREEDY, max_tokens=20)
    requests = [Request(TOKENS[STOP:], asked), prompt(25, asked)]
    expected = [run(fresh_engine(), [request])[0] for request in requests]
    answers = run(fresh_engine(blocks=8, preemption=way), requests)
    assert [answer.last.receipt.preemptions > 0 for answer in answers] == [False, True]
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert [answer.logprobs for answer in answers] == [answer.logprobs for answer in expected]
