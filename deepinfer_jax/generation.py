"""Generating from one prompt: chunked prefill, then one token at a time, over paged state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import initial_state
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.runtime.batch import Chunk, StepShape, pack
from deepinfer_jax.runtime.sampler import seed_words
from deepinfer_jax.runtime.step import advance_and_sample

PREFILL_ROWS = 128


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to choose tokens: ``temperature`` 0 is greedy; ``stop_ids`` end the answer and are not part of it."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise InputError("max_tokens", self.max_tokens, "0 or more")
        if not 0.0 <= self.temperature <= 100.0:
            raise InputError("temperature", self.temperature, "0 (greedy) to 100")
        seed_words(self.seed)


def generate(
    params: Model, config: ModelConfig, numerics: Numerics, prompt: Sequence[int], sampling: Sampling
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, as they are sampled.

    Raises:
      InputError: the prompt is empty, holds an id outside the vocabulary, or does not fit the model's positions.
    """
    check_prompt(prompt, config, sampling.max_tokens)
    if sampling.max_tokens == 0:
        return
    layout = PageLayout.of(config)
    # A power of two, so that prompts of similar length share compiled steps.
    blocks = 1 << (layout.blocks_for(len(prompt) + sampling.max_tokens) - 1).bit_length()
    state = initial_state(config, numerics, slots=1, blocks=blocks, layout=layout)
    tables = np.arange(blocks, dtype=np.int32)[None]
    seeds, temperatures = seed_words(sampling.seed)[None], np.asarray([sampling.temperature], np.float32)
    tokens, start = list(prompt), 0
    for _ in range(sampling.max_tokens):
        while start < len(tokens):
            count = min(len(tokens) - start, PREFILL_ROWS)
            shape = StepShape(1) if count == 1 else StepShape(0, 1, PREFILL_ROWS)
            batch, *_ = pack([Chunk(0, start, tokens[start : start + count])], shape)
            start += count
            last = np.asarray([count - 1], np.int32)
            state, token = advance_and_sample(
                params, state, batch, tables, last, temperatures, seeds, config=config, numerics=numerics
            )
        tokens.append(int(token[0]))
        if tokens[-1] in sampling.stop_ids:
            return
        yield tokens[-1]


def check_prompt(prompt: Sequence[int], config: ModelConfig, new_tokens: int = 0) -> None:
    """Check that a prompt can be run, with room for ``new_tokens`` behind it.

    Raises:
      InputError: names the first offending id, or the lengths.
    """
    if not prompt:
        raise InputError("prompt", list(prompt), "at least one token")
    for token in prompt:
        if not 0 <= token < config.vocab_size:
            raise InputError("token id", token, f"0 to {config.vocab_size - 1}, the ids of this model's vocabulary")
    total = len(prompt) + new_tokens
    if total > config.max_position_embeddings:
        accepted = f"at most max_position_embeddings {config.max_position_embeddings}"
        raise InputError("prompt and new tokens", total, accepted, "shorten the prompt or ask for fewer tokens")
