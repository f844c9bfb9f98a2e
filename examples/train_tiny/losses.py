"""What training minimises: the loss of the next token, and the indexers' distance from what attention looks at."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.attention import project_queries
from deepinfer_jax.model.compressor import compress
from deepinfer_jax.model.exchange import LocalExchange
from deepinfer_jax.model.hyper_connections import Taps
from deepinfer_jax.model.indexer import project_index_queries
from deepinfer_jax.model.layer import Layer, UnrolledLayers
from deepinfer_jax.model.rope import rotation
from deepinfer_jax.model.rows import Rows, sequence_rows
from deepinfer_jax.model.source import SequenceSource
from deepinfer_jax.model.transformer import Model, Output, forward, logits
from deepinfer_jax.numerics import F32, Numerics
from deepinfer_jax.topology import LayerPlan, topology
from pallas_kernels import index_scores

TILE_ROWS = 64
DENSE = LocalExchange("dense")


def run_windows(
    params: Model, inputs: Int[Array, "windows length"], config: ModelConfig, numerics: Numerics = F32
) -> tuple[Output, Rows]:
    """One stateless, differentiable pass; ``inputs`` is a multiple of the tile long."""
    rows = sequence_rows(inputs, min(TILE_ROWS, inputs.shape[1]))
    return forward(params, rows, empty_source(rows, inputs.shape[1], config, numerics), config, numerics, DENSE), rows


def with_memory(params: Model, share: float | Float[Array, ""], config: ModelConfig) -> Model:
    """The model whose Engram memories add ``share`` of their value to the streams; 0 changes no stream."""
    keys = config.hc_mult * config.hidden_size
    engrams = tuple(
        dataclasses.replace(memory, key_value=memory.key_value.at[keys:].multiply(share)) for memory in params.engrams
    )
    return dataclasses.replace(params, engrams=engrams)


def next_token_losses(
    params: Model, output: Output, targets: Int[Array, "windows length"]
) -> Float[Array, "windows length"]:
    """Negative log likelihood of every target, in nats."""
    scores = logits(params, output.hidden).reshape(*targets.shape, -1)
    return optax.softmax_cross_entropy_with_integer_labels(scores, targets)


def answers(tokens: Int[Array, "windows window"], assistant: int | None, end: int) -> Bool[Array, "windows window"]:
    """Which tokens a model shall learn to say.

    In windows of chats, those behind an assistant's mark up to the end of its answer; everything in windows that hold
    no such mark. ``assistant`` is None for a tokenizer without one.
    """
    if assistant is None:
        return jnp.ones(tokens.shape, bool)
    places = jnp.arange(tokens.shape[1])[None]

    def latest(token: int) -> Array:
        """The last place before each token where ``token`` stands, -1 for none."""
        found = jax.lax.cummax(jnp.where(tokens == token, places, -1), axis=1)
        return jnp.concatenate([jnp.full_like(found[:, :1], -1), found[:, :-1]], axis=1)

    inside = latest(assistant) > latest(end)
    return inside | ~(tokens == assistant).any(axis=1, keepdims=True)


def index_losses(
    params: Model, taps: Taps, rows: Rows, length: int, every: int, config: ModelConfig
) -> Float[Array, " indexers"]:
    """Per index source layer, the divergence of its scores from the attention over all visible entries.

    The target of a query is its attention mass, averaged over the heads, if it attended every visible entry. Only the
    indexers' own weights and the index keys' receive gradients. Every ``every``-th query counts.
    """
    plans = [plan for plan in topology(config).layers if plan.kind.selects]
    return jnp.stack([_index_loss(params, taps, plan, rows, length, every, config) for plan in plans])


def expert_loads(taps: Taps, config: ModelConfig) -> Float[Array, "layers experts"]:
    """Share of all choices that fell on each expert, per layer; a balanced layer has ``1 / experts`` everywhere."""
    chosen = jnp.stack([taps[f"layers.{layer}.router_indices"] for layer in range(config.num_hidden_layers)])
    return jax.nn.one_hot(chosen, config.n_routed_experts).mean(axis=(1, 2))


def _index_loss(
    params: Model, taps: Taps, plan: LayerPlan, rows: Rows, length: int, every: int, config: ModelConfig
) -> Float[Array, ""]:
    assert isinstance(params.layers, UnrolledLayers)
    assert plan.kv_source is not None
    assert plan.group is not None
    ratio, windows = plan.kind.ratio, rows.tokens.shape[0] // length
    owner, reader = (_only_index_weights(params.layers.layers[layer]) for layer in (plan.kv_source, plan.layer))
    owner_inputs, inputs = (
        jax.lax.stop_gradient(taps[f"layers.{layer}.attn_in"]) for layer in (plan.kv_source, plan.layer)
    )
    _, entries, index_keys = compress(
        owner.attention.compressor,
        owner_inputs,
        ratio,
        plan.group,
        rows,
        empty_source(rows, length, config),
        config,
        F32,
    )
    asking = jnp.arange(every - 1, rows.tokens.shape[0], every)
    inputs, positions = inputs[asking], rows.positions[asking]
    latent, queries = project_queries(reader.attention, inputs, rotation(config, True, positions), config)
    index_queries, weights = project_index_queries(reader.attention.indexer, inputs, latent, positions, config, F32)

    def by_window(values: Array) -> Array:
        return values.reshape(windows, -1, *values.shape[1:])

    completing = slice(ratio - 1, None, ratio)
    scores = index_scores(by_window(index_queries), by_window(weights), by_window(index_keys)[:, completing])
    queries, keys = by_window(queries), by_window(entries)[:, completing]
    visible = by_window(rows.visible_entries(ratio)[asking])
    seen = jnp.arange(keys.shape[1])[None, None] < visible[..., None]
    dots = jnp.einsum("wthd,wed->wthe", queries, keys) * config.head_dim**-0.5
    mass = jax.nn.softmax(jnp.where(seen[:, :, None], dots, -jnp.inf), axis=-1).mean(axis=2)
    mass = jax.lax.stop_gradient(jnp.where(seen, mass, 0.0))
    predicted = jax.nn.log_softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    entropy = -(mass * jnp.log(jnp.maximum(mass, 1e-30))).sum(axis=-1)
    return (-(mass * jnp.where(seen, predicted, 0.0)).sum(axis=-1) - entropy).mean()


def _only_index_weights(layer: Layer) -> Layer:
    """The layer with gradients stopped everywhere but at what makes index scores."""
    frozen, attention = jax.lax.stop_gradient(layer), layer.attention
    compressor = frozen.attention.compressor
    if compressor is not None:
        live = attention.compressor
        compressor = dataclasses.replace(compressor, index_key=live.index_key, index_key_norm=live.index_key_norm)
    attention = dataclasses.replace(frozen.attention, compressor=compressor, indexer=attention.indexer)
    return dataclasses.replace(frozen, attention=attention)


def empty_source(rows: Rows, length: int, config: ModelConfig, numerics: Numerics = F32) -> SequenceSource:
    """The source of whole windows of ``length`` tokens, before the first layer."""
    return SequenceSource.empty(rows.tokens.shape[0], length, config.head_dim, config.index_head_dim, numerics.dtype)
