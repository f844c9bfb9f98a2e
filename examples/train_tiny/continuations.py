"""Continuations of many prompts of equal length at once, over the project's paged state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import initial_state
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.runtime.batch import Chunk, StepShape, pack
from deepinfer_jax.runtime.sampler import seed_words
from deepinfer_jax.runtime.step import advance_and_sample
from examples.train_tiny.batches import Tokens

TILE_ROWS = 128
REPEATED = 16  # tokens: a continuation that says so many twice has fallen into a loop


def draw_prompts(documents: Sequence[Tokens], count: int, length: int, behind: int, seed: int) -> list[Tokens]:
    """``count`` prompts from anywhere in the documents, with at least ``behind`` more tokens behind each."""
    starts = [
        (place, start) for place, tokens in enumerate(documents) for start in range(len(tokens) - length - behind)
    ]
    chosen = np.random.default_rng(seed).choice(len(starts), count, replace=False)
    return [documents[place][start : start + length] for place, start in (starts[number] for number in chosen)]


def continue_prompts(
    params: Model,
    config: ModelConfig,
    numerics: Numerics,
    prompts: Sequence[Tokens],
    new_tokens: int,
    temperature: float,
    seed: int = 0,
) -> Int32[np.ndarray, "prompts tokens"]:
    """Prompts of equal length, each with ``new_tokens`` behind it; end tokens do not end a continuation."""
    count, length = len(prompts), len(prompts[0])
    layout = PageLayout.of(config)
    blocks = layout.blocks_for(length + new_tokens)
    tables = np.arange(count * blocks, dtype=np.int32).reshape(count, blocks)
    state = initial_state(config, numerics, slots=count, blocks=count * blocks, layout=layout)
    temperatures = np.full(count, temperature, np.float32)
    seeds = np.stack([seed_words(seed + place) for place in range(count)])
    tiles = -(-length // TILE_ROWS)
    prefill = StepShape(0, count * tiles, TILE_ROWS)
    batch, starts, _ = pack([Chunk(slot, 0, prompt.tolist()) for slot, prompt in enumerate(prompts)], prefill)
    last = np.asarray(starts, np.int32) + length - 1
    written = [np.stack(prompts)]
    for position in range(length, length + new_tokens):
        state, chosen = advance_and_sample(
            params, state, batch, tables, last, temperatures, seeds, config=config, numerics=numerics
        )
        tokens = np.asarray(chosen)
        written.append(tokens[:, None])
        following = [Chunk(slot, position, [int(token)]) for slot, token in enumerate(tokens)]
        batch, starts, _ = pack(following, StepShape(count))
        last = np.asarray(starts, np.int32)
    return np.concatenate(written, axis=1).astype(np.int32)


def is_loop(tokens: Sequence[int]) -> bool:
    """Whether some 16 tokens in a row stand twice in a continuation."""
    seen = set()
    for start in range(len(tokens) - REPEATED + 1):
        part = tuple(tokens[start : start + REPEATED])
        if part in seen:
            return True
        seen.add(part)
    return False
