"""The intermediates of a full pass in the form of the golden data: one sequence, no padding, one number per meaning.

:func:`deepinfer_jax.model.transformer.forward` hands out taps by row, padding included, as layers compute them. Here
they are cut to the sequence, compressed entries stand in entry order, and scores of what a row cannot choose are -inf.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.topology import LayerPlan, topology
from pallas_kernels import candidate_entries

MODEL_TAPS = ("embed_out", "engram_hash_ids", "collapsed")
ENGRAM_TAPS = ("streams_after_engram", "engram.gate")
LAYER_TAPS = (
    "hc_attn_pre",
    "hc_attn_post",
    "hc_attn_comb",
    "attn_in",
    "window_kv",
    "attn_out",
    "streams_mid",
    "router_biased_scores",
    "router_indices",
    "router_weights",
    "ffn_out",
    "streams_out",
    "next_pre_mix",
)
ENTRY_TAPS = ("compress_kv", "index_k")


def golden_taps(taps: Mapping[str, Array], config: ModelConfig, length: int) -> dict[str, np.ndarray]:
    """Bring the taps of a pass over one sequence to the golden form.

    Args:
      taps: ``Output.taps`` of a full pass whose first ``length`` rows are the sequence. Layers without taps, as all are
        in the stacked form, are left out.
      config: the model's configuration.
      length: tokens of the sequence.

    Returns:
      Arrays by golden name, without a batch axis and with one row per token, except ``compress_kv`` and ``index_k``:
      one row per entry, ``length // ratio``. ``index_score`` ``[length, entries]`` is -inf for entries that a row does
      not see; ``index_score_masked`` exists where a layer selects inside candidate blocks, and is -inf outside of them.
      ``candidates`` is 1 for every entry of a kept block. ``topk_score`` holds the scores of ``topk_compressed``, -inf
      where that is -1. bfloat16 arrays are widened to float32.
    """
    rows = {name: _host(value)[:length] for name, value in taps.items()}
    golden = {name: rows[name] for name in MODEL_TAPS if name in rows}
    candidates: np.ndarray | None = None
    for plan in topology(config).layers:
        prefix = f"layers.{plan.layer}."
        layer = {name.removeprefix(prefix): value for name, value in rows.items() if name.startswith(prefix)}
        if not layer:
            continue
        found = {name: layer[name] for name in (*ENGRAM_TAPS, *LAYER_TAPS) if name in layer}
        ratio = plan.kind.ratio
        found |= {name: layer[name][ratio - 1 :: ratio] for name in ENTRY_TAPS if name in layer}
        if plan.kind.publishes_candidates:
            candidates = _candidates(layer["candidate_blocks"], config, length // ratio)
            found["candidates"] = candidates.astype(np.uint8)
        if plan.kind.selects:
            found |= _selection(layer, plan, candidates)
        golden |= {prefix + name: value for name, value in found.items()}
    return golden


def _selection(
    layer: Mapping[str, np.ndarray], plan: LayerPlan, candidates: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Scores and picks of an index source layer; ``candidates`` are those of the candidate source before it."""
    picks, ratio = layer["topk_compressed"], plan.kind.ratio
    length = picks.shape[0]
    entries = np.arange(length // ratio)
    visible = entries[None] < ((np.arange(length) + 1) // ratio)[:, None]
    scores = np.where(visible, layer["index_score"][:, : entries.size], -np.inf)
    found = {"index_score": scores, "topk_compressed": picks}
    if plan.kind.inside_candidates:
        assert candidates is not None
        scores = np.where(candidates, scores, -np.inf)
        found["index_score_masked"] = scores
    # One column more, for picks of -1; a sequence shorter than the ratio has no entry at all.
    padded = np.pad(scores, ((0, 0), (0, 1)), constant_values=-np.inf)
    return found | {"topk_score": np.take_along_axis(padded, picks, axis=1)}


def _candidates(blocks: np.ndarray, config: ModelConfig, entries: int) -> np.ndarray:
    """Whether an entry lies in a kept candidate block of the row, ``[length, entries]``."""
    assert config.candidates is not None
    kept = candidate_entries(jnp.asarray(blocks), block_size=config.candidates.block_size, entries=entries)
    return np.asarray(kept)


def _host(value: Array) -> np.ndarray:
    return np.asarray(value.astype(jnp.float32) if value.dtype == jnp.bfloat16 else value)
