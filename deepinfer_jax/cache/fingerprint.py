"""The fingerprint of a state: two engines with the same one can exchange what their caches hold.

It covers all that the content of a page or ring depends on, beside the tokens themselves: weights, model configuration,
numerics, how the caches are stored, and how tokens are cut into blocks. Mesh, ring lengths, pool sizes, slots and the
layout of processes are not in it; sender and receiver may differ in them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import Numerics

SCHEMA_VERSION = 1
"""Version of the sections of a snapshot, and of what a model's state means; part of every fingerprint."""

CACHES = ("main", "index", "window")


def state_fingerprint(weights_id: str, config: ModelConfig, numerics: Numerics, block_tokens: int) -> bytes:
    """32 bytes that are equal for exchangeable states.

    Args:
      weights_id: identity of the weights, see :class:`deepinfer_jax.checkpoint.digest.WeightsId`.
      config: the model; every field counts.
      numerics: every field counts but the name.
      block_tokens: tokens of a block.
    """
    content = json.dumps(
        _document(weights_id, config, numerics, block_tokens),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
        allow_nan=False,
    )
    return hashlib.blake2b(content.encode("ascii"), digest_size=32).digest()


def cache_format(name: str, numerics: Numerics) -> str | None:
    """The released format in which ``main``, ``index`` or ``window`` is kept; None for plain floating point."""
    kept = {
        "main": ("fp4_16", numerics.main_entries_fp4),
        "index": ("fp4_32", numerics.index_keys_fp4),
        "window": ("fp8_32", numerics.window_keys_fp8),
    }
    form, packed = kept[name]
    return form if packed else None


def _document(weights_id: str, config: ModelConfig, numerics: Numerics, block_tokens: int) -> dict[str, Any]:
    switches = dataclasses.asdict(numerics)
    del switches["name"]
    return {
        "schema": SCHEMA_VERSION,
        "weights": weights_id,
        "config": dataclasses.asdict(config),
        "numerics": switches,
        "storage": {name: cache_format(name, numerics) or numerics.dtype.name for name in CACHES},
        "block_tokens": block_tokens,
    }
