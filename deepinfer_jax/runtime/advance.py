"""Running a step's rows over the state of their requests.

*Deterministic* execution runs the rows through one loop body of fixed shape, a few rows at a time, every query with its
own fixed number of keys. A row's result then depends on the request alone: not on the other rows, nor on how the prompt
was cut into chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from deepinfer_jax.cache.state import State
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.draft import context_keys, store_context
from deepinfer_jax.model.exchange import LOCAL, Exchange
from deepinfer_jax.model.rows import Kept, Rows
from deepinfer_jax.model.source import PagedSource
from deepinfer_jax.model.transformer import Model, encode, forward
from deepinfer_jax.numerics import Numerics

DETERMINISTIC_ROWS = 8


@struct.dataclass
class Advanced:
    """Result of a step: the successor state, and per row through all layers its hidden state and draft taps."""

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
    kept: Kept | None = None,
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
      kept: the rows that run through the decoder layers; None for all.
      exchange: how rows reach parameters that are spread over devices.
    """
    if not deterministic:
        return _advance(params, state, rows, kept, block_tables, config, numerics, exchange)
    return _advance_in_tiles(params, state, rows, kept, block_tables, config, numerics, exchange)


def by_tiles(function: Callable[[Any], Any], rows: Any) -> Any:
    """``function`` over trees with a leading axis of rows, a fixed number of rows at a time."""
    count = jax.tree.leaves(rows)[0].shape[0]
    tiles = -(-count // DETERMINISTIC_ROWS)

    def tiled(leaf: Array) -> Array:
        pad = ((0, tiles * DETERMINISTIC_ROWS - count), *((0, 0),) * (leaf.ndim - 1))
        return jnp.pad(leaf, pad).reshape(tiles, DETERMINISTIC_ROWS, *leaf.shape[1:])

    done = jax.lax.map(function, jax.tree.map(tiled, rows))
    return jax.tree.map(lambda leaf: leaf.reshape(tiles * DETERMINISTIC_ROWS, *leaf.shape[2:])[:count], done)


def _advance(
    params: Model,
    state: State,
    rows: Rows,
    kept: Kept | None,
    block_tables: Int[Array, "slots blocks"],
    config: ModelConfig,
    numerics: Numerics,
    exchange: Exchange,
) -> Advanced:
    output = forward(params, rows, PagedSource(state, block_tables), config, numerics, exchange, kept)
    source = output.source
    if params.draft is not None:
        ends = rows if kept is None else kept.rows
        keys = context_keys(params.draft, output.draft_taps, ends, config, numerics)
        source = store_context(keys, ends, source, config)
    assert isinstance(source, PagedSource)
    return Advanced(source.state, output.hidden, output.draft_taps)


def _advance_in_tiles(
    params: Model,
    state: State,
    rows: Rows,
    kept: Kept | None,
    block_tables: Int[Array, "slots blocks"],
    config: ModelConfig,
    numerics: Numerics,
    exchange: Exchange,
) -> Advanced:
    """A tile without kept rows ends before the decoder layers; in any other all rows go on, as the loop body is one.

    All devices run as many tiles, and as far, as the one that needs most: they meet in every layer.
    """
    count = rows.tokens.shape[0]
    # With a single tile the compiler would drop the cuts around the loop's body, and round otherwise inside it.
    tiles = max(2, -(-count // DETERMINISTIC_ROWS))
    keeping = _Keeping.of(rows, kept, tiles * DETERMINISTIC_ROWS)
    padded = _padded(rows, tiles * DETERMINISTIC_ROWS)
    used = exchange.largest(jnp.max(jnp.where(rows.valid, jnp.arange(count) + 1, 0)))
    targets = len(config.draft.target_layer_ids) if config.draft else 0

    def one_tile(tile: Array, carry: Advanced) -> Advanced:
        start = tile * DETERMINISTIC_ROWS
        part = _tile_rows(padded, start)

        def through(state: State) -> tuple[State, Array, Array]:
            ends = None if keeping is None else keeping.tile(part, start)
            done = _advance(params, state, part, ends, block_tables, config, numerics, exchange)
            return done.state, done.hidden, done.draft_taps

        def encoder_only(state: State) -> tuple[State, Array, Array]:
            source = encode(params, part, PagedSource(state, block_tables), config, numerics, exchange)
            assert isinstance(source, PagedSource)
            nothing = jnp.zeros((DETERMINISTIC_ROWS, config.hidden_size), numerics.dtype)
            return source.state, nothing, jnp.zeros((targets, *nothing.shape), numerics.dtype)

        if keeping is None:
            state, hidden, draft_taps = through(carry.state)
        else:
            further = exchange.largest(keeping.any(start).astype(jnp.int32)) > 0
            state, hidden, draft_taps = jax.lax.cond(further, through, encoder_only, carry.state)
        return Advanced(
            state=state,
            hidden=jax.lax.dynamic_update_slice_in_dim(carry.hidden, hidden, start, 0),
            draft_taps=jax.lax.dynamic_update_slice_in_dim(carry.draft_taps, draft_taps, start, 1),
        )

    initial = Advanced(
        state=state,
        hidden=jnp.zeros((tiles * DETERMINISTIC_ROWS, config.hidden_size), numerics.dtype),
        draft_taps=jnp.zeros((targets, tiles * DETERMINISTIC_ROWS, config.hidden_size), numerics.dtype),
    )
    done = jax.lax.fori_loop(0, -(-used // DETERMINISTIC_ROWS), one_tile, initial)
    ends = jnp.arange(count) if kept is None else jnp.maximum(kept.index, 0)
    return Advanced(done.state, done.hidden[ends], done.draft_taps[:, ends])


def encode_in_tiles(
    params: Model,
    state: State,
    rows: Rows,
    block_tables: Int[Array, "slots blocks"],
    config: ModelConfig,
    numerics: Numerics,
) -> State:
    """As :func:`_advance_in_tiles` where no row goes through the decoder layers."""
    count = rows.tokens.shape[0]
    tiles = max(2, -(-count // DETERMINISTIC_ROWS))
    padded = _padded(rows, tiles * DETERMINISTIC_ROWS)
    used = jnp.max(jnp.where(rows.valid, jnp.arange(count) + 1, 0))

    def one_tile(tile: Array, state: State) -> State:
        part = _tile_rows(padded, tile * DETERMINISTIC_ROWS)

        def encoder_only(state: State) -> State:
            source = encode(params, part, PagedSource(state, block_tables), config, numerics)
            assert isinstance(source, PagedSource)
            return source.state

        # A branch here as in the whole model, where it is a choice: the compiler rounds otherwise without one.
        return jax.lax.cond(jnp.any(part.valid), encoder_only, lambda state: state, state)

    return jax.lax.fori_loop(0, -(-used // DETERMINISTIC_ROWS), one_tile, state)


@struct.dataclass
class _Keeping:
    """Per row of a step: whether it runs through the decoder layers, and the lowest window position it sees there."""

    rows: Bool[Array, " rows"]
    floors: Int[Array, " rows"]

    @classmethod
    def of(cls, rows: Rows, kept: Kept | None, count: int) -> _Keeping | None:
        """``count``: rows with padding."""
        if kept is None:
            return None
        # Padding of the kept rows goes out of range, which drops it.
        place = jnp.where(kept.rows.valid, kept.index, count)
        return cls(
            jnp.zeros(count, bool).at[place].set(True, mode="drop"),
            jnp.zeros(count, jnp.int32).at[place].set(kept.rows.floors, mode="drop"),
        )

    def any(self, start: Array) -> Array:
        """Whether the tile that begins at row ``start`` has kept rows."""
        return jnp.any(jax.lax.dynamic_slice_in_dim(self.rows, start, DETERMINISTIC_ROWS, 0))

    def tile(self, rows: Rows, start: Array) -> Kept:
        """The kept rows of a tile; the others are padding in it."""
        kept = jax.lax.dynamic_slice_in_dim(self.rows, start, DETERMINISTIC_ROWS, 0)
        floors = jax.lax.dynamic_slice_in_dim(self.floors, start, DETERMINISTIC_ROWS, 0)
        index = jnp.where(kept, jnp.arange(DETERMINISTIC_ROWS, dtype=jnp.int32), -1)
        return Kept.of(rows, index, floors, ((DETERMINISTIC_ROWS, 1),))


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
        part.held,
    )
