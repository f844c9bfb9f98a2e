"""What every stage of the recipe starts from: the text in tokens, the tokenizer and the model's configuration."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from deepinfer_jax.checkpoint.digest import write_json
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.text.chat import ChatEncoder
from deepinfer_jax.text.compressed_vocabulary import compressed_token_map
from deepinfer_jax.text.tokenizer import Tokenizer
from examples.train_tiny.batches import Tokens, encode_documents
from examples.train_tiny.chat import encode_conversations
from examples.train_tiny.configuration import configuration, template
from examples.train_tiny.corpus import Corpus, read_corpus
from examples.train_tiny.vocabulary import train_tokenizer

CONFIG_FILE, TOKENIZER_FILE, TOKENS_FILE = "config.json", "tokenizer.json", "tokens.npz"


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Text and names. ``digest`` is the corpus's; ``chats`` come from the training documents."""

    config: ModelConfig
    tokenizer: Tokenizer
    token_map: Int[Array, " vocabulary"]
    digest: str
    training: tuple[Tokens, ...]
    held_out: tuple[Tokens, ...]
    chats: tuple[Tokens, ...]


def prepare(directory: Path, seed: int) -> Prepared:
    """Read the text and write ``config.json``, ``tokenizer.json`` and the tokens; what is there already is read."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / TOKENS_FILE).exists():
        _encode(directory, read_corpus(), seed)
    tokenizer = Tokenizer.from_directory(directory)
    config = ModelConfig.from_dict(json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8")))
    assert config.engram is not None
    with np.load(directory / TOKENS_FILE) as stored:
        groups = {name: _split(stored[name], stored[f"{name}_lengths"]) for name in ("training", "held_out", "chats")}
        digest = str(stored["digest"])
    token_map = jnp.asarray(compressed_token_map(tokenizer, config.vocab_size, config.engram.pad_token_id, None))
    return Prepared(config, tokenizer, token_map, digest, **groups)


def _encode(directory: Path, corpus: Corpus, seed: int) -> None:
    document = train_tokenizer((item.text for item in corpus.training), ModelConfig.from_dict(template()))
    write_json(directory / TOKENIZER_FILE, document)
    tokenizer = Tokenizer.from_directory(directory)
    raw = configuration(tokenizer)
    write_json(directory / CONFIG_FILE, raw)
    config = ModelConfig.from_dict(raw)
    groups = {
        "training": encode_documents(corpus.training, tokenizer, config),
        "held_out": encode_documents(corpus.held_out, tokenizer, config),
        "chats": encode_conversations(corpus.training, chat_encoder(tokenizer, config), seed),
    }
    tokens = {name: np.concatenate(documents) for name, documents in groups.items()}
    lengths = {f"{name}_lengths": np.asarray([len(item) for item in items]) for name, items in groups.items()}
    partial = directory / f"partial-{TOKENS_FILE}"
    np.savez_compressed(partial, digest=np.asarray(corpus.digest), **tokens, **lengths)
    os.replace(partial, directory / TOKENS_FILE)


def _split(tokens: Tokens, lengths: Int[np.ndarray, " documents"]) -> tuple[Tokens, ...]:
    return tuple(np.split(tokens, np.cumsum(lengths)[:-1]))


def chat_encoder(tokenizer: Tokenizer, config: ModelConfig) -> ChatEncoder:
    """The project's chat encoder for this tokenizer."""
    return ChatEncoder.from_tokenizer(
        tokenizer, vocab_size=config.vocab_size, bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id
    )
