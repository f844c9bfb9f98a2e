"""Attention: shared key/value, partial RoPE undone on the output, a sink per head, and a grouped low-rank output.

Model specification, section 5. The window part and the selected compressed entries are two public ops joined by an
online-softmax merge.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.compressor import Compressor, compress
from deepinfer_jax.model.hyper_connections import Taps
from deepinfer_jax.model.indexer import Indexer, Selected, select
from deepinfer_jax.model.linear import linear, rms_norm
from deepinfer_jax.model.params import Leaf, Stored, matrix, norm, single
from deepinfer_jax.model.rope import Rotation, rotation
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.source import KeySource, Number
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.quant import round_trip_fp8_32
from deepinfer_jax.topology import LayerKind, Mode
from pallas_kernels import (
    AttentionPartial,
    expand,
    merge_partials,
    rounded_inputs,
    sparse_attention,
    window_attention,
)


@struct.dataclass
class Attention:
    """Weights of one attention sub-layer; ``compressor`` and ``indexer`` only where the layer owns them."""

    query_down: Leaf
    query_norm: Leaf
    query_up: Leaf
    window_key: Leaf
    window_norm: Leaf
    output_down: Leaf
    output_up: Leaf
    sink: Leaf
    compressor: Compressor | None
    indexer: Indexer | None

    @classmethod
    def describe(cls, config: ModelConfig, prefix: str, kind: LayerKind) -> Attention:
        """``prefix`` is the attention's released prefix, ``layers.N.attn`` or ``mtp.N.attn``."""
        heads, head_dim, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
        rank, group_width = config.o_groups * config.o_lora_rank, heads // config.o_groups * head_dim
        fp8 = Stored.FP8_BLOCKS
        return cls(
            query_down=matrix(f"{prefix}.wq_a.weight", (config.q_lora_rank, hidden), (None, None), fp8),
            query_norm=norm(f"{prefix}.q_norm.weight", config.q_lora_rank),
            query_up=matrix(f"{prefix}.wq_b.weight", (heads * head_dim, config.q_lora_rank), ("heads", None), fp8),
            window_key=matrix(f"{prefix}.wkv.weight", (head_dim, hidden), (None, None), fp8),
            window_norm=norm(f"{prefix}.kv_norm.weight", head_dim),
            output_down=dataclasses.replace(
                single(f"{prefix}.wo_a.weight", (rank, group_width), ("output_groups", None), fp8), exact_inputs=True
            ),
            output_up=matrix(f"{prefix}.wo_b.weight", (hidden, rank), (None, "output_groups"), fp8),
            sink=single(f"{prefix}.attn_sink", (heads,), ("heads",), Stored.F32, "unit"),
            compressor=Compressor.describe(config, prefix, kind.ratio) if kind.mode is Mode.FULL else None,
            indexer=Indexer.describe(config, prefix) if kind.selects else None,
        )


def attend(
    params: Attention,
    kind: LayerKind,
    layer: Number,
    group: Number,
    inputs: Float[Array, "rows hidden"],
    selected: Selected,
    rows: Rows,
    source: KeySource,
    config: ModelConfig,
    numerics: Numerics,
) -> tuple[Float[Array, "rows hidden"], Selected, KeySource, Taps]:
    """One backbone attention sub-layer.

    ``layer`` and ``group`` place its window ring and page group; ``selected`` holds the selections so far. Entries of
    this step are kept before the selection, which may pick them; window keys are kept after they were read.

    Returns the output, the selections and source for the next layer, and taps.
    """
    turn = rotation(config, kind.ratio > 0, rows.positions)
    query_latent, queries = project_queries(params, inputs, turn, config)
    keys = project_window_keys(params, inputs, turn, config, numerics)
    taps: Taps = {"window_kv": keys}
    if params.compressor is not None:
        source, entries, index_keys = compress(
            params.compressor, inputs, kind.ratio, group, rows, source, config, numerics
        )
        taps |= {"compress_kv": entries, "index_k": index_keys}
    if params.indexer is not None:
        selected, index_taps = select(
            params.indexer, kind, group, inputs, query_latent, selected, rows, source, config, numerics
        )
        taps |= index_taps
    partials = [_window_partial(queries, keys, layer, rows, source, config)]
    if kind.ratio > 0:
        pool, indices = source.entry_rows(group, kind.ratio, rows, selected.entries)
        partials.append(sparse_attention(queries, pool, indices, scale=config.head_dim**-0.5))
    output = project_output(params, tuple(partials), turn, config, inputs.dtype)
    return output, selected, source.store_window(layer, keys, rows), taps


def project_queries(
    params: Attention, inputs: Float[Array, "rows hidden"], turn: Rotation, config: ModelConfig
) -> tuple[Float[Array, "rows q_rank"], Float[Array, "rows heads head_dim"]]:
    """The low-rank query latent (read by the indexer too) and the rotated queries; V4.1 has no per-head query norm."""
    latent = rms_norm(linear(inputs, params.query_down), params.query_norm, config.rms_norm_eps)
    queries = linear(latent, params.query_up).reshape(-1, config.num_attention_heads, config.head_dim)
    return latent, turn.apply(queries)


def project_window_keys(
    params: Attention, inputs: Float[Array, "rows hidden"], turn: Rotation, config: ModelConfig, numerics: Numerics
) -> Float[Array, "rows head_dim"]:
    """The rotated window key, which is also the value; what is attended is the round-tripped one, in prefill too."""
    keys = rms_norm(linear(inputs, params.window_key), params.window_norm, config.rms_norm_eps)
    keys = turn.apply(keys)
    return round_trip_fp8_32(keys) if numerics.window_keys_fp8 else keys


def project_output(
    params: Attention, partials: tuple[AttentionPartial, ...], turn: Rotation, config: ModelConfig, dtype: jnp.dtype
) -> Float[Array, "rows hidden"]:
    """Merge the partial results with the sink, rotate back by the query's position, and project per group."""
    heads = turn.undo(merge_partials(partials, params.sink).astype(dtype))
    grouped = rounded_inputs(heads.reshape(heads.shape[0], config.o_groups, -1), params.output_down)
    down = expand(params.output_down, dtype).reshape(config.o_groups, config.o_lora_rank, -1)
    latent = jnp.einsum("rgi,goi->rgo", grouped, down, precision="highest", preferred_element_type=jnp.float32)
    return linear(latent.astype(dtype).reshape(heads.shape[0], -1), params.output_up)


def _window_partial(
    queries: Float[Array, "rows heads head_dim"],
    keys: Float[Array, "rows head_dim"],
    layer: Number,
    rows: Rows,
    source: KeySource,
    config: ModelConfig,
) -> AttentionPartial:
    """Attention of every row to the last ``sliding_window`` positions, itself included, tile by tile."""
    window = config.sliding_window
    parts = []
    for part, (tiles, tile_rows), starts in rows.tile_starts():
        tiled = (tiles, tile_rows)
        begin = rows.positions[starts]
        offsets = jnp.arange(1 - window, tile_rows, dtype=jnp.int32)
        key_positions = jnp.where(begin[:, None] >= 0, begin[:, None] + offsets[None], -1)
        last = rows.positions[part].reshape(tiled)
        first = jnp.maximum(last - window + 1, rows.floors[part].reshape(tiled))
        partial = window_attention(
            queries[part].reshape(*tiled, *queries.shape[1:]),
            source.window_keys(layer, keys, rows, starts, key_positions),
            key_positions,
            first,
            last,
            scale=config.head_dim**-0.5,
        )
        parts.append(AttentionPartial(*(leaf.reshape(tiles * tile_rows, *leaf.shape[2:]) for leaf in partial)))
    return AttentionPartial(*(jnp.concatenate(leaves) for leaves in zip(*parts, strict=True)))
