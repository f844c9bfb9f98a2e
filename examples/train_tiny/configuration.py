"""The small model's ``config.json``: every structural feature of V4.1 in a few million parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.engram import table_sizes
from deepinfer_jax.text.compressed_vocabulary import compressed_token_map
from deepinfer_jax.text.tokenizer import Tokenizer

TEMPLATE = Path(__file__).with_name("configuration.json")


def template() -> dict[str, Any]:
    """The configuration before there is a tokenizer: placeholders stand for the numbers that depend on it."""
    raw: dict[str, Any] = json.loads(TEMPLATE.read_text(encoding="utf-8"))
    memories = len(raw["text_config"]["engram_layer_ids"])
    raw["text_config"] |= {"engram_num_embeddings": [1] * memories, "engram_compressed_vocab_size": 1}
    engram = ModelConfig.from_dict(raw).engram
    assert engram is not None
    raw["text_config"]["engram_num_embeddings"] = list(table_sizes(engram))
    return raw


def configuration(tokenizer: Tokenizer) -> dict[str, Any]:
    """The configuration of the model that a tokenizer belongs to."""
    raw = template()
    text = raw["text_config"]
    classes = compressed_token_map(tokenizer, text["vocab_size"], text["engram_pad_token_id"], None)
    text["engram_compressed_vocab_size"] = int(classes.max()) + 1
    return raw
