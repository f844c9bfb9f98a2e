"""The backbone, end to end: embedding, Engram, layers, output head (model specification, section 2)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.compressor import compress
from deepinfer_jax.model.draft import DraftHead
from deepinfer_jax.model.engram import Engram, compressed_ids, read_memory, table_rows
from deepinfer_jax.model.exchange import LOCAL, Exchange
from deepinfer_jax.model.hyper_connections import Taps, collapse, initial_streams
from deepinfer_jax.model.indexer import Selected
from deepinfer_jax.model.layer import (
    Carry,
    Layer,
    LayerNumbers,
    StackedLayers,
    UnrolledLayers,
    run_layer,
    run_segment,
    stack_layers,
    unroll_layers,
)
from deepinfer_jax.model.linear import linear_float32, rms_norm
from deepinfer_jax.model.params import Leaf, Parameter, Stored, matrix, norm, single
from deepinfer_jax.model.rows import Kept, Rows
from deepinfer_jax.model.source import KeySource
from deepinfer_jax.model.vision import Vision
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.topology import Segment, Topology, topology
from pallas_kernels import expand


@struct.dataclass
class Model:
    """All parameters of a checkpoint. Absent features are None or empty."""

    embedding: Leaf
    head: Leaf
    norm: Leaf
    layers: UnrolledLayers | StackedLayers
    engrams: tuple[Engram, ...]
    token_map: Leaf  # token id -> compressed id, for Engram; derived from the tokenizer
    draft: DraftHead | None
    vision: Vision | None

    @classmethod
    def describe(cls, config: ModelConfig) -> Model:
        """The description of every parameter of a configuration, unrolled."""
        table = (config.vocab_size, config.hidden_size)
        plans = topology(config).layers
        engram = config.engram
        return cls(
            embedding=single("embed.weight", table, ("vocabulary", None), init="unit"),
            head=matrix("head.weight", table, ("vocabulary", None)),
            norm=norm("norm.weight", config.hidden_size),
            layers=UnrolledLayers(
                tuple(
                    Layer.describe(config, f"layers.{plan.layer}", plan.kind, config.n_routed_experts) for plan in plans
                )
            ),
            engrams=tuple(Engram.describe(config, memory) for memory in range(len(engram.layer_ids) if engram else 0)),
            token_map=Parameter((config.vocab_size,), (None,), Stored.DERIVED, (), classes=engram.compressed_vocab_size)
            if engram
            else None,
            draft=DraftHead.describe(config) if config.draft else None,
            vision=Vision.describe(config) if config.vision else None,
        )

    def stacked(self, config: ModelConfig) -> Model:
        """The same parameters with stacked layers."""
        if isinstance(self.layers, StackedLayers):
            return self
        return dataclasses.replace(self, layers=stack_layers(self.layers, topology(config)))

    def unrolled(self, config: ModelConfig) -> Model:
        """The same parameters with unrolled layers."""
        if isinstance(self.layers, UnrolledLayers):
            return self
        return dataclasses.replace(self, layers=unroll_layers(self.layers, topology(config)))


@struct.dataclass
class Output:
    """Result of a forward pass.

    ``hidden``: final-norm output per row, input of :func:`logits`. ``draft_taps``: per draft target layer, the mean of
    the streams entering it. ``source``: the successor of the key source. ``taps``: named intermediates.
    """

    hidden: Float[Array, "rows hidden"]
    draft_taps: Float[Array, "targets rows hidden"]
    source: KeySource
    taps: Taps


def forward(
    params: Model,
    rows: Rows,
    source: KeySource,
    config: ModelConfig,
    numerics: Numerics,
    exchange: Exchange = LOCAL,
    kept: Kept | None = None,
) -> Output:
    """Run the backbone over a step's rows.

    Args:
      params: parameters in either physical form; stacked ones run as scans.
      rows: the step's rows.
      source: where keys of earlier tokens are found; its successor is in the output.
      config, numerics: static.
      exchange: how rows reach routed experts, token embeddings and Engram tables.
      kept: the rows that run through the decoder layers; the others end with the entries that these layers read. None
        runs all rows through all layers.

    Returns:
      The output, of the kept rows where there are such. Per-layer taps exist in unrolled form only, named as in the
      golden data; everything unread is dropped by the compiler.
    """
    plan = topology(config)
    carry, columns, taps = _begin(params, rows, source, config, numerics, exchange)
    if kept is None:
        carry, taps = _run(params, plan, plan.segments, carry, columns, rows, taps, config, numerics, exchange)
    else:
        encoder, decoder = _sides(plan)
        carry, taps = _run(params, plan, encoder, carry, columns, rows, taps, config, numerics, exchange)
        carry = _keep(params, plan, carry, rows, kept, config, numerics)
        columns = None if columns is None else columns[jnp.maximum(kept.index, 0)]
        carry, taps = _run(params, plan, decoder, carry, columns, kept.rows, taps, config, numerics, exchange)
    collapsed = collapse(carry.streams, carry.pre)
    taps["collapsed"] = collapsed
    hidden = rms_norm(collapsed, params.norm, config.rms_norm_eps)
    return Output(hidden, carry.draft_taps, carry.source, taps)


def encode(
    params: Model,
    rows: Rows,
    source: KeySource,
    config: ModelConfig,
    numerics: Numerics,
    exchange: Exchange = LOCAL,
) -> KeySource:
    """Run the encoder layers alone, and keep the entries of these rows that decoder layers read.

    ``params`` may lack what :func:`deepinfer_jax.checkpoint.subset.encoder_only` leaves out.
    """
    plan = topology(config)
    carry, columns, taps = _begin(params, rows, source, config, numerics, exchange)
    carry, _ = _run(params, plan, _sides(plan)[0], carry, columns, rows, taps, config, numerics, exchange)
    return _store_decoder_entries(params, plan, carry, rows, config, numerics)


def _begin(
    params: Model, rows: Rows, source: KeySource, config: ModelConfig, numerics: Numerics, exchange: Exchange
) -> tuple[Carry, Int[Array, "rows memories columns"] | None, Taps]:
    """The carry before the first layer, and the table rows that the Engram memories read."""
    embeddings = embed(params, rows, numerics, exchange)
    taps: Taps = {"embed_out": embeddings}
    columns = None
    if config.engram is not None:
        ids = compressed_ids(params.token_map, rows)
        columns = table_rows(ids, rows, source, params.token_map, config.engram)
        source = source.store_ids(ids, rows)
        taps["engram_hash_ids"] = columns
    streams, pre = initial_streams(embeddings, config.hc_mult)
    targets = len(config.draft.target_layer_ids) if config.draft else 0
    count = rows.tokens.shape[0]
    carry = Carry(
        streams=streams,
        pre=pre,
        selected=Selected.empty(count, config),
        source=source,
        draft_taps=jnp.zeros((targets, count, config.hidden_size), numerics.dtype),
    )
    return carry, columns, taps


def _sides(plan: Topology) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """The segments of the encoder and those of the decoder."""
    encoder = tuple(segment for segment in plan.segments if segment.first_layer < plan.encoder_layers)
    return encoder, plan.segments[len(encoder) :]


def _run(
    params: Model,
    plan: Topology,
    segments: tuple[Segment, ...],
    carry: Carry,
    columns: Int[Array, "rows memories columns"] | None,
    rows: Rows,
    taps: Taps,
    config: ModelConfig,
    numerics: Numerics,
    exchange: Exchange,
) -> tuple[Carry, Taps]:
    for segment in segments:
        if segment.engram is not None:
            assert columns is not None
            streams, gates = read_memory(
                params.engrams[segment.engram], carry.streams, columns[:, segment.engram], rows.image, config, exchange
            )
            carry = dataclasses.replace(carry, streams=streams)
            name = f"layers.{segment.first_layer}"
            taps = taps | {f"{name}.streams_after_engram": streams, f"{name}.engram.gate": gates}
        if isinstance(params.layers, StackedLayers):
            runs = params.layers.segments[plan.segments.index(segment)]
            carry = run_segment(runs, segment, plan, carry, rows, config, numerics, exchange)
        else:
            carry, layer_taps = _run_unrolled(
                params.layers, segment.layers, plan, carry, rows, config, numerics, exchange
            )
            taps = taps | layer_taps
    return carry, taps


def _keep(
    params: Model, plan: Topology, carry: Carry, rows: Rows, kept: Kept, config: ModelConfig, numerics: Numerics
) -> Carry:
    """Store the entries of all rows that decoder layers read, and go on with the kept rows alone.

    The first decoder layer computes the kept rows' entries once more, rounded otherwise, and does not store them.
    """
    source = _store_decoder_entries(params, plan, carry, rows, config, numerics)
    index = jnp.maximum(kept.index, 0)
    return Carry(
        streams=carry.streams[index],
        pre=carry.pre[index],
        selected=jax.tree.map(lambda leaf: leaf[index], carry.selected),
        source=source,
        draft_taps=carry.draft_taps[:, index],
    )


def _store_decoder_entries(
    params: Model, plan: Topology, carry: Carry, rows: Rows, config: ModelConfig, numerics: Numerics
) -> KeySource:
    """The source with the entries of the first decoder layer, which all decoder layers read."""
    layer = plan.layers[plan.encoder_layers]
    weights = _first_decoder_layer(params.layers, plan)
    compressor = weights.attention.compressor
    assert layer.kind.ratio == 1
    assert layer.group is not None
    assert compressor is not None
    inputs = rms_norm(collapse(carry.streams, carry.pre), weights.attention_mix.norm, config.rms_norm_eps)
    source, _, _ = compress(compressor, inputs, layer.kind.ratio, layer.group, rows, carry.source, config, numerics)
    return source


def _first_decoder_layer(layers: UnrolledLayers | StackedLayers, plan: Topology) -> Layer:
    if isinstance(layers, UnrolledLayers):
        return layers.layers[plan.encoder_layers]
    run = layers.segments[len(_sides(plan)[0])][0]
    return jax.tree.map(lambda leaf: leaf[0, 0], run)


def _run_unrolled(
    layers: UnrolledLayers,
    numbers: range,
    plan: Topology,
    carry: Carry,
    rows: Rows,
    config: ModelConfig,
    numerics: Numerics,
    exchange: Exchange,
) -> tuple[Carry, Taps]:
    taps: Taps = {}
    targets = carry.draft_taps.shape[0]
    for layer in numbers:
        with jax.named_scope(f"layer_{layer}"):
            place = LayerNumbers.of(plan, layer, targets)
            carry, layer_taps = run_layer(
                layers.layers[layer], plan.layers[layer].kind, place, carry, rows, config, numerics, exchange
            )
        taps |= {f"layers.{layer}.{name}": value for name, value in layer_taps.items()}
    return carry, taps


def embed(params: Model, rows: Rows, numerics: Numerics, exchange: Exchange = LOCAL) -> Float[Array, "rows hidden"]:
    """Token embeddings, replaced by image embeddings on image-type rows that bring them."""
    embeddings = expand(exchange.lookup(params.embedding, rows.tokens), numerics.dtype).astype(numerics.dtype)
    if rows.image_embeddings is None:
        return embeddings
    return jnp.where(rows.image[:, None], rows.image_embeddings.astype(numerics.dtype), embeddings)


def logits(params: Model, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocabulary"]:
    """Output head, float32."""
    return linear_float32(hidden, params.head)
