"""Where a layer finds keys of earlier tokens: in the step's own rows, in a request's state, or in both.

:class:`SequenceSource` serves whole sequences that start at position 0 (training, scoring): it keeps nothing between
steps and is differentiable. :class:`PagedSource` serves incremental execution over pages and rings. Both answer the
same questions, so that one set of layer functions serves either. Within a step a query reads ring rows older than its
request's first row, plus the step's own rows; rings are written after the layer has read them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Shaped

from deepinfer_jax.cache.state import State, read_rows, take_rows, write_rows
from deepinfer_jax.model.rows import Rows, at_positions
from pallas_kernels import CachedRows

# A layer or group number: a Python int in unrolled execution, a traced scalar inside a scan over layers.
Number = int | Int[Array, ""]
NO_TOKEN = -2


@runtime_checkable
class KeySource(Protocol):
    """What layers ask of a source. Methods that store return the successor; nothing is changed in place."""

    def window_keys(
        self, layer: Number, keys: Array, rows: Rows, request: Array, positions: Array
    ) -> Float[Array, "tiles keys head_dim"]:
        """Window keys of each tile's request at absolute positions; zeros where there is none."""

    def store_window(self, layer: Number, keys: Array, rows: Rows) -> KeySource:
        """Keep this step's window keys of a layer."""

    def previous(self, group: Number, values: Array, rows: Rows) -> Float[Array, "rows double_dim"]:
        """The compressor's value and gate of the token before each row."""

    def store_pending(self, group: Number, values: Array, rows: Rows) -> KeySource:
        """Keep this step's compressor values and gates."""

    def store_entries(
        self, group: Number, ratio: int, entries: Array | CachedRows, index_keys: Array, rows: Rows
    ) -> KeySource:
        """Keep the entries and index keys that rows completed; rows that complete none are ignored."""

    def index_keys(
        self, group: Number, ratio: int, rows: Rows, request: Array, dtype: jnp.dtype
    ) -> Float[Array, "tiles entries index_dim"]:
        """Index keys of each tile's request, in entry order; beyond the visible ones anything.

        ``dtype`` is that of activations.
        """

    def entry_rows(
        self, group: Number, ratio: int, rows: Rows, selection: Array
    ) -> tuple[Shaped[Array, "pool_rows head_dim"] | CachedRows, Int[Array, "rows selected"]]:
        """A pool and the pool rows of selected entries, -1 for none."""

    def previous_ids(self, ids: Array, rows: Rows, back: int) -> Int[Array, "rows back"]:
        """Compressed ids of the tokens 1 .. back before each row; NO_TOKEN before the sequence's start."""

    def store_ids(self, ids: Array, rows: Rows) -> KeySource:
        """Keep this step's compressed ids."""


@struct.dataclass
class SequenceSource:
    """Keys of whole sequences in this step; nothing before it, nothing kept after it.

    ``entries`` and ``keys`` are those of the latest source layer, each at the row that completed it.
    """

    entries: Float[Array, "rows head_dim"]
    keys: Float[Array, "rows index_dim"]
    length: int = struct.field(pytree_node=False)  # longest sequence, in tokens

    @classmethod
    def empty(cls, rows: int, length: int, head_dim: int, index_dim: int, dtype: jnp.dtype) -> SequenceSource:
        """A source before the first layer."""
        return cls(jnp.zeros((rows, head_dim), dtype), jnp.zeros((rows, index_dim), dtype), length)

    def window_keys(self, layer: Number, keys: Array, rows: Rows, request: Array, positions: Array) -> Array:
        del layer
        values, present = at_positions(keys, rows, request, positions)
        return jnp.where(present[..., None], values, jnp.zeros((), values.dtype))

    def store_window(self, layer: Number, keys: Array, rows: Rows) -> SequenceSource:
        del layer, keys, rows
        return self

    def previous(self, group: Number, values: Array, rows: Rows) -> Array:
        del group, rows
        return jnp.roll(values, 1, axis=0)

    def store_pending(self, group: Number, values: Array, rows: Rows) -> SequenceSource:
        del group, values, rows
        return self

    def store_entries(
        self, group: Number, ratio: int, entries: Array | CachedRows, index_keys: Array, rows: Rows
    ) -> SequenceSource:
        del group, ratio, rows
        return dataclasses.replace(self, entries=read_rows(entries, index_keys.dtype), keys=index_keys)

    def index_keys(self, group: Number, ratio: int, rows: Rows, request: Array, dtype: jnp.dtype) -> Array:
        del group, dtype
        completed = (jnp.arange(self.length // ratio, dtype=jnp.int32) + 1) * ratio - 1
        return self.keys[jnp.minimum(rows.first_row[request][:, None] + completed[None], self.keys.shape[0] - 1)]

    def entry_rows(self, group: Number, ratio: int, rows: Rows, selection: Array) -> tuple[Array, Array]:
        del group
        completed = rows.first_row[:, None] + (selection + 1) * ratio - 1
        return self.entries, jnp.where(selection >= 0, completed, -1)

    def previous_ids(self, ids: Array, rows: Rows, back: int) -> Array:
        positions = rows.positions[:, None] - jnp.arange(1, back + 1, dtype=jnp.int32)[None]
        values, present = at_positions(ids, rows, jnp.arange(ids.shape[0]), positions)
        return jnp.where(present, values, NO_TOKEN)

    def store_ids(self, ids: Array, rows: Rows) -> SequenceSource:
        del ids, rows
        return self


@struct.dataclass
class PagedSource:
    """Keys of running requests: rings and pages of the state, plus the step's own rows.

    ``block_tables`` lists each slot's blocks in token order; entries behind a request's last block may be anything.
    """

    state: State
    block_tables: Int[Array, "slots blocks"]

    def window_keys(self, layer: Number, keys: Array, rows: Rows, request: Array, positions: Array) -> Array:
        values, present = at_positions(keys, rows, request, positions)
        ring = self.state.window.shape[2]
        older = read_rows(self.state.window[layer, rows.slots[request][:, None], positions % ring], keys.dtype)
        # What no row of a request saw may never have been written, and a key that is not seen must still be finite.
        in_ring = self._in_ring(rows, request, positions, ring) & (positions >= rows.floors[request][:, None])
        values = jnp.where(present[..., None], values, older)
        return jnp.where((present | in_ring)[..., None], values, jnp.zeros((), values.dtype))

    def store_window(self, layer: Number, keys: Array, rows: Rows) -> PagedSource:
        window = self.state.window
        slots, places = self._ring_places(rows, window.shape[1], window.shape[2])
        return self._with(window=write_rows(window, (layer, slots, places), keys))

    def previous(self, group: Number, values: Array, rows: Rows) -> Array:
        pending = self.state.pending
        older = pending[group, rows.slots, (rows.positions - 1) % pending.shape[2]]
        inside = jnp.arange(values.shape[0]) > rows.first_row
        return jnp.where(inside[:, None], jnp.roll(values, 1, axis=0), older)

    def store_pending(self, group: Number, values: Array, rows: Rows) -> PagedSource:
        pending = self.state.pending
        slots, places = self._ring_places(rows, pending.shape[1], pending.shape[2])
        stored = pending.at[group, slots, places].set(values, mode="drop")
        return self._with(pending=stored)

    def store_entries(
        self, group: Number, ratio: int, entries: Array | CachedRows, index_keys: Array, rows: Rows
    ) -> PagedSource:
        state = self.state
        target = self._completed(group, ratio, rows, state.main.shape[0])
        return self._with(
            main=write_rows(state.main, target, entries),
            index=write_rows(state.index, target, index_keys),
        )

    def finite_entries(self, rows: Rows) -> Bool[Array, " rows"]:
        """Whether what each row has put into the pages is finite as it stands there; true where that is nothing."""
        state, finite = self.state, jnp.ones(rows.tokens.shape[0], bool)
        for group, ratio in enumerate(state.layout.ratios):
            target = self._completed(group, ratio, rows, -1)
            for pool in (state.main, state.index):
                sound = jnp.isfinite(take_rows(pool, jnp.maximum(target, 0), jnp.float32)).all(axis=-1)
                finite &= sound | (target < 0)
        return finite

    def index_keys(self, group: Number, ratio: int, rows: Rows, request: Array, dtype: jnp.dtype) -> Array:
        capacity = self.block_tables.shape[1] * (self.state.layout.block_tokens // ratio)
        entries = jnp.tile(jnp.arange(capacity, dtype=jnp.int32)[None], (request.shape[0], 1))
        pool_rows = self._pool_rows(group, ratio, rows.slots[request][:, None], entries)
        return take_rows(self.state.index, pool_rows, dtype)

    def entry_rows(self, group: Number, ratio: int, rows: Rows, selection: Array) -> tuple[Array | CachedRows, Array]:
        pool_rows = self._pool_rows(group, ratio, rows.slots[:, None], jnp.maximum(selection, 0))
        return self.state.main, jnp.where(selection >= 0, pool_rows, -1)

    def previous_ids(self, ids: Array, rows: Rows, back: int) -> Array:
        request = jnp.arange(ids.shape[0])
        positions = rows.positions[:, None] - jnp.arange(1, back + 1, dtype=jnp.int32)[None]
        values, present = at_positions(ids, rows, request, positions)
        ring = self.state.history.shape[1]
        older = self.state.history[rows.slots[:, None], positions % ring]
        in_ring = self._in_ring(rows, request, positions, ring)
        return jnp.where(present, values, jnp.where(in_ring, older, NO_TOKEN))

    def store_ids(self, ids: Array, rows: Rows) -> PagedSource:
        history = self.state.history
        slots, places = self._ring_places(rows, *history.shape)
        return self._with(history=history.at[slots, places].set(ids, mode="drop"))

    def _with(self, **arrays: Any) -> PagedSource:
        return dataclasses.replace(self, state=dataclasses.replace(self.state, **arrays))

    def _completed(self, group: Number, ratio: int, rows: Rows, nowhere: int) -> Int[Array, " rows"]:
        """The pool row of the entry that each row completes and that is not there yet, ``nowhere`` if it has none."""
        completes = rows.valid & ((rows.positions + 1) % ratio == 0) & (rows.positions >= rows.held)
        target = self._pool_rows(group, ratio, rows.slots[:, None], (rows.positions // ratio)[:, None])[:, 0]
        return jnp.where(completes, target, nowhere)

    def _pool_rows(self, group: Number, ratio: int, slots: Array, entries: Array) -> Array:
        layout = self.state.layout
        per_block = layout.block_tokens // ratio
        block = self.block_tables[slots, entries // per_block]
        offset = jnp.asarray(layout.group_offsets, jnp.int32)[group]
        return block * layout.rows_per_block + offset + entries % per_block

    @staticmethod
    def _in_ring(rows: Rows, request: Array, positions: Array, ring: int) -> Array:
        begin = rows.positions[rows.first_row[request]][:, None]
        return (positions >= 0) & (positions < begin) & (positions >= begin - ring)

    @staticmethod
    def _ring_places(rows: Rows, slots: int, ring: int) -> tuple[Array, Array]:
        """Slot and ring row of every row; rows that a later row of the step overwrites go out of range (dropped)."""
        kept = rows.valid & (rows.positions > rows.positions[rows.last_row] - ring)
        return jnp.where(kept, rows.slots, slots), rows.positions % ring
