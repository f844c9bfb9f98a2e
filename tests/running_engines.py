"""Engines over tiny models for tests: one of each kind is built, whose compiled steps all tests of a process share."""

import copy
import dataclasses
import functools

import jax

from deepinfer_jax.bench.model import draw_weights
from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.records import StateFormat
from deepinfer_jax.checkpoint.subset import encoder_only
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine import Engine
from deepinfer_jax.engine_build import build_engine
from deepinfer_jax.model.params import Parameter
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.replay import Replay
from deepinfer_jax.request import Output, Request
from deepinfer_jax.settings import EngineSettings
from tests.engines import tiny_drafting_configuration

BLOCK_TOKENS = 16
# Three layers with windows of 16: 45 tokens before a hit until windows are exact again.
SETTINGS = EngineSettings(
    slots=3,
    blocks=13,
    block_tokens=BLOCK_TOKENS,
    max_context=96,
    decode_rows=(1, 3),
    prefill_tiles=(2,),
    deterministic=True,
    window_checkpoints=2,
    poison=True,
)
KEEP = 16 + 3 + 1
SEED = 3  # of the weights


@functools.cache
def tiny_model(numerics: str) -> tuple[ModelConfig, Numerics, Model]:
    config, chosen = ModelConfig.from_dict(tiny_drafting_configuration()), Numerics.preset(numerics)
    return config, chosen, draw_weights(config, chosen, seed=SEED)


@functools.cache
def built(numerics: str, decoder: str) -> Engine:
    config, chosen, params = tiny_model(numerics)
    settings = dataclasses.replace(SETTINGS, replay=Replay("exact", decoder, KEEP))
    return build_engine(params, config, chosen, settings)


@functools.cache
def receiver(numerics: str, decoder: str) -> Engine:
    """An engine of the same model with other pools, slots, rings and tiles."""
    config, chosen, params = tiny_model(numerics)
    settings = dataclasses.replace(
        SETTINGS, replay=Replay("exact", decoder, KEEP), slots=2, blocks=17, decode_rows=(2,), tile_rows=8, max_drafts=5
    )
    return build_engine(params, config, chosen, settings)


@functools.cache
def encoder(numerics: str, decoder: str) -> Engine:
    """An engine that has the encoder side of the model alone."""
    config, chosen, params = tiny_model(numerics)
    half = jax.tree.map(
        lambda item, leaf: leaf if encoder_only(item, config) else None,
        Model.describe(config),
        params,
        is_leaf=lambda item: isinstance(item, Parameter),
    )
    settings = dataclasses.replace(SETTINGS, replay=Replay("exact", decoder, KEEP), encoder_only=True)
    return build_engine(half, config, chosen, settings)


@functools.cache
def state_format(numerics: str, fingerprint: bytes = bytes(32)) -> StateFormat:
    config, chosen, _ = tiny_model(numerics)
    form = StateFormat.of("", config, chosen, PageLayout.of(config, BLOCK_TOKENS))
    return dataclasses.replace(form, fingerprint=fingerprint)


def fresh_engine(
    numerics: str, decoder: str = "off", clock=None, store=None, build=built, tokenizer=None, **changes
) -> Engine:
    """A new engine over a NaN-filled state of its own. Settings that change no shape may be changed."""
    assert not jax.config.values["jax_disable_most_optimizations"], "tests of equality bit for bit share these engines"
    first = build(numerics, decoder)
    # What is compiled and the parameters are shared; the state is replaced before anything runs.
    device = copy.copy(first._device)
    device.reset()
    mode = changes.pop("mode", "exact")
    settings = dataclasses.replace(first.settings, replay=Replay(mode, decoder, KEEP), **changes)
    more = {} if clock is None else {"clock": clock}
    return Engine(
        device,
        first.config,
        settings,
        blocks=first.books.pool.blocks,
        form=state_format(numerics),
        costs=first._costs,
        store=store,
        tokenizer=tokenizer,
        **more,
    )


@dataclasses.dataclass
class Answer:
    """Everything that came for one branch."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple | None = None
    text: str = ""
    last: Output | None = None


def gather(answers: dict[tuple[int, int], Answer], news: list[Output]) -> None:
    for output in news:
        answer = answers.setdefault((output.request_id, output.branch), Answer())
        assert answer.last is None, "news after the last one"
        answer.tokens += output.tokens
        answer.logprobs += output.logprobs
        answer.text += output.text
        answer.prompt_logprobs = answer.prompt_logprobs or output.prompt_logprobs
        if output.finish_reason is not None:
            answer.last = output


def run(engine: Engine, requests: list[Request]) -> list[Answer]:
    """All requests to their end; the answers in order, branch after branch."""
    numbers = [engine.submit(request) for request in requests]
    answers: dict[tuple[int, int], Answer] = {}
    while engine.busy:
        gather(answers, engine.step())
    return [
        answers[number, branch]
        for number, request in zip(numbers, requests, strict=True)
        for branch in range(request.params.n)
    ]
