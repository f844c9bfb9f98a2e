"""A small model whose state is large: what takes time when it is handed over is bytes, as with large models."""

from __future__ import annotations

import copy
import json
from importlib import resources
from pathlib import Path
from typing import Any

from deepinfer_jax.checkpoint.synthetic import synthesize
from deepinfer_jax.config import ModelConfig
from serving.configuration import ModelSection

NAME = "a small random model with the released model's cache widths"
_PRESET, _RELEASED = "peer-50m", "v4.1-flash"
_SMALL = {"vocab_size": 2048, "hidden_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 8}


def write_wide_model(directory: Path) -> ModelSection:
    """Write one with random weights to an empty directory. Its float32 state of 4,000 tokens has about 15 MB."""
    text = resources.files("deepinfer_jax").joinpath("presets", f"{_PRESET}.json").read_text(encoding="utf-8")
    synthesize(_widened(json.loads(text)), directory, quantised=False)
    return ModelSection(str(directory), NAME)


def _widened(document: dict[str, Any]) -> dict[str, Any]:
    released = ModelConfig.preset(_RELEASED)
    widened = copy.deepcopy(document)
    widened["text_config"] |= _SMALL | {"head_dim": released.head_dim, "index_head_dim": released.index_head_dim}
    return widened
