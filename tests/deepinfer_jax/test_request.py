"""What is asked for, field by field: everything in the documented range is taken, everything else one sentence.

No model runs; one test asks an engine.
"""

import dataclasses
import inspect
import math

import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.request import (
    LARGEST_SEED,
    MOST_BIASES,
    MOST_BRANCHES,
    MOST_LOGPROBS,
    MOST_STOP_IDS,
    ImageSpan,
    Request,
    SamplingParams,
)
from tests.engines import tiny_configuration
from tests.golden import DATA
from tests.running_engines import fresh_engine

CONFIG = ModelConfig.from_dict(tiny_configuration())
VISION = ModelConfig.from_directory(DATA / "tiny-a" / "bf16")
VOCABULARY = "0 to 95, the ids of this model's vocabulary"
HUGE = 1 << 70

# What each numeric field accepts, in the words of its refusal, and values inside and outside.
RANGES = {
    "max_tokens": ("a whole number, 0 or more", (0, 1, HUGE), (-1, 1.0, True, None, "4")),
    "temperature": ("a number from 0 to 100", (0.0, 1e-9, 100.0), (-1e-9, 100.5, math.nan, math.inf, True, None, "1")),
    "top_k": ("a whole number, 0 or more", (0, 1, HUGE), (-1, 2.0, math.nan, False)),
    "top_p": ("a number above 0 to 1", (1e-9, 1.0), (0.0, -0.5, 1.0001, math.nan, math.inf, True)),
    "min_p": ("a number from 0 to 1", (0.0, 1.0), (-1e-9, 1.0001, math.nan, -math.inf, False)),
    "presence_penalty": ("a number from -2 to 2", (-2.0, 0.0, 2.0), (-2.001, 2.001, math.nan, True)),
    "frequency_penalty": ("a number from -2 to 2", (-2.0, 0.0, 2.0), (-2.001, 2.001, math.nan, True)),
    "repetition_penalty": ("a number above 0 to 100", (1e-6, 1.0, 100.0), (0.0, -1.0, 100.1, math.nan, math.inf, True)),
    "min_tokens": ("a whole number, 0 or more", (0, 1, 256), (-1, 1.0, True)),
    "seed": (f"a whole number, 0 to {LARGEST_SEED}", (None, 0, LARGEST_SEED), (-1, LARGEST_SEED + 1, 0.0, True)),
    "n": (f"a whole number, 1 to {MOST_BRANCHES}", (1, MOST_BRANCHES), (0, -1, MOST_BRANCHES + 1, 1.0, True)),
    "logprobs": (
        f"a whole number, 0 to {MOST_LOGPROBS}",
        (None, 0, MOST_LOGPROBS),
        (-1, MOST_LOGPROBS + 1, 1.0, False),
    ),
    "prompt_logprobs": (
        f"a whole number, 0 to {MOST_LOGPROBS}",
        (None, 0, MOST_LOGPROBS),
        (-1, MOST_LOGPROBS + 1, 1.0, False),
    ),
}
inside = [(name, value) for name, (_, accepted, _) in RANGES.items() for value in accepted]
outside = [(name, value, accepted) for name, (accepted, _, refused) in RANGES.items() for value in refused]


def params_of(**fields) -> SamplingParams:
    """As a caller makes them, for whom nothing checks types before the fields' own checks."""
    made = object.__new__(SamplingParams)
    inspect.unwrap(SamplingParams.__init__)(made, **fields)
    return made


def check(params, prompt, config=CONFIG) -> None:
    inspect.unwrap(SamplingParams.check)(params, prompt, config)


def refusal(action) -> str:
    with pytest.raises(InputError) as refused:
        action()
    return str(refused.value)


def test_every_numeric_field_is_in_the_table():
    others = {"logit_bias", "stop_ids", "stop", "ignore_eos"}
    assert {field.name for field in dataclasses.fields(SamplingParams)} == RANGES.keys() | others


@pytest.mark.parametrize(("name", "value"), inside)
def test_values_of_the_range_are_taken(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value", "accepted"), outside)
def test_other_values_are_refused_with_name_value_and_range(name, value, accepted):
    assert refusal(lambda: params_of(**{name: value})) == f"input '{name}' is {value!r}; accepted: {accepted}"


def test_more_least_tokens_than_most_are_refused():
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5
    sentence = "input 'min_tokens' is 6; accepted: at most max_tokens, 5"
    assert refusal(lambda: SamplingParams(max_tokens=5, min_tokens=6)) == sentence


def test_stop_strings_are_not_empty():
    assert SamplingParams(stop=("a", "\n")).stop == ("a", "\n")
    sentence = "input 'stop' is ('a', ''); accepted: strings that are not empty"
    assert refusal(lambda: SamplingParams(stop=("a", ""))) == sentence


def test_so_many_stop_ids_and_no_more():
    """The model's end token takes one of the places."""
    SamplingParams(stop_ids=frozenset(range(MOST_STOP_IDS - 1)))
    sentence = f"input 'stop_ids' is '{MOST_STOP_IDS} tokens'; accepted: at most {MOST_STOP_IDS - 1}"
    assert refusal(lambda: SamplingParams(stop_ids=frozenset(range(MOST_STOP_IDS)))) == sentence


def test_so_many_biases_and_no_more():
    SamplingParams(logit_bias=dict.fromkeys(range(MOST_BIASES), 1.0))
    sentence = f"input 'logit_bias' is '{MOST_BIASES + 1} tokens'; accepted: at most {MOST_BIASES}"
    assert refusal(lambda: SamplingParams(logit_bias=dict.fromkeys(range(MOST_BIASES + 1), 1.0))) == sentence


@pytest.mark.parametrize("bias", [100.5, -100.5, math.nan, math.inf, True])
def test_biases_have_a_range(bias):
    SamplingParams(logit_bias={3: 100.0, 4: -100.0})
    sentence = f"input 'logit_bias[3]' is {bias!r}; accepted: a number from -100 to 100"
    assert refusal(lambda: params_of(logit_bias={3: bias})) == sentence


def test_penalties_that_change_nothing_are_none():
    assert not SamplingParams().penalised
    changes = ({"repetition_penalty": 1.1}, {"presence_penalty": -0.5}, {"frequency_penalty": 0.5})
    assert all(SamplingParams(**change).penalised for change in changes)


@pytest.mark.parametrize("token", [-1, 96, HUGE, 1.0, True, np.int64(96), np.bool_(True), "5"])
def test_ids_outside_the_vocabulary_are_refused_wherever_they_stand(token):
    value = f"is {token!r}; accepted: {VOCABULARY}"
    assert refusal(lambda: check(SamplingParams(), (3, token))) == f"input 'token id' {value}"
    stops = params_of(stop_ids=frozenset({token}))
    assert refusal(lambda: check(stops, (3,))) == f"input 'stop_ids' {value}"
    biased = params_of(logit_bias={token: 1.0})
    assert refusal(lambda: check(biased, (3,))) == f"input 'logit_bias' {value}"


def test_all_ids_of_the_vocabulary_are_taken():
    ids = tuple(range(CONFIG.vocab_size))
    params = SamplingParams(max_tokens=1, stop_ids=frozenset({0, 95}), logit_bias={0: 1.0, 95: 1.0})
    params.check(ids, CONFIG)
    check(params, tuple(np.asarray(ids)))


def test_a_prompt_is_not_empty():
    sentence = "input 'prompt' is []; accepted: at least one token"
    assert refusal(lambda: SamplingParams().check((), CONFIG)) == sentence


def test_prompt_and_answer_fill_every_position_and_no_more():
    most = CONFIG.max_position_embeddings
    SamplingParams(max_tokens=most - 10).check((3,) * 10, CONFIG)
    SamplingParams(max_tokens=0).check((3,) * most, CONFIG)
    sentence = (
        f"input 'prompt and new tokens' is {most + 1}; accepted: at most max_position_embeddings {most} "
        "(shorten the prompt or ask for fewer tokens)"
    )
    assert refusal(lambda: SamplingParams(max_tokens=most - 9).check((3,) * 10, CONFIG)) == sentence
    assert refusal(lambda: SamplingParams(max_tokens=0).check((3,) * (most + 1), CONFIG)) == sentence


@pytest.mark.parametrize("deadline", [0.0, -1.0, math.nan])
def test_a_deadline_lies_ahead(deadline):
    Request((3,), SamplingParams(max_tokens=1), deadline=1e-3).check(CONFIG)
    request = Request((3,), SamplingParams(max_tokens=1), deadline=deadline)
    assert refusal(lambda: request.check(CONFIG)) == f"input 'deadline' is {deadline}; accepted: seconds above 0"


def span(start, stop, *, length=None, width=None):
    length, width = length or stop - start, width or VISION.hidden_size
    return ImageSpan(start, stop, b"image", np.zeros((length, width), np.float32))


def pictured(*spans):
    return Request((3,) * 10, SamplingParams(max_tokens=1), images=spans)


def test_images_lie_inside_the_prompt_in_order():
    pictured(span(0, 3), span(3, 10)).check(VISION)
    for bad, end in (((0, 11), 0), ((4, 4), 0), ((-1, 2), 0), ((5, 4), 0)):
        sentence = f"input 'image span' is {bad}; accepted: inside the prompt and behind the image before, {end} to 10"
        assert refusal(lambda bad=bad: pictured(span(*bad, length=1)).check(VISION)) == sentence
    sentence = "input 'image span' is (2, 5); accepted: inside the prompt and behind the image before, 3 to 10"
    assert refusal(lambda: pictured(span(0, 3), span(2, 5)).check(VISION)) == sentence


def test_an_image_has_an_embedding_for_each_of_its_positions():
    width = VISION.hidden_size
    for length, wide in ((4, width), (3, width + 1)):
        sentence = f"input 'image embeddings' is ({length}, {wide}); accepted: shape (3, {width}), of the span"
        request = pictured(span(2, 5, length=length, width=wide))
        assert refusal(lambda request=request: request.check(VISION)) == sentence


def test_a_model_without_vision_takes_no_images():
    sentence = "input 'images' is 1; accepted: none, as this model has no vision"
    assert refusal(lambda: pictured(span(0, 3, width=CONFIG.hidden_size)).check(CONFIG)) == sentence


ENGINE_REFUSALS = {
    "prompt": Request(()),
    "token id": Request((3, 96)),
    "stop_ids": Request((3,), SamplingParams(max_tokens=1, stop_ids=frozenset({96}))),
    "logit_bias": Request((3,), SamplingParams(max_tokens=1, logit_bias={96: 1.0})),
    "stop": Request((3,), SamplingParams(max_tokens=1, stop=("a",))),
    "deadline": Request((3,), SamplingParams(max_tokens=1), deadline=0.0),
    "images": pictured(span(0, 3, width=CONFIG.hidden_size)),
    # Of this engine's context of 96 tokens, not of the model's.
    "prompt and new tokens": Request((3,) * 90, SamplingParams(max_tokens=7)),
}


@pytest.mark.parametrize("key", ENGINE_REFUSALS)
def test_an_engine_refuses_before_anything_is_queued(key):
    engine = fresh_engine("f32")
    for ask in (
        engine.check,
        engine.submit,
        lambda request: engine.generate([Request((3,), SamplingParams(max_tokens=1)), request]),
    ):
        with pytest.raises(InputError) as refused:
            ask(ENGINE_REFUSALS[key])
        assert refused.value.key == key
        assert not engine.busy
    assert engine.metrics.value("waiting_requests") == 0


def test_the_engines_own_context_is_filled_and_named():
    engine = fresh_engine("f32")
    engine.check(Request((3,) * 90, SamplingParams(max_tokens=6)))
    sentence = "input 'prompt and new tokens' is 97; accepted: at most max_context 96 (ask for fewer tokens)"
    assert refusal(lambda: engine.check(ENGINE_REFUSALS["prompt and new tokens"])) == sentence


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_an_engine_reports_so_many_likeliest_tokens_and_no_more(name):
    engine = fresh_engine("f32", most_logprobs=5)
    engine.check(Request((3,), SamplingParams(max_tokens=1, **{name: 5})))
    sentence = f"input '{name}' is 6; accepted: at most most_logprobs 5 of this engine"
    request = Request((3,), SamplingParams(max_tokens=1, **{name: 6}))
    assert refusal(lambda: engine.check(request)) == sentence
