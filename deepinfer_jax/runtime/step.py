"""The compiled functions of a step: its rows over the state, then one token behind each row that wants one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from deepinfer_jax.cache.state import State
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.exchange import LOCAL, Exchange
from deepinfer_jax.model.source import PagedSource
from deepinfer_jax.model.transformer import Model, encode, logits
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.runtime.advance import advance, by_tiles, encode_in_tiles
from deepinfer_jax.runtime.batch import Batch
from deepinfer_jax.runtime.sampler import Choices, Counts, Sampled, choose, counted, report, sample


@struct.dataclass
class StepInput:
    """What a step runs: its rows, the blocks of every slot, and behind which rows to sample.

    ``block_tables`` int32 ``[slots blocks]``; ``samples`` int32 ``[samples]``, numbers among the rows that run through
    all layers.
    """

    batch: Batch
    block_tables: Any
    samples: Any


def forward_step(
    params: Model,
    state: State,
    step: StepInput,
    previous: Int[Array, " sampled"],
    config: ModelConfig,
    numerics: Numerics,
    *,
    scored: int = 0,
    deterministic: bool = False,
    exchange: Exchange = LOCAL,
) -> tuple[State, Float[Array, "samples hidden"], Float[Array, "kept hidden"], Bool[Array, " rows"]]:
    """First half of a step.

    ``previous`` are the tokens that the step before sampled.

    Returns:
      The rows' state, the hidden states to sample behind, those of all kept rows, filled up to ``scored`` rows, and of
      every row whether what it put into the pages is finite.
    """
    rows = step.batch.to_rows(previous)
    kept = step.batch.to_kept(rows)
    tables = jnp.asarray(step.block_tables)
    advanced = advance(
        params, state, rows, tables, config, numerics, kept=kept, deterministic=deterministic, exchange=exchange
    )
    missing = max(0, scored - advanced.hidden.shape[0])
    return (
        advanced.state,
        advanced.hidden[jnp.asarray(step.samples)],
        jnp.pad(advanced.hidden, ((0, missing), (0, 0))),
        PagedSource(advanced.state, tables).finite_entries(rows),
    )


def encode_step(
    params: Model,
    state: State,
    step: StepInput,
    previous: Int[Array, " sampled"],
    config: ModelConfig,
    numerics: Numerics,
    *,
    deterministic: bool = False,
) -> tuple[State, Float[Array, "samples hidden"], Float[Array, "kept hidden"], Bool[Array, " rows"]]:
    """As :func:`forward_step` for a model's encoder side: no row goes further, and no hidden state means anything."""
    rows = step.batch.to_rows(previous)
    tables = jnp.asarray(step.block_tables)
    if deterministic:
        state = encode_in_tiles(params, state, rows, tables, config, numerics)
    else:
        source = encode(params, rows, PagedSource(state, tables), config, numerics)
        assert isinstance(source, PagedSource)
        state = source.state
    nothing = jnp.zeros((step.samples.shape[0], config.hidden_size), numerics.dtype)
    return state, nothing, nothing, PagedSource(state, tables).finite_entries(rows)


def no_logits(params: Model, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocabulary"]:
    """In place of the output head where there is none."""
    return jnp.zeros((hidden.shape[0], params.embedding.shape[0]))


def sample_step(
    params: Model,
    hidden: Float[Array, "samples hidden"],
    choices: Choices,
    counts: Counts,
    *,
    most: int,
    places: int,
    deterministic: bool = False,
    head: Callable[[Model, Array], Array] = logits,
) -> tuple[Sampled, Counts, Int[Array, " places"]]:
    """Second half of a step: one token behind each hidden state.

    Args:
      params, hidden, choices, counts: see :func:`deepinfer_jax.runtime.sampler.choose`; donate the counts.
      most: likeliest tokens that are reported.
      places: length of the tokens as the next step takes them, whatever its shape.
      deterministic: a few rows at a time.
      head: the output head; another one where it is spread over devices.

    Returns:
      What was sampled, the counts after it, and the tokens in ``places`` places.
    """
    choices = jax.tree.map(jnp.asarray, choices)
    if deterministic:
        sampled = by_tiles(lambda part: choose(head(params, part[0]), part[1], counts, most=most), (hidden, choices))
    else:
        sampled = choose(head(params, hidden), choices, counts, most=most)
    counts = counted(counts, choices, sampled.tokens)
    return sampled, counts, jnp.pad(sampled.tokens, (0, places - sampled.tokens.shape[0]))


def score_step(
    params: Model,
    hidden: Float[Array, "rows hidden"],
    targets: Int[Array, " rows"],
    *,
    most: int,
    deterministic: bool = False,
    head: Callable[[Model, Array], Array] = logits,
) -> tuple[Float[Array, " rows"], Int[Array, "rows most"], Float[Array, "rows most"]]:
    """Log-probability of a given token behind every row, and the ``most`` likeliest ones; for prompts."""
    targets = jnp.asarray(targets)
    if deterministic:
        return by_tiles(lambda part: report(head(params, part[0]), part[1], most), (hidden, targets))
    return report(head(params, hidden), targets, most)


@functools.partial(jax.jit, static_argnames=("config", "numerics"), donate_argnames=("state",))
def advance_and_sample(
    params: Model,
    state: State,
    batch: Batch,
    block_tables: Int[Array | np.ndarray, "slots blocks"],
    last: Int[Array | np.ndarray, " requests"],
    temperatures: Float[Array | np.ndarray, " requests"],
    seeds: UInt32[Array | np.ndarray, "requests 2"],
    *,
    config: ModelConfig,
    numerics: Numerics,
) -> tuple[State, Int[Array, " requests"]]:
    """Compiled: run a step and sample one token behind each of the rows ``last``. Donates the state."""
    rows = batch.to_rows()
    advanced = advance(params, state, rows, jnp.asarray(block_tables), config, numerics)
    scores = row_logits(params, advanced.hidden[last])
    return advanced.state, sample(scores, jnp.asarray(temperatures), jnp.asarray(seeds), rows.positions[last] + 1)


def row_logits(
    params: Model, hidden: Float[Array, "rows hidden"], *, deterministic: bool = False
) -> Float[Array, "rows vocabulary"]:
    """Logits of some rows, float32; deterministic execution multiplies a fixed number of rows at a time."""
    return by_tiles(lambda tile: logits(params, tile), hidden) if deterministic else logits(params, hidden)
