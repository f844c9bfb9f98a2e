"""The indexer: scores compressed entries for every query and selects the few that attention reads.

Model specification, section 7. Index source layers own the queries; the keys belong to the key/value source layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.hyper_connections import Taps
from deepinfer_jax.model.linear import linear, linear_float32
from deepinfer_jax.model.params import Leaf, Stored, matrix
from deepinfer_jax.model.rope import rotation
from deepinfer_jax.model.rows import Rows, TileShape
from deepinfer_jax.model.source import KeySource, Number
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.quant import round_trip_fp4_32
from deepinfer_jax.topology import LayerKind
from pallas_kernels import Selection, index_scores, index_selection, paged_index_selection

# Index keys that are gathered together, whatever the context length: 128 MiB of them in bfloat16.
_KEY_ELEMENTS = 1 << 26


@struct.dataclass
class Indexer:
    """Index queries and their head weights."""

    query: Leaf
    head_weights: Leaf

    @classmethod
    def describe(cls, config: ModelConfig, prefix: str) -> Indexer:
        """``prefix`` is the attention's released prefix, ``layers.N.attn``."""
        heads = config.index_n_heads
        return cls(
            query=matrix(
                f"{prefix}.indexer.wq_b.weight",
                (heads * config.index_head_dim, config.q_lora_rank),
                ("index_heads", None),
                Stored.FP8_BLOCKS,
            ),
            head_weights=matrix(f"{prefix}.indexer.weights_proj.weight", (heads, config.hidden_size), (None, None)),
        )


@struct.dataclass
class Selected:
    """Selections of all rows, as attention and later index layers read them.

    ``entries``: entry numbers, ascending, -1 in unused places. ``candidates``: block numbers of the candidate source,
    likewise; without candidate level it has no columns.
    """

    entries: Int[Array, "rows top_k"]
    candidates: Int[Array, "rows blocks"]

    @classmethod
    def empty(cls, rows: int, config: ModelConfig) -> Selected:
        """Nothing selected: the state before the first index source layer."""
        blocks = config.candidates.topk_blocks if config.candidates else 0
        return cls(
            jnp.full((rows, config.index_topk), -1, jnp.int32),
            jnp.full((rows, blocks), -1, jnp.int32),
        )


def select(
    params: Indexer,
    kind: LayerKind,
    group: Number,
    inputs: Float[Array, "rows hidden"],
    query_latent: Float[Array, "rows q_rank"],
    selected: Selected,
    rows: Rows,
    source: KeySource,
    config: ModelConfig,
    numerics: Numerics,
) -> tuple[Selected, Taps]:
    """The selection of an index source layer over the keys of page group ``group``.

    Returns the new selections (candidates renewed where the layer publishes them), and taps ``index_score``
    ``[rows entries]`` with entries of each row's own tile.
    """
    queries, weights = project_index_queries(params, inputs, query_latent, rows.positions, config, numerics)
    visible = rows.visible_entries(kind.ratio)
    candidates = selected.candidates if kind.inside_candidates else None
    level = config.candidates
    options: dict[str, Any] = {
        "top_k": config.index_topk,
        "block_size": level.block_size if level else 0,
        "publish_blocks": level.topk_blocks if level and kind.publishes_candidates else 0,
    }

    def select_tiles(tiles: tuple[Any, ...]) -> Selection:
        starts, queries, weights, visible, candidates = tiles
        keys = source.index_keys(group, kind.ratio, rows, starts, inputs.dtype)
        return index_selection(queries, weights, keys, visible, candidates=candidates, **options)

    parts, scores = [], []
    for part, tile_shape, starts in rows.tile_starts():
        tiles = _tiled((queries, weights, visible, candidates), part, tile_shape)
        keys = source.index_keys(group, kind.ratio, rows, starts, inputs.dtype)
        pages = source.index_pages(group, kind.ratio, rows, starts)
        if pages is None:
            chosen = _in_groups(select_tiles, (starts, *tiles), _groups(tile_shape[0], keys.size))
        else:
            chosen = paged_index_selection(tiles[0], tiles[1], pages, tiles[2], candidates=tiles[3], **options)
        published = selected.candidates[part] if chosen.candidates is None else _rows_of(chosen.candidates)
        parts.append(Selected(_rows_of(chosen.entries), published))
        # All scores at once, for whoever reads the tap; otherwise the compiler drops them.
        scores.append(_rows_of(index_scores(tiles[0], tiles[1], keys)))
    combined = Selected(
        jnp.concatenate([item.entries for item in parts]), jnp.concatenate([item.candidates for item in parts])
    )
    return combined, {"index_score": jnp.concatenate(scores)}


def project_index_queries(
    params: Indexer,
    inputs: Float[Array, "rows hidden"],
    query_latent: Float[Array, "rows q_rank"],
    positions: Int[Array, " rows"],
    config: ModelConfig,
    numerics: Numerics,
) -> tuple[Float[Array, "rows index_heads index_dim"], Float[Array, "rows index_heads"]]:
    """The rotated index queries, and their head weights with the scale of the scores inside."""
    queries = linear(query_latent, params.query).reshape(-1, config.index_n_heads, config.index_head_dim)
    queries = rotation(config, True, positions).apply(queries)
    if numerics.index_queries_fp4:
        queries = round_trip_fp4_32(queries)
    scale = (config.index_head_dim * config.index_n_heads) ** -0.5
    return queries, (linear_float32(inputs, params.head_weights) * scale).astype(inputs.dtype)


def _tiled(values: tuple[Array | None, ...], part: slice, shape: TileShape) -> tuple[Any, ...]:
    """The rows of a tile group, tile by tile."""
    return jax.tree.map(lambda leaf: leaf[part].reshape(*shape, *leaf.shape[1:]), values)


def _rows_of(values: Array) -> Array:
    """Tiles as rows again."""
    return values.reshape(-1, *values.shape[2:])


def _groups(tiles: int, elements: int) -> int:
    """Into how many equal groups to cut the tiles, so that each gathers few enough keys; at most one a tile."""
    return next(
        (count for count in range(1, tiles) if tiles % count == 0 and elements // count <= _KEY_ELEMENTS), tiles
    )


def _in_groups(select_tiles: Callable[[tuple[Any, ...]], Selection], tiles: tuple[Any, ...], groups: int) -> Selection:
    """``select_tiles`` over arrays with a leading axis of tiles, one group after the other."""
    if groups == 1:
        return select_tiles(tiles)
    grouped = jax.tree.map(lambda values: values.reshape(groups, -1, *values.shape[1:]), tiles)
    chosen = jax.lax.map(select_tiles, grouped)
    return jax.tree.map(lambda values: values.reshape(-1, *values.shape[2:]), chosen)
