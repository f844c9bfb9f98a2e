"""Work that a configuration needs at least: arithmetic of a prompt token, and memory traffic of a decode step.

Divided by measured times, and by the rates of :mod:`deepinfer_jax.bench.machine`, they say which part of the machine a
model reaches. Both count what the mathematics asks for, not what a program happens to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.params import abstract, parameters
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.topology import LayerKind, topology


def prefill_flops_per_token(config: ModelConfig, prompt: int) -> float:
    """Floating-point operations of matrix products per token of a prompt of ``prompt`` tokens from position 0.

    2 x (M + k / E x R + H / prompt), a multiplication and an addition counting as two, with M the elements of all
    matrices of layers and Engram that every token passes, R those of the routed experts of which it passes k of E, and
    H those of the output head, which only the last token passes; and for attention, averaged over positions, per layer
    4 x heads x head_dim x (window keys + selected entries), and per index source layer 2 x index heads x index_dim x
    scored entries. Elementwise work, norms and the mixing of streams are not counted.
    """
    described = Model.describe(config)
    routed = _elements(_experts(described))
    dense = _elements([described.layers, [memory.key_value for memory in described.engrams]]) - routed
    share = config.num_experts_per_tok / config.n_routed_experts
    matrices = dense + share * routed + _elements(described.head) / prompt
    positions = np.arange(prompt)
    attended = sum(float(_attended(config, plan.kind, positions).mean()) for plan in topology(config).layers)
    scored = sum(float(_scored(config, plan.kind, positions).mean()) for plan in topology(config).layers)
    attention = 2 * config.num_attention_heads * config.head_dim * attended
    return 2 * (matrices + attention + config.index_n_heads * config.index_head_dim * scored)


def decode_bytes_per_step(config: ModelConfig, numerics: Numerics, batch: int, position: int) -> float:
    """Bytes that one decode step of ``batch`` rows at ``position`` reads.

    Every weight of layers, Engram projections, final norm and output head once, as the numerics store it; of the routed
    experts the share that at least one row is expected to choose, 1 - (1 - k / E)^batch with even routing. Per row and
    layer the window keys and the selected entries, per index source layer the scored index keys, in the compute dtype.
    Table rows (embedding, Engram) and activations are not counted.
    """
    held = abstract(Model.describe(config), numerics)
    routed = _bytes(_experts(held))
    dense = _bytes([held.layers, [memory.key_value for memory in held.engrams], held.norm, held.head]) - routed
    chosen = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** batch
    plans = topology(config).layers
    entries = sum(int(_attended(config, plan.kind, position)) for plan in plans) * config.head_dim
    entries += sum(int(_scored(config, plan.kind, position)) for plan in plans) * config.index_head_dim
    return dense + chosen * routed + batch * entries * numerics.dtype.itemsize


def _attended(config: ModelConfig, kind: LayerKind, position: Any) -> Any:
    """Keys that a query attends: its window, and the entries it can select."""
    window = np.minimum(position + 1, config.sliding_window)
    return window + np.minimum(_visible(kind, position), config.index_topk)


def _scored(config: ModelConfig, kind: LayerKind, position: Any) -> Any:
    """Entries that an index query is compared with: all visible ones, or those in candidate blocks."""
    if not kind.selects:
        return np.zeros_like(position)
    visible = _visible(kind, position)
    level = config.candidates
    if level is None or not kind.inside_candidates:
        return visible
    return np.minimum(visible, level.topk_blocks * level.block_size)


def _visible(kind: LayerKind, position: Any) -> Any:
    return (position + 1) // kind.ratio if kind.ratio else np.zeros_like(position)


def _experts(model: Model) -> list[Any]:
    layers = model.layers.layers  # type: ignore[union-attr]
    return [[layer.feed_forward.gate_up, layer.feed_forward.down] for layer in layers]


def _elements(described: Any) -> int:
    """Elements of all matrices in a described tree; vectors are no operands of matrix products."""
    return sum(item.size for item in parameters(described) if len(item.shape) > 1)


def _bytes(tree: Any) -> int:
    leaves: Iterable[jax.ShapeDtypeStruct] = jax.tree.leaves(tree)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
