"""The tokenizer of a checkpoint: plain text to token ids, token ids to text, whole or as they arrive.

A released ``tokenizer.json`` (the Hugging Face ``tokenizers`` format) is a byte-level BPE: every token is a run of
bytes, spelled in the vocabulary with one printable character per byte. *Control tokens* (the file's ``added_tokens``:
begin of sentence, ``<｜User｜>``, ``</think>``, ...) stand outside the BPE.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import tokenizers

from deepinfer_jax.errors import CheckpointError, InputError

TOKENIZER_FILE = "tokenizer.json"


def _bytes_by_spelling() -> dict[str, int]:
    """The byte that each character of a byte-level spelling stands for (the GPT-2 alphabet).

    Bytes that are printable in Latin-1 stand for themselves; the other 68 take the characters from U+0100 upwards.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


BYTES_BY_SPELLING: Mapping[str, int] = MappingProxyType(_bytes_by_spelling())
"""The byte that each character of a byte-level spelling stands for."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's own tokenizer.

    Attributes:
        path: the ``tokenizer.json`` it was read from.
        vocabulary_size: number of token ids, counted from 0 without gaps; at most the model's ``vocab_size``.
        control_tokens: spelling of each control token -> its id.
        control_spellings: the inverse, id -> spelling.
        vocabulary: the loaded file, control tokens included; used for look-ups only, never to encode.
        plain_encoder: the same BPE without any control token.
    """

    path: Path
    vocabulary_size: int
    control_tokens: Mapping[str, int] = dataclasses.field(repr=False, compare=False)
    control_spellings: Mapping[int, str] = dataclasses.field(repr=False, compare=False)
    vocabulary: tokenizers.Tokenizer = dataclasses.field(repr=False, compare=False)
    plain_encoder: tokenizers.Tokenizer = dataclasses.field(repr=False, compare=False)

    @classmethod
    def from_directory(cls, model_directory: str | Path, *, vocab_size: int | None = None) -> Tokenizer:
        """Load ``tokenizer.json`` of a checkpoint directory.

        Args:
            model_directory: the checkpoint directory.
            vocab_size: embedding rows of the model (``ModelConfig.vocab_size``); None skips the comparison.

        Raises:
            CheckpointError: the file is missing, unreadable, not byte-level, has gaps between its ids, or has ids at or
                above ``vocab_size``.
        """
        path = Path(model_directory) / TOKENIZER_FILE
        vocabulary = _load(path)
        size = vocabulary.get_vocab_size(with_added_tokens=True)
        if vocab_size is not None and size > vocab_size:
            raise CheckpointError(
                str(path),
                f"a tokenizer with token ids up to {size - 1}",
                f"token ids below the model's vocab_size {vocab_size}",
                "use the tokenizer.json that was released with these weights",
            )
        spellings = {token_id: token.content for token_id, token in vocabulary.get_added_tokens_decoder().items()}
        return cls(
            path=path,
            vocabulary_size=size,
            control_tokens=MappingProxyType({spelling: token_id for token_id, spelling in spellings.items()}),
            control_spellings=MappingProxyType(spellings),
            vocabulary=vocabulary,
            plain_encoder=_without_control_tokens(vocabulary),
        )

    def encode_text(self, text: str, *, bos_token_id: int | None = None) -> list[int]:
        """Token ids of an untrusted plain prompt.

        The spelling of a control token inside ``text`` is ordinary text: no control id comes out, so a prompt can
        neither end the sequence nor open a turn.

        Args:
            text: any text that has a UTF-8 form.
            bos_token_id: id put in front (``ModelConfig.bos_token_id``); None puts nothing in front.

        Raises:
            InputError: ``text`` holds a lone surrogate, which has no UTF-8 form.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            surrogate = text[error.start : error.end]
            raise InputError("prompt", surrogate, f"text without surrogates, as at character {error.start}") from error
        token_ids = self.plain_encoder.encode(text, add_special_tokens=False).ids
        return token_ids if bos_token_id is None else [bos_token_id, *token_ids]

    def token_to_id(self, spelling: str) -> int | None:
        """Id of a control token or of a BPE token in its byte-level spelling; None when there is no such token."""
        return self.vocabulary.token_to_id(spelling)

    def spelling_of(self, token_id: int) -> str:
        """The vocabulary's own spelling of an id: byte-level for BPE tokens, literal for control tokens.

        Raises:
            InputError: no token has this id.
        """
        spelling = self.vocabulary.id_to_token(token_id) if 0 <= token_id < self.vocabulary_size else None
        if spelling is None:
            raise InputError("token id", token_id, f"the ids of {self.path}, 0 to {self.vocabulary_size - 1}")
        return spelling

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes one token stands for; they may be an incomplete piece of UTF-8.

        Raises:
            InputError: no token has this id.
        """
        spelling = self.spelling_of(token_id)
        if token_id in self.control_spellings:
            return spelling.encode()
        try:
            return bytes([BYTES_BY_SPELLING[character] for character in spelling])
        except KeyError:
            # The decoder of the tokenizers package takes a token outside the byte alphabet literally.
            return spelling.encode()

    def content_of(self, token_id: int) -> str:
        """Text of one token alone; bytes that are not UTF-8 become U+FFFD. Raises InputError as :meth:`bytes_of`."""
        return self.bytes_of(token_id).decode(errors="replace")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an id sequence, control tokens spelled out; invalid UTF-8 becomes U+FFFD.

        Raises:
            InputError: an id has no token.
        """
        return b"".join(map(self.bytes_of, token_ids)).decode(errors="replace")


class TextStream:
    """Text of a token sequence that is still growing.

    The texts returned by all :meth:`push` calls and the final :meth:`finish`, joined, equal
    :meth:`Tokenizer.decode` of all ids. Text is held back only while its last UTF-8 character is incomplete.
    (``DecodeStream`` of the tokenizers package has no final flush and also holds back complete invalid bytes.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became complete with these ids, possibly empty. Raises InputError for an id without a token."""
        return self._utf8.decode(b"".join(map(self._tokenizer.bytes_of, token_ids)))

    def finish(self) -> str:
        """What was held back, as U+FFFD; empty unless the sequence ended inside a character."""
        return self._utf8.decode(b"", final=True)


def _load(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointError(
            str(path), "missing", "a checkpoint with its own tokenizer.json", "copy the released file, or use token ids"
        )
    try:
        vocabulary = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers package raises bare Exception
        raise CheckpointError(str(path), str(error), "a tokenizer.json of the tokenizers package") from error
    if not isinstance(vocabulary.decoder, tokenizers.decoders.ByteLevel):
        decoder = type(vocabulary.decoder).__name__
        raise CheckpointError(str(path), f"a tokenizer with decoder {decoder}", "a byte-level BPE (decoder ByteLevel)")
    _require_ids_of_file(vocabulary, path)
    return vocabulary


def _require_ids_of_file(vocabulary: tokenizers.Tokenizer, path: Path) -> None:
    # The tokenizers package numbers added tokens by itself: after a gap it moves them, without an error.
    written = {token["content"]: token["id"] for token in json.loads(path.read_bytes())["added_tokens"]}
    loaded = vocabulary.get_vocab(with_added_tokens=True)
    moved = {spelling: token_id for spelling, token_id in written.items() if loaded[spelling] != token_id}
    if moved or set(loaded.values()) != set(range(len(loaded))):
        raise CheckpointError(str(path), "a tokenizer with gaps between its ids", f"the ids 0 to {len(loaded) - 1}")


def _without_control_tokens(vocabulary: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    # `encode_special_tokens` would not do: it splits only added tokens marked special, and `<｜User｜>` or `</think>`
    # are not. A tokenizer built around the same BPE model has no added tokens at all.
    plain = tokenizers.Tokenizer(vocabulary.model)
    if vocabulary.normalizer is not None:
        plain.normalizer = vocabulary.normalizer
    if vocabulary.pre_tokenizer is not None:
        plain.pre_tokenizer = vocabulary.pre_tokenizer
    return plain
