"""The DSpark draft head: a few window-only blocks that draft several tokens at once.

Model specification, section 11. Context keys come from the backbone (stream means entering the target layers); a block
of one anchor and noise tokens attends them and itself without causal mask; a low-rank Markov term then chains drafts.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.attention import project_output, project_queries, project_window_keys
from deepinfer_jax.model.exchange import LOCAL, Exchange
from deepinfer_jax.model.hyper_connections import collapse, initial_streams, run_sub_layer
from deepinfer_jax.model.layer import Layer
from deepinfer_jax.model.linear import linear, linear_float32, rms_norm
from deepinfer_jax.model.moe import mixture_of_experts
from deepinfer_jax.model.params import Leaf, Stored, matrix, norm, single
from deepinfer_jax.model.rope import Rotation, rotation
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.source import KeySource
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.topology import LayerKind, Mode
from pallas_kernels import AttentionPartial, Weight, expand, window_attention

_STAGE_KIND = LayerKind(Mode.WINDOW, 0)
_LARGEST_CONFIDENCE_LOGIT = 60.0


@struct.dataclass
class DraftHead:
    """Parameters of the draft stages. Embedding and output head are the backbone's."""

    stages: tuple[Layer, ...]
    main_projection: Leaf
    main_norm: Leaf
    norm: Leaf
    markov_embedding: Leaf
    markov_head: Leaf
    confidence: Leaf

    @classmethod
    def describe(cls, config: ModelConfig) -> DraftHead:
        """The draft head of a configuration that has one."""
        draft = config.draft
        assert draft is not None
        hidden, last = config.hidden_size, f"mtp.{draft.stages - 1}"
        markov = (config.vocab_size, draft.markov_rank)
        return cls(
            stages=tuple(
                Layer.describe(config, f"mtp.{stage}", _STAGE_KIND, draft.n_routed_experts)
                for stage in range(draft.stages)
            ),
            main_projection=matrix(
                "mtp.0.main_proj.weight",
                (hidden, len(draft.target_layer_ids) * hidden),
                (None, None),
                Stored.FP8_BLOCKS,
            ),
            main_norm=norm("mtp.0.main_norm.weight", hidden),
            norm=norm(f"{last}.norm.weight", hidden),
            markov_embedding=single(f"{last}.markov_head.embed.weight", markov, ("vocabulary", None), init="unit"),
            markov_head=matrix(f"{last}.markov_head.head.weight", markov, ("vocabulary", None)),
            confidence=matrix(f"{last}.confidence_head.proj.weight", (1, hidden + draft.markov_rank), (None, None)),
        )


@struct.dataclass
class DraftBlock:
    """What the stages say about a block, before the Markov chain.

    ``hidden``: collapsed output of the last stage, before its norm. ``base_logits``: float32.
    """

    hidden: Float[Array, "requests block hidden"]
    base_logits: Float[Array, "requests block vocabulary"]


@struct.dataclass
class Drafts:
    """Drafted tokens; ``logits`` float32, ``confidence`` raw logits of conditional acceptance, float32."""

    tokens: Int[Array, "requests block"]
    logits: Float[Array, "requests block vocabulary"]
    confidence: Float[Array, "requests block"]


def context_keys(
    params: DraftHead,
    draft_taps: Float[Array, "targets rows hidden"],
    rows: Rows,
    config: ModelConfig,
    numerics: Numerics,
) -> tuple[Float[Array, "rows head_dim"], ...]:
    """Each stage's context key of every row, from the backbone's draft taps. This is all the head does in prefill."""
    taps = jnp.moveaxis(draft_taps, 0, 1).reshape(draft_taps.shape[1], -1)
    context = rms_norm(linear(taps, params.main_projection), params.main_norm, config.rms_norm_eps)
    turn = rotation(config, False, rows.positions)
    return tuple(project_window_keys(stage.attention, context, turn, config, numerics) for stage in params.stages)


def store_context(
    keys: tuple[Float[Array, "rows head_dim"], ...], rows: Rows, source: KeySource, config: ModelConfig
) -> KeySource:
    """Keep the context keys in the stages' window rings, which follow the backbone layers'."""
    for stage, stage_keys in enumerate(keys):
        source = source.store_window(config.num_hidden_layers + stage, stage_keys, rows)
    return source


def context_windows(
    keys: tuple[Float[Array, "rows head_dim"], ...],
    rows: Rows,
    source: KeySource,
    request: Int[Array, " requests"],
    positions: Int[Array, " requests"],
    config: ModelConfig,
) -> tuple[Float[Array, "requests window head_dim"], ...]:
    """Per stage, the context keys of the ``sliding_window`` positions up to ``positions``, oldest first.

    ``request`` names each request by any of its rows; positions before the sequence's start give zeros.
    """
    wanted = positions[:, None] + jnp.arange(1 - config.sliding_window, 1)[None]
    return tuple(
        source.window_keys(config.num_hidden_layers + stage, stage_keys, rows, request, wanted)
        for stage, stage_keys in enumerate(keys)
    )


def draft_block(
    params: DraftHead,
    embedding: Float[Array, "vocabulary hidden"],
    head: Weight,
    anchors: Int[Array, " requests"],
    positions: Int[Array, " requests"],
    windows: tuple[Float[Array, "requests window head_dim"], ...],
    config: ModelConfig,
    numerics: Numerics,
    exchange: Exchange = LOCAL,
) -> DraftBlock:
    """Run the stages over ``[anchor, noise, ...]`` at positions ``p + 1 ..``.

    Args:
      params, embedding, head: the draft head and the backbone's tables.
      anchors: the token just sampled for position p + 1.
      positions: p, the last position whose backbone forward is committed; -1 for a padding request.
      windows: context keys per stage, see :func:`context_windows`.
      config, numerics: static.
      exchange: how rows reach routed experts and token embeddings.
    """
    draft = config.draft
    assert draft is not None
    requests, block = anchors.shape[0], draft.block_size
    noise = jnp.full((requests, block - 1), draft.noise_token_id, anchors.dtype)
    tokens = jnp.concatenate([anchors[:, None], noise], axis=1).reshape(-1)
    own_positions = positions[:, None] + jnp.arange(1, block + 1)[None]
    turn = rotation(config, False, own_positions.reshape(-1))
    valid = jnp.repeat(positions >= 0, block)
    embeddings = expand(exchange.lookup(embedding, tokens), numerics.dtype).astype(numerics.dtype)
    streams, pre = initial_streams(embeddings, config.hc_mult)
    for stage, window in zip(params.stages, windows, strict=True):

        def attention(inputs: Array, stage: Layer = stage, window: Array = window) -> tuple[Array, None]:
            return _attend_block(stage, inputs, window, positions, turn, config, numerics), None

        def feed_forward(inputs: Array, stage: Layer = stage) -> tuple[Array, None]:
            text = jnp.zeros(valid.shape, bool)
            chosen = draft.num_experts_per_tok
            return mixture_of_experts(stage.feed_forward, inputs, text, valid, chosen, config, exchange)[0], None

        streams, pre, _, _ = run_sub_layer(stage.attention_mix, streams, pre, attention, config)
        streams, pre, _, _ = run_sub_layer(stage.feed_forward_mix, streams, pre, feed_forward, config)
    hidden = collapse(streams, pre)
    base = linear_float32(rms_norm(hidden, params.norm, config.rms_norm_eps), head)
    return DraftBlock(hidden.reshape(requests, block, -1), base.reshape(requests, block, -1))


def _attend_block(
    stage: Layer,
    inputs: Float[Array, "rows hidden"],
    window: Float[Array, "requests window head_dim"],
    positions: Int[Array, " requests"],
    turn: Rotation,
    config: ModelConfig,
    numerics: Numerics,
) -> Float[Array, "rows hidden"]:
    """Every row of a block attends the same keys: the context window up to p and the whole block."""
    requests, context, _ = window.shape
    block = inputs.shape[0] // requests
    _, queries = project_queries(stage.attention, inputs, turn, config)
    own = project_window_keys(stage.attention, inputs, turn, config, numerics)
    keys = jnp.concatenate([window, own.reshape(requests, block, -1)], axis=1)
    key_positions = positions[:, None] + jnp.arange(1 - context, block + 1)[None]
    first = jnp.broadcast_to(jnp.maximum(positions - context + 1, 0)[:, None], (requests, block))
    last = jnp.broadcast_to(jnp.where(positions >= 0, positions + block, -1)[:, None], (requests, block))
    partial = window_attention(
        queries.reshape(requests, block, *queries.shape[1:]),
        keys,
        key_positions,
        first,
        last,
        scale=config.head_dim**-0.5,
    )
    flat = AttentionPartial(*(leaf.reshape(requests * block, *leaf.shape[2:]) for leaf in partial))
    return project_output(stage.attention, (flat,), turn, config, inputs.dtype)


def greedy(logits: Float[Array, "requests vocabulary"], step: int) -> Int[Array, " requests"]:
    """Temperature 0: the first largest logit."""
    del step
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def chain_drafts(
    params: DraftHead,
    block: DraftBlock,
    anchors: Int[Array, " requests"],
    choose: Callable[[Array, int], Array] = greedy,
) -> Drafts:
    """Draft token after token: base logits plus the Markov term of the token before.

    ``choose(logits, step)`` picks the tokens of one step; draft i stands at position p + 2 + i.
    """
    tokens, scores, confidences = [], [], []
    previous = anchors
    for step in range(block.base_logits.shape[1]):
        state = params.markov_embedding[previous]
        step_logits = block.base_logits[:, step] + linear_float32(state, params.markov_head)
        features = jnp.concatenate([block.hidden[:, step], state.astype(block.hidden.dtype)], axis=-1)
        confidences.append(linear_float32(features, params.confidence)[:, 0])
        previous = choose(step_logits, step)
        tokens.append(previous)
        scores.append(step_logits)
    return Drafts(jnp.stack(tokens, 1), jnp.stack(scores, 1), jnp.stack(confidences, 1))


def acceptance(
    confidence: Float[Array, "*batch block"], temperature: Float[Array, " block"]
) -> Float[Array, "*batch block"]:
    """Estimated conditional acceptance of drafts from raw confidences, with a calibration temperature per place."""
    scaled = confidence / jnp.broadcast_to(temperature, confidence.shape)
    return jax.nn.sigmoid(jnp.clip(scaled, -_LARGEST_CONFIDENCE_LOGIT, _LARGEST_CONFIDENCE_LOGIT))
