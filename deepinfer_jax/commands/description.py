"""What a configuration, and a checkpoint of it, consist of: plain values that are ready for JSON.

Everything follows from the configuration and from file headers; no weight is read and no device is used.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import State, initial_state
from deepinfer_jax.checkpoint.reader import Coverage, Entries
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.params import count, parameters
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import BF16, F32, Numerics
from deepinfer_jax.topology import LayerPlan, Segment, topology

Document = dict[str, Any]


def describe_model(config: ModelConfig, described: Model) -> Document:
    """Describe a configuration.

    Args:
      config: the configuration.
      described: its parameters, ``Model.describe(config)``.

    Returns:
      ``config``: every field. ``parameters``: numbers of parameters; ``engram`` counts the memory tables alone, their
      projections belong to the backbone. ``tensors``: tensors of its checkpoint, scales included. ``schedule``: one
      object per backbone layer. ``segments``: runs of layers that compile as one body. ``state``: bytes that a running
      request takes, by numerics.
    """
    plan = topology(config)
    return {
        "config": dataclasses.asdict(config),
        "parameters": parameter_counts(described),
        "tensors": tensor_count(config, described),
        "schedule": [_layer(item) for item in plan.layers],
        "segments": [_segment(item) for item in plan.segments],
        "state": {numerics.name: state_bytes(config, numerics) for numerics in (F32, BF16)},
    }


def describe_files(coverage: Coverage, files: Entries) -> Document:
    """Describe a checkpoint: its ``coverage`` of the configuration, and tensors and bytes by stored ``dtypes``."""
    dtypes: dict[str, Document] = {}
    for entry in files.entries.values():
        total = dtypes.setdefault(entry.dtype, {"tensors": 0, "bytes": 0})
        total["tensors"] += 1
        total["bytes"] += entry.size
    return {
        "coverage": {"complete": coverage.complete, **dataclasses.asdict(coverage)},
        "dtypes": dict(sorted(dtypes.items())),
    }


def parameter_counts(described: Model) -> dict[str, int]:
    """Numbers of parameters of the parts of a model, and their ``total``; a part it lacks counts 0."""
    engram = sum(count(memory.table) for memory in described.engrams)
    draft, vision = count(described.draft), count(described.vision)
    total = count(described)
    return {
        "backbone": total - engram - draft - vision,
        "engram": engram,
        "draft": draft,
        "vision": vision,
        "total": total,
    }


def tensor_count(config: ModelConfig, described: Model) -> int:
    """Tensors of a checkpoint of the configuration; scales exist where the configuration says it is quantised."""
    weights = [(name, item) for item in parameters(described) for pieces in item.released for name in pieces]
    return len(weights) + sum(item.has_scale for _, item in weights if config.quantised)


def state_bytes(config: ModelConfig, numerics: Numerics) -> dict[str, int]:
    """Bytes of device memory per cached token, and per request whatever its length."""
    layout = PageLayout.of(config)

    def one_block() -> State:
        return initial_state(config, numerics, slots=1, blocks=1, layout=layout)

    state = jax.eval_shape(one_block)
    pages = _bytes(state.main) + _bytes(state.index)
    rings = _bytes(state.window) + _bytes(state.pending) + _bytes(state.history)
    return {"bytes_per_token": pages // layout.block_tokens, "bytes_per_slot": rings}


def _bytes(cache: Any) -> int:
    return sum(plane.size * plane.dtype.itemsize for plane in jax.tree.leaves(cache))


def _layer(plan: LayerPlan) -> Document:
    return {
        "layer": plan.layer,
        "side": plan.side,
        "ratio": plan.kind.ratio,
        "mode": plan.kind.mode.value,
        "kv_source": plan.kv_source,
        "index_source": plan.index_source,
        "publishes_candidates": plan.kind.publishes_candidates,
        "inside_candidates": plan.kind.inside_candidates,
        "engram": plan.engram,
        "draft_tap": plan.draft_tap,
    }


def _segment(segment: Segment) -> Document:
    return {
        "first_layer": segment.layers.start,
        "last_layer": segment.layers.stop - 1,
        "repeats": segment.repeats,
        "runs": [{"mode": kind.mode.value, "ratio": kind.ratio, "layers": layers} for kind, layers in segment.runs],
        "engram": segment.engram,
    }
