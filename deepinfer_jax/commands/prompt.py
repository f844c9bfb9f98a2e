"""What ``generate`` continues: a text, a chat or token ids, as ids together with how the answer is read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TextIO

from deepinfer_jax.commands.answer import Answer, ChatAnswer, IdAnswer, TextAnswer
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.text.chat import ChatEncoder
from deepinfer_jax.text.tokenizer import Tokenizer

# What the release's chat protocol assumes when a request says nothing.
DEFAULT_TEMPERATURE = 1.0
DEFAULT_MAX_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt ready to run.

    ``stop_ids`` end the answer. ``max_tokens``, ``temperature`` and ``seed`` are what the prompt itself asks for, as a
    request body may, or the defaults; a seed of None is drawn.
    """

    token_ids: tuple[int, ...]
    stop_ids: frozenset[int]
    answer: Answer
    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = DEFAULT_TEMPERATURE
    seed: int | None = None


def text_prompt(directory: Path, config: ModelConfig, text: str, *, bos: bool, print_ids: bool) -> Prompt:
    """Plain text, encoded by the checkpoint's tokenizer; ``bos`` puts the begin-of-sentence id in front.

    Raises:
      CheckpointError: the checkpoint has no usable tokenizer.
      InputError: the text has no encoding.
    """
    tokenizer = Tokenizer.from_directory(directory, vocab_size=config.vocab_size)
    ids = tokenizer.encode_text(text, bos_token_id=config.bos_token_id if bos else None)
    return Prompt(tuple(ids), frozenset({config.eos_token_id}), IdAnswer() if print_ids else TextAnswer(tokenizer))


def id_prompt(directory: Path, config: ModelConfig, token_ids: tuple[int, ...], *, print_ids: bool) -> Prompt:
    """Token ids as they are. Printing ids needs no tokenizer.

    Raises:
      CheckpointError: text is wanted and the checkpoint has no usable tokenizer.
    """
    stop_ids = frozenset({config.eos_token_id})
    if print_ids:
        return Prompt(token_ids, stop_ids, IdAnswer())
    return Prompt(token_ids, stop_ids, TextAnswer(Tokenizer.from_directory(directory, vocab_size=config.vocab_size)))


def chat_prompt(directory: Path, config: ModelConfig, file: TextIO, *, thinking: bool, print_ids: bool) -> Prompt:
    """A chat file: a JSON array of messages or a Chat Completions request body, whose sampling settings count.

    Raises:
      CheckpointError: the tokenizer is missing or lacks the control tokens of the chat format.
      InputError: the file is not such a document, or asks for what cannot be served.
    """
    chat = _read_chat(file)
    encoder = ChatEncoder.from_tokenizer(
        Tokenizer.from_directory(directory, vocab_size=config.vocab_size),
        vocab_size=config.vocab_size,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )
    encoded = encoder.encode(chat, thinking=thinking)
    options = encoded.request.inference_options
    if options.top_p is not None and options.top_p < 1.0:
        raise InputError("top_p", options.top_p, "1, since this command samples from all tokens")
    return Prompt(
        token_ids=encoded.token_ids,
        stop_ids=frozenset(encoder.stop_token_ids),
        answer=IdAnswer() if print_ids else ChatAnswer(encoder, encoded),
        max_tokens=DEFAULT_MAX_TOKENS if options.max_tokens is None else options.max_tokens,
        temperature=DEFAULT_TEMPERATURE if options.temperature is None else options.temperature,
        seed=options.seed,
    )


def _read_chat(file: TextIO) -> list[Any] | dict[str, Any]:
    accepted = "a JSON array of messages, or a Chat Completions request body"
    try:
        chat = json.load(file)
    except (ValueError, RecursionError) as error:
        raise InputError("--messages", file.name, f"{accepted} ({error})") from error
    if not isinstance(chat, list | dict):
        raise InputError("--messages", chat, accepted)
    return chat
