"""Selections: what a row chose, by which scores, how clear the choice was, and whether another choice is a near tie."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from jaxtyping import Float, Int

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.topology import LayerPlan

Arrays = dict[str, np.ndarray]
SCORES_OF: Mapping[str, str] = MappingProxyType(
    {
        "topk_compressed": "index_score",
        "candidate_blocks": "candidate_score",
        "router_indices": "router_biased_scores",
    }
)
"""The array of a layer that holds the scores of each of its picks."""


def layer_selections(taps: Arrays, plan: LayerPlan, config: ModelConfig) -> Arrays:
    """Picks and scores of one layer, by kit name.

    Args:
      taps: of a pass over one prompt, without padding rows.
      plan: the layer.
      config: the model's configuration.

    Returns:
      ``router_biased_scores`` ``[rows experts]``, ``router_indices``. Where the layer selects entries, ``index_score``
      ``[rows entries]``, -inf for what the row may not choose, and ``topk_compressed``. Where it publishes candidates,
      ``candidate_score`` ``[rows blocks]``, inf for the newest block, and ``candidate_blocks``.
    """
    prefix = f"layers.{plan.layer}."
    found = {name: taps[prefix + name] for name in ("router_biased_scores", "router_indices")}
    if not plan.kind.selects:
        return found
    picks = taps[prefix + "topk_compressed"]
    length, ratio, level = picks.shape[0], plan.kind.ratio, config.candidates
    visible = (np.arange(length) + 1) // ratio
    entries = np.arange(length // ratio)
    scores = np.where(entries[None] < visible[:, None], taps[prefix + "index_score"][:, : entries.size], -np.inf)
    if plan.kind.publishes_candidates:
        assert level is not None
        found["candidate_score"] = _block_scores(scores, visible, level.block_size)
        found["candidate_blocks"] = taps[prefix + "candidate_blocks"]
    if plan.kind.inside_candidates:
        assert level is not None
        blocks = taps[f"layers.{level.source_layer_id}.candidate_blocks"]
        inside = (blocks[:, :, None] == entries[None, None] // level.block_size).any(axis=1)
        scores = np.where(inside, scores, -np.inf)
    return found | {"index_score": scores, "topk_compressed": picks}


def _block_scores(
    scores: Float[np.ndarray, "rows entries"], visible: Int[np.ndarray, " rows"], block_size: int
) -> Float[np.ndarray, "rows blocks"]:
    """The best score of each block; the newest block of a row counts as the best."""
    padded = np.pad(scores, ((0, 0), (0, -scores.shape[1] % block_size)), constant_values=-np.inf)
    best = padded.reshape(len(padded), -1, block_size).max(axis=-1)
    newest = (visible - 1) // block_size
    best[newest[:, None] == np.arange(best.shape[1])] = np.inf
    return best


def selection_gaps(arrays: Arrays) -> Float[np.ndarray, " rows"]:
    """How clear each row's least clear selection is, over all layers.

    The lead of the last chosen score over the first left out, in standard deviations of the row's scores; infinite
    where nothing is left out. Index scores are sums of rectified products: two that are exactly 0 are so in every
    implementation, and the lower index wins, so that they count as clear.
    """
    gaps = np.full(len(arrays["logits"]), np.inf)
    for name, picks in arrays.items():
        prefix, _, kind = name.rpartition(".")
        if kind in SCORES_OF:
            gaps = np.minimum(gaps, _gaps(arrays[f"{prefix}.{SCORES_OF[kind]}"], picks.shape[1]))
    return gaps


def _gaps(scores: Float[np.ndarray, "rows items"], chosen: int) -> Float[np.ndarray, " rows"]:
    if scores.shape[1] <= chosen:
        return np.full(len(scores), np.inf)
    ordered = -np.sort(-scores.astype(np.float64), axis=1)
    last, first = ordered[:, chosen - 1], ordered[:, chosen]
    clear = (first == -np.inf) | ((last == 0) & (first == 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(clear, np.inf, (last - first) / spreads(scores))


def spreads(scores: Float[np.ndarray, "rows items"]) -> Float[np.ndarray, " rows"]:
    """Standard deviation of each row's finite scores; 0 where there are none."""
    finite = np.isfinite(scores)
    values = np.where(finite, scores, 0).astype(np.float64)
    count = np.maximum(finite.sum(axis=1), 1)
    mean = values.sum(axis=1) / count
    return np.sqrt((np.where(finite, values - mean[:, None], 0) ** 2).sum(axis=1) / count)


def pick_offsets(
    got: Int[np.ndarray, "rows chosen"],
    want: Int[np.ndarray, "rows chosen"],
    scores: Float[np.ndarray, "rows items"],
) -> Float[np.ndarray, " rows"]:
    """How far the picks that differ lie from the last chosen score, in standard deviations of the row's scores.

    0 where a row's picks are the same in any order; infinite where they are not as many different items of the row.
    """
    offsets = np.zeros(len(want))
    for row, spread in enumerate(spreads(scores)):
        ours, theirs = ([pick for pick in picks[row].tolist() if pick != -1] for picks in (want, got))
        if set(ours) == set(theirs) and len(ours) == len(theirs):
            continue
        offsets[row] = np.inf
        if len(theirs) == len(set(theirs)) == len(ours) and all(0 <= pick < scores.shape[1] for pick in theirs):
            last = scores[row, ours].min()
            differing = scores[row, sorted(set(ours) ^ set(theirs))]
            distance = np.abs(differing - last).max() if np.isfinite(differing).all() else np.inf
            offsets[row] = distance / spread if spread > 0 else np.where(distance > 0, np.inf, 0)
    return offsets
