"""Vision: the image encoder, the aligner to the model's width, and the embeddings of an image span.

Model specification, sections 14.3 to 14.5. One image at a time; its grids are static. The dtype of the parameters is
the dtype of the computation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from deepinfer_jax.config import ModelConfig, VisionConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.linear import linear, linear_float32, rms_norm
from deepinfer_jax.model.params import Leaf, norm, single
from deepinfer_jax.model.rope import inverse_frequencies

NORM_EPSILON = 1e-6
COLOURS = 3
# Attention scores exist for this many patches at a time: all of a large image's would be gigabytes.
QUERY_TILE = 512


@struct.dataclass
class VisionBlock:
    """Weights of one transformer block. ``query_key_value`` stacks q, k, v; ``gate_up`` stacks gate above up."""

    attention_norm: Leaf
    query_key_value: Leaf
    query_key_value_bias: Leaf
    output: Leaf
    output_bias: Leaf
    feed_forward_norm: Leaf
    gate_up: Leaf
    down: Leaf

    @classmethod
    def describe(cls, config: VisionConfig, prefix: str) -> VisionBlock:
        """``prefix`` is the block's released prefix, ``vision.blocks.N``."""
        width, inner, plain = config.hidden_size, config.intermediate_size, (None, None)
        return cls(
            attention_norm=norm(f"{prefix}.norm1.weight", width),
            query_key_value=single(f"{prefix}.attn.wqkv.weight", (3 * width, width), plain),
            query_key_value_bias=_bias(f"{prefix}.attn.wqkv.bias", 3 * width),
            output=single(f"{prefix}.attn.wo.weight", (width, width), plain),
            output_bias=_bias(f"{prefix}.attn.wo.bias", width),
            feed_forward_norm=norm(f"{prefix}.norm2.weight", width),
            gate_up=single(f"{prefix}.mlp.w1.weight", (2 * inner, width), plain),
            down=single(f"{prefix}.mlp.w2.weight", (width, inner), plain),
        )


@struct.dataclass
class Aligner:
    """The two projections from a square of patch features to a token embedding."""

    first: Leaf
    first_bias: Leaf
    second: Leaf
    second_bias: Leaf

    @classmethod
    def describe(cls, hidden: int, config: VisionConfig) -> Aligner:
        """``hidden`` is the language model's width."""
        gathered = config.hidden_size * config.downsample_ratio**2
        return cls(
            first=single("aligner.w1.weight", (hidden, gathered), (None, None)),
            first_bias=_bias("aligner.w1.bias", hidden),
            second=single("aligner.w2.weight", (hidden, hidden), (None, None)),
            second_bias=_bias("aligner.w2.bias", hidden),
        )


@struct.dataclass
class Vision:
    """Everything that turns patches into rows for the language model."""

    patch_embedding: Leaf
    patch_embedding_bias: Leaf
    blocks: tuple[VisionBlock, ...]
    norm: Leaf
    aligner: Aligner
    image_start: Leaf
    image_newline: Leaf
    image_end: Leaf

    @classmethod
    def describe(cls, config: ModelConfig) -> Vision:
        """The parameters of a configuration that has vision."""
        vision = config.vision
        assert vision is not None
        pixels = COLOURS * vision.patch_size**2
        return cls(
            patch_embedding=single("vision.patch_embed.proj.weight", (vision.hidden_size, pixels), (None, None)),
            patch_embedding_bias=_bias("vision.patch_embed.proj.bias", vision.hidden_size),
            blocks=tuple(
                VisionBlock.describe(vision, f"vision.blocks.{block}") for block in range(vision.num_hidden_layers)
            ),
            norm=norm("vision.norm.weight", vision.hidden_size),
            aligner=Aligner.describe(config.hidden_size, vision),
            image_start=single("image_start", (config.hidden_size,), (None,), init="unit"),
            image_newline=single("image_newline", (config.hidden_size,), (None,), init="unit"),
            image_end=single("image_end", (config.hidden_size,), (None,), init="unit"),
        )


def vision_tower(
    params: Vision, patches: Float[Array, "patches *pixels"], grid: tuple[int, int], config: VisionConfig
) -> Float[Array, "patches features"]:
    """Encode one image with attention among all of its patches.

    Args:
      params: the vision parameters.
      patches: patches in raster order, channel first; pixels flat or ``[3 patch_size patch_size]``.
      grid: rows and columns of patches, static.
      config: static.

    Raises:
      InputError: the patches do not fill the grid.
    """
    rows, columns = grid
    if patches.shape[0] != rows * columns:
        raise InputError("patches", patches.shape[0], f"{rows * columns} for a grid of {rows} x {columns}")
    pixels = patches.reshape(rows * columns, -1).astype(params.patch_embedding.dtype)
    hidden = _affine(pixels, params.patch_embedding, params.patch_embedding_bias)
    cosines, sines = _patch_rotation(grid, config)
    for number, block in enumerate(params.blocks):
        with jax.named_scope(f"vision_block_{number}"):
            hidden = _run_block(block, hidden, cosines, sines, config)
    return rms_norm(hidden, params.norm, NORM_EPSILON)


def align(
    params: Vision, features: Float[Array, "patches features"], grid: tuple[int, int], config: VisionConfig
) -> Float[Array, "tokens hidden"]:
    """Join squares of patch features to token embeddings, in raster order of the token grid.

    ``grid`` is the patch grid. Squares that reach beyond its bottom or right edge are filled with zeros. A square is
    flattened channel first: index ``channel * ratio^2 + row * ratio + column``.
    """
    rows, columns = grid
    ratio, width = config.downsample_ratio, features.shape[-1]
    pads = ((0, -rows % ratio), (0, -columns % ratio), (0, 0))
    padded = jnp.pad(features.reshape(rows, columns, width), pads)
    token_rows, token_columns = padded.shape[0] // ratio, padded.shape[1] // ratio
    squares = padded.reshape(token_rows, ratio, token_columns, ratio, width).transpose(0, 2, 4, 1, 3)
    gathered = squares.reshape(token_rows * token_columns, width * ratio**2)
    hidden = _affine(gathered, params.aligner.first, params.aligner.first_bias)
    activated = jax.nn.gelu(hidden.astype(jnp.float32), approximate=False).astype(hidden.dtype)
    return _affine(activated, params.aligner.second, params.aligner.second_bias)


def image_span_embeddings(
    params: Vision, aligned: Float[Array, "tokens hidden"], token_grid: tuple[int, int]
) -> Float[Array, "span hidden"]:
    """The embeddings of an image span: start, each row of tokens followed by the newline vector, end."""
    rows, columns = token_grid
    width = aligned.shape[-1]
    newlines = jnp.broadcast_to(params.image_newline, (rows, 1, width))
    lines = jnp.concatenate([aligned.reshape(rows, columns, width), newlines], axis=1)
    return jnp.concatenate([params.image_start[None], lines.reshape(-1, width), params.image_end[None]])


def _run_block(
    params: VisionBlock,
    hidden: Float[Array, "patches features"],
    cosines: Float[Array, "patches half"],
    sines: Float[Array, "patches half"],
    config: VisionConfig,
) -> Float[Array, "patches features"]:
    normed = rms_norm(hidden, params.attention_norm, NORM_EPSILON)
    projected = _affine(normed, params.query_key_value, params.query_key_value_bias)
    heads = projected.reshape(hidden.shape[0], 3, config.num_attention_heads, -1)
    queries, keys = _rotate_halves(heads[:, 0], cosines, sines), _rotate_halves(heads[:, 1], cosines, sines)
    attended = _attend(queries, keys, heads[:, 2]).reshape(hidden.shape)
    hidden = hidden + _affine(attended, params.output, params.output_bias)
    normed = rms_norm(hidden, params.feed_forward_norm, NORM_EPSILON)
    gate, up = jnp.split(linear_float32(normed, params.gate_up), 2, axis=-1)
    return hidden + linear((jax.nn.silu(gate) * up).astype(hidden.dtype), params.down)


def _attend(
    queries: Float[Array, "patches heads head_dim"],
    keys: Float[Array, "patches heads head_dim"],
    values: Float[Array, "patches heads head_dim"],
) -> Float[Array, "patches heads head_dim"]:
    def attend_one(query: Float[Array, "heads head_dim"]) -> Float[Array, "heads head_dim"]:
        scores = jnp.einsum("hd,khd->hk", query, keys, precision="highest", preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores * query.shape[-1] ** -0.5, axis=-1).astype(values.dtype)
        mixed = jnp.einsum("hk,khd->hd", weights, values, precision="highest", preferred_element_type=jnp.float32)
        return mixed.astype(values.dtype)

    return jax.lax.map(attend_one, queries, batch_size=QUERY_TILE)


def _patch_rotation(
    grid: tuple[int, int], config: VisionConfig
) -> tuple[Float[Array, "patches half"], Float[Array, "patches half"]]:
    """Cosines and sines of the 2-D rotary embedding: the first half of the angles turns by row, the rest by column."""
    rows, columns = grid
    half = config.hidden_size // config.num_attention_heads // 2
    frequencies = jnp.asarray(inverse_frequencies(config.rope_theta, half, None))[None]
    by_row = jnp.arange(rows, dtype=jnp.float32)[:, None] * frequencies
    by_column = jnp.arange(columns, dtype=jnp.float32)[:, None] * frequencies
    angles = jnp.concatenate([jnp.repeat(by_row, columns, axis=0), jnp.tile(by_column, (rows, 1))], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def _rotate_halves(
    vectors: Float[Array, "patches heads head_dim"],
    cosines: Float[Array, "patches half"],
    sines: Float[Array, "patches half"],
) -> Float[Array, "patches heads head_dim"]:
    """Rotate channel i of the first half with channel i of the second, in float32, rounded once."""
    first, second = jnp.split(vectors.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosines[:, None], sines[:, None]
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(vectors.dtype)


def _affine(
    inputs: Float[Array, "rows in"], weight: Float[Array, "out in"], bias: Float[Array, " out"]
) -> Float[Array, "rows out"]:
    return (linear_float32(inputs, weight) + bias[None].astype(jnp.float32)).astype(inputs.dtype)


def _bias(name: str, width: int) -> Leaf:
    return single(name, (width,), (None,), init="small")
