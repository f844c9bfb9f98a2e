"""The compressed vocabulary of the Engram memory: tokens that read alike share one id before n-grams are hashed.

``" The"``, ``"the"`` and ``"THE"`` fall into one class. The table sizes and multipliers of the released hash were drawn
for one exact number of classes, so a map that differs in a single token rehashes the whole memory without any error;
the number of classes is therefore compared with the configuration.
"""

from __future__ import annotations

import re
import unicodedata

import numpy as np
from jaxtyping import Int32

from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.text.tokenizer import Tokenizer

REPLACEMENT_CHARACTER = "\ufffd"
# A private-use character that carries a lone space through the stripping of surrounding white space.
_LONE_SPACE = "\ue000"
_SPACE_RUN = re.compile("[ \t\r\n]+")
# The Unicode property White_Space. `str.strip()` would also take U+001C to U+001F.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"


def compressed_token_map(
    tokenizer: Tokenizer, vocab_size: int, pad_token_id: int, compressed_vocab_size: int | None = None
) -> Int32[np.ndarray, "vocab_size"]:
    """Compressed id of every token id (model specification 10.1; Engram of DeepSeek-V4.1).

    Classes are numbered by first appearance in the order of token ids. Ids of the model without a token (padding rows
    of the embedding) take the class of the pad token: they read as "nothing there", like positions before the prompt.
    Public implementations leave such ids undefined, and no text yields them.

    Args:
        tokenizer: the tokenizer of the checkpoint.
        vocab_size: embedding rows of the model; length of the result.
        pad_token_id: ``engram_pad_token_id``, the token that stands for a missing look-back position.
        compressed_vocab_size: ``engram_compressed_vocab_size``, the number of classes the weights were trained with
            (99092 in the release); None accepts any number, for a model that takes the number from its tokenizer.

    Raises:
        CheckpointError: the tokenizer has ids at or above ``vocab_size``, has no pad token, or yields another number
            of classes.
    """
    if tokenizer.vocabulary_size > vocab_size:
        raise CheckpointError(
            str(tokenizer.path),
            f"{tokenizer.vocabulary_size} token ids",
            f"at most the model's vocab_size {vocab_size}",
        )
    if not 0 <= pad_token_id < tokenizer.vocabulary_size:
        raise CheckpointError("engram_pad_token_id", pad_token_id, f"the id of a token in {tokenizer.path}")
    classes: dict[str, int] = {}
    token_map = np.empty(vocab_size, np.int32)
    for token_id in range(tokenizer.vocabulary_size):
        key = class_key(tokenizer.content_of(token_id), tokenizer.spelling_of(token_id))
        token_map[token_id] = classes.setdefault(key, len(classes))
    token_map[tokenizer.vocabulary_size :] = token_map[pad_token_id]
    if compressed_vocab_size is not None and len(classes) != compressed_vocab_size:
        raise CheckpointError(
            str(tokenizer.path),
            f"a tokenizer of {len(classes)} compressed classes",
            f"the configuration's engram_compressed_vocab_size {compressed_vocab_size}",
            "use the tokenizer.json that was released with these weights",
        )
    return token_map


def class_key(content: str, spelling: str) -> str:
    """What tokens of one class have in common.

    Args:
        content: text of the token alone, U+FFFD where its bytes are not UTF-8.
        spelling: the vocabulary's own spelling, which tells pieces of a UTF-8 character apart.
    """
    if REPLACEMENT_CHARACTER in content:
        return spelling
    return normalised(content) or content


def normalised(content: str) -> str:
    """Text without case, accents, compatibility forms and surrounding white space; empty for white space except " "."""
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", content))
    # Lower case of each character alone: `str.lower` of a whole word would give a final sigma its own form.
    letters = "".join(one.lower() for one in decomposed if not unicodedata.category(one).startswith("M"))
    spaced = _SPACE_RUN.sub(" ", letters)
    if spaced == " ":
        spaced = _LONE_SPACE
    return spaced.strip(_WHITE_SPACE).replace(_LONE_SPACE, " ")
