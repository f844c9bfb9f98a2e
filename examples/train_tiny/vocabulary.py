"""The model's tokenizer: byte-level BPE of the training text, with the control tokens of the V4.1 formats."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deepinfer_jax.checkpoint.synthetic_tokenizer import tokenizer_document
from deepinfer_jax.config import ModelConfig


def train_tokenizer(texts: Iterable[str], config: ModelConfig) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` of exactly ``config.vocab_size`` tokens.

    Control tokens lie where a synthetic tokenizer of this configuration has them; the 256 bytes and the learned merges
    fill the other ids from below, in the order in which they were learned.
    """
    document = tokenizer_document(config)
    control = {token["id"]: token["content"] for token in document["added_tokens"]}
    free = [token_id for token_id in range(config.vocab_size) if token_id not in control]
    learned = _learn(texts, len(free))
    vocabulary = dict(zip(sorted(learned["vocab"], key=learned["vocab"].__getitem__), free, strict=True))
    vocabulary |= {spelling: token_id for token_id, spelling in control.items()}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in learned["merges"]]
    document["model"]["vocab"] = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    document["model"]["merges"] = merges
    return document


def _learn(texts: Iterable[str], size: int) -> dict[str, Any]:
    """Vocabulary and merges of ``size`` tokens, the bytes first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(texts, trainer)
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    if len(model["vocab"]) != size:
        raise ValueError(f"the text gives {len(model['vocab'])} tokens, not the {size} that the configuration needs")
    return model
