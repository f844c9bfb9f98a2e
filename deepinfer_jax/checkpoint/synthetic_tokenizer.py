"""A made-up tokenizer of any vocabulary size: byte-level BPE with the control tokens of the V4.1 formats.

Ids that the configuration names hold their control tokens; the others follow at the top of the vocabulary, the 256
bytes and then merges fill the rest from below. Merges spell words of small letters, and the same words behind a space,
which fall into the same class of the compressed vocabulary: so the number of classes can be chosen within limits.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator
from typing import Any

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.text.chat import RELEASED_CONTROL_TOKENS, RELEASED_VOCAB_SIZE
from deepinfer_jax.text.compressed_vocabulary import class_key
from deepinfer_jax.text.tokenizer import BYTES_BY_SPELLING

BOS, EOS, PAD, IMAGE = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜image｜>"

_SPELLINGS = {byte: spelling for spelling, byte in BYTES_BY_SPELLING.items()}
_SPACE = _SPELLINGS[0x20]
# Bytes in the order in which a small vocabulary takes them: printable ASCII first.
_BYTES = (*range(0x20, 0x7F), *range(0x20), *range(0x7F, 0x100))


def tokenizer_document(config: ModelConfig) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` with exactly ``config.vocab_size`` tokens.

    Control tokens of the chat format are left out where they do not fit beside the bytes, and bytes where the
    vocabulary is smaller still. The number of compressed classes is that of the configuration if it can be reached.
    """
    control = _control_tokens(config)
    free = [token_id for token_id in range(config.vocab_size) if token_id not in control]
    spelled_bytes = [_SPELLINGS[byte] for byte in _BYTES][: len(free)]
    keys = {class_key(spelling, spelling) for spelling in control.values()}
    keys |= {class_key(bytes([byte]).decode(errors="replace"), _SPELLINGS[byte]) for byte in _BYTES[: len(free)]}
    classes = config.engram.compressed_vocab_size if config.engram else 0
    pairs = _pairs(len(free) - len(spelled_bytes), classes - len(keys))
    vocabulary = dict(zip([*spelled_bytes, *map("".join, pairs)], free, strict=True))
    vocabulary |= {spelling: token_id for token_id, spelling in control.items()}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(token_id, spelling) for token_id, spelling in sorted(control.items())],
        "normalizer": None,
        "pre_tokenizer": _byte_level(use_regex=True),
        "post_processor": None,
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": dict(sorted(vocabulary.items(), key=lambda item: item[1])),
            "merges": [" ".join(pair) for pair in pairs],
        },
    }


def tokenizer_configuration(config: ModelConfig) -> dict[str, Any]:
    """The content of a ``tokenizer_config.json``, which other loaders ask for."""
    control = _control_tokens(config)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": control[config.bos_token_id],
        "eos_token": control[config.eos_token_id],
        "pad_token": control[config.pad_token_id],
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }


def _control_tokens(config: ModelConfig) -> dict[int, str]:
    """Control tokens by id. Where two roles share an id, the one that ends or begins a sequence names it."""
    named = {config.image_token_id: IMAGE, config.pad_token_id: PAD, config.eos_token_id: EOS, config.bos_token_id: BOS}
    control = {token_id: spelling for token_id, spelling in named.items() if token_id is not None}
    others = [spelling for spelling in RELEASED_CONTROL_TOKENS if spelling not in control.values()]
    if config.vocab_size == RELEASED_VOCAB_SIZE:
        return {RELEASED_CONTROL_TOKENS[spelling]: spelling for spelling in others} | control
    if config.vocab_size < len(control) + len(others) + len(_BYTES):
        return control
    above = (token_id for token_id in reversed(range(config.vocab_size)) if token_id not in control)
    return control | dict(zip(above, others, strict=False))


def _pairs(count: int, new_classes: int) -> list[tuple[str, str]]:
    """``count`` merges, of which ``new_classes`` make a class of their own, if there can be so few or so many."""
    known = count - new_classes
    if not 0 <= known <= min(count, new_classes + len(string.ascii_lowercase)):
        known = count // 4
    words, spaced = _words(), _spaced_words()
    new = [next(words) for _ in range(count - known)]
    return new + [next(spaced) for _ in range(known)]


def _words() -> Iterator[tuple[str, str]]:
    """Words of two, three, ... letters, each cut behind the last but one, so that what is in front exists already."""
    for length in itertools.count(2):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield "".join(letters[:-1]), letters[-1]


def _spaced_words() -> Iterator[tuple[str, str]]:
    """A space in front of every letter, then of every word."""
    yield from ((_SPACE, letter) for letter in string.ascii_lowercase)
    yield from ((_SPACE, "".join(word)) for word in _words())


def _added_token(token_id: int, spelling: str) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": spelling, **plain, "special": spelling in (BOS, EOS, PAD)}


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
