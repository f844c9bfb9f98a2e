"""Advancing requests by one step over their state.

*Deterministic* execution runs the rows through one loop body of fixed shape, a few rows at a time, every query with its
own fixed number of keys. A row's result then depends on the request alone: not on the other rows, nor on how the prompt
was cut into chunks.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

from deepinfer_jax.cache.state import State
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.draft import context_keys, store_context
from deepinfer_jax.model.exchange import LOCAL, Exchange
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.source import PagedSource
from deepinfer_jax.model.transformer import Model, forward, logits
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.runtime.batch import Batch
from deepinfer_jax.runtime.sampler import sample

DETERMINISTIC_ROWS = 8


@struct.dataclass
class Advanced:
    """Result of a step: the successor state, and per row the final hidden state and the draft taps."""

    state: State
    hidden: Float[Array, "rows hidden"]
    draft_taps: Float[Array, "targets rows hidden"]


def advance(
    params: Model,
    state: State,
    rows: Rows,
    block_tables: Int[Array, "slots blocks"],
    config: ModelConfig,
    numerics: Numerics,
    *,
    deterministic: bool = False,
    exchange: Exchange = LOCAL,
) -> Advanced:
    """Run a step's rows through backbone and draft context, and keep their keys in the state.

    Args:
      params: parameters in either physical form.
      state: state before the step; donate it.
      rows: the step's rows.
      block_tables: each slot's blocks in token order, covering every position of the rows.
      config, numerics, deterministic: static.
      exchange: how rows reach parameters that are spread over devices.
    """
    if not deterministic:
        return _advance(params, state, rows, block_tables, config, numerics, exchange)
    return _advance_in_tiles(params, state, rows, block_tables, config, numerics, exchange)


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
    if not deterministic:
        return logits(params, hidden)
    count, width = hidden.shape
    tiles = -(-count // DETERMINISTIC_ROWS)
    padded = jnp.pad(hidden, ((0, tiles * DETERMINISTIC_ROWS - count), (0, 0)))
    tiled = jax.lax.map(lambda tile: logits(params, tile), padded.reshape(tiles, DETERMINISTIC_ROWS, width))
    return tiled.reshape(tiles * DETERMINISTIC_ROWS, -1)[:count]


def _advance(
    params: Model,
    state: State,
    rows: Rows,
    block_tables: Int[Array, "slots blocks"],
    config: ModelConfig,
    numerics: Numerics,
    exchange: Exchange,
) -> Advanced:
    output = forward(params, rows, PagedSource(state, block_tables), config, numerics, exchange)
    source = output.source
    if params.draft is not None:
        keys = context_keys(params.draft, output.draft_taps, rows, config, numerics)
        source = store_context(keys, rows, source, config)
    assert isinstance(source, PagedSource)
    return Advanced(source.state, output.hidden, output.draft_taps)


def _advance_in_tiles(
    params: Model,
    state: State,
    rows: Rows,
    block_tables: Int[Array, "slots blocks"],
    config: ModelConfig,
    numerics: Numerics,
    exchange: Exchange,
) -> Advanced:
    count = rows.tokens.shape[0]
    tiles = -(-count // DETERMINISTIC_ROWS)
    padded = _padded(rows, tiles * DETERMINISTIC_ROWS)
    used = jnp.max(jnp.where(rows.valid, jnp.arange(count) + 1, 0))
    targets = len(config.draft.target_layer_ids) if config.draft else 0

    def one_tile(tile: Array, carry: Advanced) -> Advanced:
        start = tile * DETERMINISTIC_ROWS
        part = _advance(params, carry.state, _tile_rows(padded, start), block_tables, config, numerics, exchange)
        return Advanced(
            state=part.state,
            hidden=jax.lax.dynamic_update_slice_in_dim(carry.hidden, part.hidden, start, 0),
            draft_taps=jax.lax.dynamic_update_slice_in_dim(carry.draft_taps, part.draft_taps, start, 1),
        )

    initial = Advanced(
        state=state,
        hidden=jnp.zeros((tiles * DETERMINISTIC_ROWS, config.hidden_size), numerics.dtype),
        draft_taps=jnp.zeros((targets, tiles * DETERMINISTIC_ROWS, config.hidden_size), numerics.dtype),
    )
    done = jax.lax.fori_loop(0, -(-used // DETERMINISTIC_ROWS), one_tile, initial)
    return Advanced(done.state, done.hidden[:count], done.draft_taps[:, :count])


def _padded(rows: Rows, count: int) -> Rows:
    missing = count - rows.tokens.shape[0]

    def pad(leaf: Array) -> Array:
        return jnp.pad(leaf, ((0, missing), *((0, 0),) * (leaf.ndim - 1)))

    positions = jnp.pad(rows.positions, (0, missing), constant_values=-1)
    return dataclasses.replace(jax.tree.map(pad, rows), positions=positions)


def _tile_rows(rows: Rows, start: Array) -> Rows:
    """The rows of one loop step, every row a tile of its own, so that each has its own fixed set of keys."""

    def cut(leaf: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(leaf, start, DETERMINISTIC_ROWS, 0)

    part = jax.tree.map(cut, rows)
    return Rows.of(
        part.tokens,
        part.slots,
        part.positions,
        ((DETERMINISTIC_ROWS, 1),),
        part.floors,
        part.image,
        part.image_embeddings,
    )
