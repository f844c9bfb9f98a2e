"""The compressor: key/value entries for long-range attention, one per token or pair of tokens, and their index keys.

Model specification, sections 6 and 7.1. Only key/value source layers own one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.linear import linear, linear_float32, rms_norm
from deepinfer_jax.model.params import Leaf, matrix, norm
from deepinfer_jax.model.rope import rotation
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.source import KeySource, Number
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.quant import round_trip_fp4_32
from pallas_kernels import CachedRows


@struct.dataclass
class Compressor:
    """Projections of a key/value source layer. ``gate`` exists at ratio 2 only."""

    value: Leaf
    gate: Leaf
    norm: Leaf
    index_key: Leaf
    index_key_norm: Leaf

    @classmethod
    def describe(cls, config: ModelConfig, prefix: str, ratio: int) -> Compressor:
        """``prefix`` is the attention's released prefix, ``layers.N.attn``."""
        wide = (config.head_dim, config.hidden_size)
        index_wide = (config.index_head_dim, config.head_dim)
        return cls(
            value=matrix(f"{prefix}.compressor.wkv.weight", wide, (None, None)),
            gate=matrix(f"{prefix}.compressor.wgate.weight", wide, (None, None)) if ratio > 1 else None,
            norm=norm(f"{prefix}.compressor.norm.weight", config.head_dim),
            index_key=matrix(f"{prefix}.indexer.wk.weight", index_wide, (None, None)),
            index_key_norm=norm(f"{prefix}.indexer.k_norm.weight", config.index_head_dim),
        )


def compress(
    params: Compressor,
    inputs: Float[Array, "rows hidden"],
    ratio: int,
    group: Number,
    rows: Rows,
    source: KeySource,
    config: ModelConfig,
    numerics: Numerics,
) -> tuple[KeySource, Float[Array, "rows head_dim"], Float[Array, "rows index_dim"]]:
    """Compute the entries that this step's rows complete and keep them, with their index keys, in the source.

    An entry stands at the row of its last token; rows that complete none carry arbitrary values. Its RoPE position is
    that of its *first* token. The index key reads the latent before RoPE and before rounding to the cache format.

    Returns the successor of the source, the entries and the index keys, per row.
    """
    if ratio == 1:
        pooled = linear(inputs, params.value)
    else:
        pooled, source = _pool_pairs(params, inputs, group, rows, source)
    latent = rms_norm(pooled, params.norm, config.rms_norm_eps)
    turn = rotation(config, True, rows.positions // ratio * ratio)
    entries = turn.apply(latent)
    stored: Array | CachedRows = entries
    if numerics.main_entries_fp4:
        # Packed here, once: small entries change when they are packed a second time.
        packed = CachedRows.pack(entries, "fp4_16")
        entries, stored = packed.values(inputs.dtype), packed
    index_keys = turn.apply(rms_norm(linear(latent, params.index_key), params.index_key_norm, config.rms_norm_eps))
    if numerics.index_keys_fp4:
        index_keys = round_trip_fp4_32(index_keys)
    return source.store_entries(group, ratio, stored, index_keys, rows), entries, index_keys


def _pool_pairs(
    params: Compressor, inputs: Float[Array, "rows hidden"], group: Number, rows: Rows, source: KeySource
) -> tuple[Float[Array, "rows head_dim"], KeySource]:
    """Channel-wise softmax-gated pooling of each row with the row before it, in float32 throughout."""
    exact = inputs.astype(jnp.float32)
    own = jnp.concatenate([linear_float32(exact, params.value), linear_float32(exact, params.gate)], axis=-1)
    earlier = source.previous(group, own, rows)
    values, gates = jnp.split(jnp.stack([earlier, own]), 2, axis=-1)
    pooled = (jax.nn.softmax(gates, axis=0) * values).sum(axis=0)
    return pooled.astype(inputs.dtype), source.store_pending(group, own, rows)
