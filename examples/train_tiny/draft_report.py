"""The figures of the draft head: tokens a verification emits, acceptance by place, error of the confidences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int32

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import F32
from examples.train_tiny.acceptance import Verified, calibrate, calibration_error, verify_along, walk
from examples.train_tiny.batches import Tokens
from examples.train_tiny.continuations import continue_prompts, draw_prompts, is_loop
from examples.train_tiny.losses import TILE_ROWS


@dataclasses.dataclass(frozen=True)
class Survey:
    """How much is measured: places in held-out text, continued prompts and their tokens, tokens of context."""

    places: int = 2000
    prompts: int = 200
    new_tokens: int = 64
    context: int = 128
    group: int = 40
    seed: int = 0


def draft_report(
    params: Model,
    config: ModelConfig,
    documents: Sequence[Tokens],
    survey: Survey = Survey(),
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Everything about drafts, in the units of JSON. The confidences are calibrated on every second document.

    Args:
      params: float32 parameters with stacked experts and a draft head.
      config: the configuration.
      documents: held-out documents.
      survey: how much to measure.
      progress: told what is measured.
    """
    fitted, measured = documents[::2], documents[1::2]
    progress("calibrating")
    temperatures = calibrate(along_text(params, config, fitted, survey))
    progress("drafting along held-out text")
    text = along_text(params, config, measured, survey)
    report: dict[str, Any] = {
        "confidence_temperatures": [float(item) for item in temperatures],
        "along_text": _figures(text, temperatures),
    }
    for temperature in (0.0, 0.7):
        progress(f"continuing {survey.prompts} prompts at temperature {temperature}")
        report[f"continuations_at_{temperature}"] = _continued(
            params, config, documents, survey, temperature, temperatures
        )
    return report


def along_text(params: Model, config: ModelConfig, documents: Sequence[Tokens], survey: Survey) -> Verified:
    """Drafts behind places of the text at temperature 0: the anchor and all before it are the text's."""
    assert config.draft is not None
    drafts = config.draft.block_size
    prompts = draw_prompts(documents, survey.places, survey.context + 1, 0, survey.seed)
    place = np.asarray([survey.context - 1], np.int32)
    parts = [
        _verify(params, config, continue_prompts(params, config, F32, group, drafts, 0.0), place, 0.0)
        for group in _groups(prompts, survey.group)
    ]
    return _joined([part for group in parts for part in group])


def _continued(
    params: Model,
    config: ModelConfig,
    documents: Sequence[Tokens],
    survey: Survey,
    temperature: float,
    temperatures: Float[np.ndarray, " drafts"],
) -> dict[str, Any]:
    assert config.draft is not None
    context, drafts = survey.context, config.draft.block_size
    prompts = draw_prompts(documents, survey.prompts, context, 0, survey.seed + 1)
    places = np.arange(context - 1, context - 1 + survey.new_tokens, dtype=np.int32)
    kept, loops = [], 0
    for group in _groups(prompts, survey.group):
        written = continue_prompts(params, config, F32, group, survey.new_tokens + drafts, temperature, survey.seed)
        for tokens, one in zip(written, _verify(params, config, written, places, temperature), strict=True):
            if is_loop(tokens[context : context + survey.new_tokens].tolist()):
                loops += 1
                continue
            # At other temperatures survival is a mean over what could happen, so that every place counts.
            visited = walk(one.survival) if temperature == 0 else np.ones(len(places), bool)
            kept.append(Verified(one.survival[visited], one.confidence[visited]))
    if not kept:
        return {"prompts": len(prompts), "left_out_as_loops": loops}
    # The confidences foretell agreement at temperature 0.
    figures = _figures(_joined(kept), temperatures if temperature == 0 else None)
    return {"prompts": len(prompts), "left_out_as_loops": loops} | figures


def _verify(
    params: Model,
    config: ModelConfig,
    sequences: Int32[np.ndarray, "sequences tokens"],
    places: Int32[np.ndarray, " places"],
    temperature: float,
) -> list[Verified]:
    """One result a sequence, for the same places of each."""
    count, length = sequences.shape
    padded = np.zeros((count, -(-(length - 1) // TILE_ROWS) * TILE_ROWS + 1), np.int32)
    padded[:, :length] = sequences
    at = jnp.asarray(np.tile(places, (count, 1)))
    results = verify_along(params, jnp.asarray(padded), at, config=config, temperature=temperature)
    survival, confidence = (np.asarray(part).reshape(count, len(places), -1) for part in results)
    return [Verified(*pair) for pair in zip(survival, confidence, strict=True)]


def _figures(verified: Verified, temperatures: Float[np.ndarray, " drafts"] | None) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "verifications": len(verified.survival),
        "emitted": verified.emitted(),
        "acceptance_by_draft": verified.conditional(),
    }
    if temperatures is None:
        return figures
    return figures | {
        "calibration_error": calibration_error(verified, temperatures),
        "calibration_error_unscaled": calibration_error(verified, np.ones_like(temperatures)),
    }


def _joined(parts: Sequence[Verified]) -> Verified:
    return Verified(
        np.concatenate([part.survival for part in parts]), np.concatenate([part.confidence for part in parts])
    )


def _groups(prompts: Sequence[Tokens], size: int) -> list[Sequence[Tokens]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]
