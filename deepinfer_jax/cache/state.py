"""The device tree of all requests' state: page pools and per-slot rings.

Pages grow with a request; everything else is fixed per running request (*slot*). Ring rows are found by absolute
position modulo the ring length. Rings are longer than what they serve by ``max_drafts + 1`` rows, so that drafted rows
which are rejected later never overwrite a row that is still needed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from deepinfer_jax.cache.fingerprint import cache_format
from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import Numerics
from pallas_kernels import CachedRows

# What a pool or ring of keys is.
Cache = Any


@struct.dataclass
class State:
    """State of all slots and blocks. The step donates it and returns its successor.

    Leaves are arrays, or abstract arrays of the same shapes. uint16 arrays hold bfloat16 bits, see
    :func:`storage_dtype`. Where the numerics keep a cache in a released format it is a ``CachedRows``.

    ``main`` ``[pool_rows head_dim]``: compressed key/value entries.
    ``index`` ``[pool_rows index_dim]``: index keys, in the same rows.
    ``window`` ``[layers slots window_ring head_dim]``: window keys of the backbone layers, then of the draft stages.
    ``pending`` ``[groups slots pending_ring 2 * head_dim]``: compressor value and gate of recent tokens, float32.
    ``history`` ``[slots history_ring]``: compressed ids of recent tokens, for Engram; -1 is image-type.
    """

    main: Any
    index: Any
    window: Any
    pending: Any
    history: Any
    layout: PageLayout = struct.field(pytree_node=False)

    @property
    def blocks(self) -> int:
        """Blocks in the page pools."""
        return self.main.shape[0] // self.layout.rows_per_block if self.layout.ratios else 0


def initial_state(
    config: ModelConfig,
    numerics: Numerics,
    *,
    slots: int,
    blocks: int,
    layout: PageLayout,
    max_drafts: int | None = None,
    fill: float = 0.0,
) -> State:
    """A state without requests.

    Args:
      config, numerics: the model and how its caches are kept.
      slots: requests that can run at a time.
      blocks: blocks in the page pools.
      layout: row arithmetic of a block.
      max_drafts: drafts a step may verify; the draft block size by default, 0 without a draft head.
      fill: initial value of every float; tests use NaN, since nothing may ever read a row that was not written.
    """
    if max_drafts is None:
        max_drafts = config.draft.block_size if config.draft else 0
    pool_rows = blocks * layout.rows_per_block
    layers = config.num_hidden_layers + config.draft_stages
    lookback = config.engram.max_ngram_size - 1 if config.engram else 0

    def rows(name: str, *shape: int) -> Cache:
        return empty_cache(shape, cache_format(name, numerics), numerics, fill)

    return State(
        main=rows("main", pool_rows, config.head_dim),
        index=rows("index", pool_rows, config.index_head_dim),
        window=rows("window", layers, slots, config.sliding_window + max_drafts + 1, config.head_dim),
        pending=jnp.full((len(layout.ratios), slots, max_drafts + 2, 2 * config.head_dim), fill, jnp.float32),
        history=jnp.full((slots, lookback + max_drafts + 1), -1, jnp.int32),
        layout=layout,
    )


def empty_cache(shape: tuple[int, ...], form: str | None, numerics: Numerics, fill: float = 0.0) -> Cache:
    """Rows of a cache before anything was written; a ``fill`` of NaN poisons packed rows too."""
    if form is not None:
        return CachedRows.empty(shape, form, poisoned=fill != fill)
    return encode(jnp.full(shape, fill, numerics.dtype), storage_dtype(numerics))


def write_rows(cache: Cache, place: Any, values: Float[Array, "*batch channels"] | CachedRows) -> Cache:
    """The cache with ``values`` at ``place``, an index of its leading axes; places out of range are dropped."""
    if isinstance(cache, CachedRows):
        packed = values if isinstance(values, CachedRows) else CachedRows.pack(values, cache.name)
        return jax.tree.map(lambda plane, rows: plane.at[place].set(rows, mode="drop"), cache, packed)
    assert not isinstance(values, CachedRows)
    return cache.at[place].set(encode(values, cache.dtype), mode="drop")


def read_rows(cache: Cache, dtype: DTypeLike) -> Float[Array, "*batch channels"]:
    """Rows taken from a cache, in floating point; released formats in ``dtype``, the others in their own."""
    return cache.values(dtype) if isinstance(cache, CachedRows) else decode(cache)


def storage_dtype(numerics: Numerics) -> jnp.dtype:
    """Dtype of the caches.

    XLA:CPU before JAX 0.11 rewrites a whole bfloat16 buffer for every scattered row, so there bfloat16 is kept as its
    bits in uint16.
    """
    slow_scatter = jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11)
    return jnp.dtype(jnp.uint16) if slow_scatter and numerics.dtype == jnp.bfloat16 else numerics.dtype


def encode(values: Float[Array, "*shape"], dtype: jnp.dtype) -> Shaped[Array, "*shape"]:
    """Values as they are stored: bfloat16 bits where ``dtype`` is uint16."""
    return jax.lax.bitcast_convert_type(values, jnp.uint16) if dtype == jnp.uint16 else values.astype(dtype)


def decode(stored: Shaped[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The inverse of :func:`encode`."""
    return jax.lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored
