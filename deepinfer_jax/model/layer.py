"""One backbone layer, and the two physical forms of all of them.

*Unrolled*: a tuple of layers, for CPU (no copies of statically indexed weights) and for small models. *Stacked*: the
layers of each run of a segment stacked along ``[repeats count]`` axes, for scans that keep large compiles small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.attention import Attention, attend
from deepinfer_jax.model.exchange import LOCAL, Exchange
from deepinfer_jax.model.hyper_connections import SubLayer, Taps, run_sub_layer
from deepinfer_jax.model.indexer import Selected
from deepinfer_jax.model.moe import MixtureOfExperts, mixture_of_experts
from deepinfer_jax.model.params import Leaf
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.source import KeySource, Number
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.topology import LayerKind, Segment, Topology


@struct.dataclass
class Layer:
    """Parameters of one layer, of the backbone or of a draft stage."""

    attention_mix: SubLayer
    attention: Attention
    feed_forward_mix: SubLayer
    feed_forward: MixtureOfExperts

    @classmethod
    def describe(cls, config: ModelConfig, prefix: str, kind: LayerKind, experts: int) -> Layer:
        """``prefix`` is ``layers.N`` or ``mtp.N``."""
        return cls(
            attention_mix=SubLayer.describe(config, prefix, "attn"),
            attention=Attention.describe(config, f"{prefix}.attn", kind),
            feed_forward_mix=SubLayer.describe(config, prefix, "ffn"),
            feed_forward=MixtureOfExperts.describe(config, f"{prefix}.ffn", experts),
        )


@struct.dataclass
class UnrolledLayers:
    """All backbone layers in order."""

    layers: tuple[Layer, ...]


@struct.dataclass
class StackedLayers:
    """All backbone layers as ``segments[segment][run]``, every array with leading ``[repeats count]`` axes."""

    segments: tuple[tuple[Layer, ...], ...]


@struct.dataclass
class Carry:
    """What one layer hands to the next."""

    streams: Float[Array, "rows streams hidden"]
    pre: Float[Array, "rows streams"]
    selected: Selected
    source: KeySource
    draft_taps: Float[Array, "targets rows hidden"]  # stream means entering the draft head's target layers


@struct.dataclass
class LayerNumbers:
    """Where a layer stands: its number, its page group, and its place among the draft taps.

    Python ints in unrolled execution, traced scalars inside a scan, arrays over the layers of a run around it. A layer
    without page group has group 0, a layer that is no draft target has the out-of-range tap number ``targets``.
    """

    layer: Leaf
    group: Leaf
    draft_tap: Leaf

    @classmethod
    def of(cls, topology: Topology, layer: int, targets: int) -> LayerNumbers:
        """The numbers of one layer of a schedule."""
        plan = topology.layers[layer]
        return cls(layer, plan.group or 0, targets if plan.draft_tap is None else plan.draft_tap)


def run_layer(
    params: Layer,
    kind: LayerKind,
    numbers: LayerNumbers,
    carry: Carry,
    rows: Rows,
    config: ModelConfig,
    numerics: Numerics,
    exchange: Exchange = LOCAL,
) -> tuple[Carry, Taps]:
    """Run one layer: attention, then experts, each inside its hyper-connection.

    ``exchange`` reaches the routed experts. Returns the next carry and named intermediates (those
    of golden README section 2); compiled code drops the ones nobody reads.
    """
    draft_taps = _tap(carry, numbers)

    def attention(inputs: Array) -> tuple[Array, tuple[Selected, KeySource, Taps]]:
        output, selected, source, taps = attend(
            params.attention,
            kind,
            numbers.layer,
            numbers.group,
            inputs,
            carry.selected,
            rows,
            carry.source,
            config,
            numerics,
        )
        return output, (selected, source, taps)

    def feed_forward(inputs: Array) -> tuple[Array, Taps]:
        return mixture_of_experts(
            params.feed_forward, inputs, rows.image, rows.valid, config.num_experts_per_tok, config, exchange
        )

    streams, pre, (selected, source, attention_taps), outer = run_sub_layer(
        params.attention_mix, carry.streams, carry.pre, attention, config
    )
    taps = {f"hc_attn_{name}": outer[name] for name in ("pre", "post", "comb")}
    taps |= {"attn_in": outer["in"], "attn_out": outer["out"], "streams_mid": streams, **attention_taps}
    if kind.selects:
        taps["topk_compressed"] = selected.entries
    if kind.publishes_candidates:
        taps["candidate_blocks"] = selected.candidates
    streams, pre, router_taps, outer = run_sub_layer(params.feed_forward_mix, streams, pre, feed_forward, config)
    taps |= {"ffn_in": outer["in"], "ffn_out": outer["out"], "streams_out": streams, "next_pre_mix": pre, **router_taps}
    return Carry(streams, pre, selected, source, draft_taps), taps


def _tap(carry: Carry, numbers: LayerNumbers) -> Float[Array, "targets rows hidden"]:
    """Keep the mean over the streams entering a draft target layer; other layers write out of range, which drops it."""
    if isinstance(numbers.draft_tap, int) and numbers.draft_tap >= carry.draft_taps.shape[0]:
        return carry.draft_taps
    mean = carry.streams.astype(jnp.float32).mean(axis=1).astype(carry.draft_taps.dtype)
    return carry.draft_taps.at[numbers.draft_tap].set(mean, mode="drop")


def run_segment(
    runs: tuple[Layer, ...],
    segment: Segment,
    topology: Topology,
    carry: Carry,
    rows: Rows,
    config: ModelConfig,
    numerics: Numerics,
    exchange: Exchange = LOCAL,
) -> Carry:
    """Run a segment over stacked parameters: a loop over its repeats of a loop over each run.

    The loops count, and take a layer's weights from the whole stack: weights that a loop hands to a loop inside it
    would be copied.
    """
    targets = carry.draft_taps.shape[0]

    def one_layer(run: int, index: Number, carry: Carry) -> Carry:
        numbers = [LayerNumbers.of(topology, layer, targets) for row in segment.run_layers(run) for layer in row]
        if isinstance(index, int):
            place = numbers[index]
        else:
            place = jax.tree.map(lambda *leaves: jnp.asarray(leaves, jnp.int32)[index], *numbers)
        params, kind = _layer_of(runs[run], index), segment.runs[run][0]
        return run_layer(params, kind, place, carry, rows, config, numerics, exchange)[0]

    def one_repeat(repeat: Number, carry: Carry) -> Carry:
        for run, (_, count) in enumerate(segment.runs):

            def one_place(place: Number, carry: Carry, run: int = run, count: int = count) -> Carry:
                return one_layer(run, repeat * count + place, carry)

            carry = _counted(count, one_place, carry)
        return carry

    return _counted(segment.repeats, one_repeat, carry)


def _counted(count: int, body: Callable[[Number, Carry], Carry], carry: Carry) -> Carry:
    """``body(index, carry)`` for each index; a loop of one is none, so that its index is a Python int."""
    if count == 1:
        return body(0, carry)

    def step(carry: Carry, index: Number) -> tuple[Carry, None]:
        return body(index, carry), None

    return jax.lax.scan(step, carry, jnp.arange(count, dtype=jnp.int32))[0]


def _layer_of(run: Layer, index: Number) -> Layer:
    """Layer ``index`` of a stacked run, counted through its repeats; its routed experts stay in the stack."""
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), run)
    if isinstance(index, int):
        return jax.tree.map(lambda leaf: leaf[index], flat)
    layer = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), flat)
    experts = flat.feed_forward
    kept = dataclasses.replace(layer.feed_forward, gate_up=experts.gate_up, down=experts.down, layer=index)
    return dataclasses.replace(layer, feed_forward=kept)


def stack_layers(layers: UnrolledLayers, topology: Topology) -> StackedLayers:
    """The stacked form of unrolled layers; exact."""

    def stacked(segment: Segment, run: int) -> Layer:
        repeats = [
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *[layers.layers[layer] for layer in row])
            for row in segment.run_layers(run)
        ]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *repeats)

    return StackedLayers(
        tuple(tuple(stacked(segment, run) for run in range(len(segment.runs))) for segment in topology.segments)
    )


def unroll_layers(layers: StackedLayers, topology: Topology) -> UnrolledLayers:
    """The unrolled form of stacked layers; exact."""
    unrolled: dict[int, Layer] = {}
    for segment, runs in zip(topology.segments, layers.segments, strict=True):
        for run, params in enumerate(runs):
            for repeat, row in enumerate(segment.run_layers(run)):
                for place, layer in enumerate(row):
                    unrolled[layer] = jax.tree.map(lambda leaf, at=(repeat, place): leaf[at], params)
    return UnrolledLayers(tuple(unrolled[layer] for layer in sorted(unrolled)))
