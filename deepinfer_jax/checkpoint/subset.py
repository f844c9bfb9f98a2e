"""Subsets of a model's parameters, for processes that run a part of it.

A subset is a predicate of a parameter and the configuration; parameters are told apart by their released names.
"""

from __future__ import annotations

from collections.abc import Callable

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.params import Parameter, Stored

Subset = Callable[[Parameter, ModelConfig], bool]

_VISION = ("vision.", "aligner.", "image_")
# What encoder-only prefill runs of the first decoder layer: what writes the decoder's shared entries and index keys.
_DECODER_SOURCES = ("attn_norm.", "attn.compressor.", "attn.indexer.wk.", "attn.indexer.k_norm.")


def everything(item: Parameter, config: ModelConfig) -> bool:
    """All parameters."""
    del item, config
    return True


def encoder_only(item: Parameter, config: ModelConfig) -> bool:
    """What encoder-only prefill runs: embedding, Engram, encoder layers, and the first decoder layer's key sources.

    Those are its attention norm, compressor and index keys: the whole decoder attends what they write (model
    specification, 1.3).
    """
    if item.stored is Stored.DERIVED:
        return True
    name = item.released[0][0]
    if name == "embed.weight" or ".engram." in name:
        return True
    first = config.encoder_layers
    decoder_sources = tuple(f"layers.{first}.{part}" for part in _DECODER_SOURCES)
    return name.startswith((*(f"layers.{layer}." for layer in range(first)), *decoder_sources))


def vision_only(item: Parameter, config: ModelConfig) -> bool:
    """What turns images into embeddings: vision tower, aligner and the embeddings that frame an image."""
    del config
    return bool(item.released) and item.released[0][0].startswith(_VISION)


def text_only(item: Parameter, config: ModelConfig) -> bool:
    """Everything but what :func:`vision_only` needs, the draft head included."""
    return not vision_only(item, config)
