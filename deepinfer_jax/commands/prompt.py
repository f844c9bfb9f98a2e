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

    ``stop_ids`` end the answer, and so does ``stop``, where the answer itself does not look for it. ``tokenizer``: for
    the engine, where it makes text or looks for ``stop``. ``max_tokens``, ``temperature``, ``top_p`` and ``seed`` are
    what the prompt itself asks for, as a request body may, or the defaults; a seed of None is drawn.
    """

    token_ids: tuple[int, ...]
    stop_ids: frozenset[int]
    answer: Answer
    tokenizer: Tokenizer | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = DEFAULT_TEMPERATURE
    top_p: float = 1.0
    seed: int | None = None


def text_prompt(
    directory: Path, config: ModelConfig, text: str, *, bos: bool, stop: tuple[str, ...], print_ids: bool
) -> Prompt:
    """Plain text, encoded by the checkpoint's tokenizer; ``bos`` puts the begin-of-sentence id in front.

    Raises:
      CheckpointError: the checkpoint has no usable tokenizer.
      InputError: the text has no encoding.
    """
    tokenizer = Tokenizer.from_directory(directory, vocab_size=config.vocab_size)
    ids = tokenizer.encode_text(text, bos_token_id=config.bos_token_id if bos else None)
    answer = IdAnswer() if print_ids else TextAnswer()
    return Prompt(tuple(ids), frozenset({config.eos_token_id}), answer, tokenizer, stop)


def id_prompt(
    directory: Path, config: ModelConfig, token_ids: tuple[int, ...], *, stop: tuple[str, ...], print_ids: bool
) -> Prompt:
    """Token ids as they are. Printing ids needs no tokenizer, unless there are stop strings.

    Raises:
      CheckpointError: text is wanted and the checkpoint has no usable tokenizer.
    """
    ends = frozenset({config.eos_token_id})
    if print_ids and not stop:
        return Prompt(token_ids, ends, IdAnswer())
    tokenizer = Tokenizer.from_directory(directory, vocab_size=config.vocab_size)
    return Prompt(token_ids, ends, IdAnswer() if print_ids else TextAnswer(), tokenizer, stop)


def chat_prompt(
    directory: Path, config: ModelConfig, file: TextIO, *, thinking: bool, stop: tuple[str, ...], print_ids: bool
) -> Prompt:
    """A chat file: a JSON array of messages or a Chat Completions request body, whose sampling settings count.

    ``stop`` takes the place of the body's stop sequences unless it is empty.

    Raises:
      CheckpointError: the tokenizer is missing or lacks the control tokens of the chat format.
      InputError: the file is not such a document, or asks for what cannot be served.
    """
    chat = _read_chat(file)
    if stop:
        chat = {**(chat if isinstance(chat, dict) else {"messages": chat}), "stop": list(stop)}
    tokenizer = Tokenizer.from_directory(directory, vocab_size=config.vocab_size)
    encoder = ChatEncoder.from_tokenizer(
        tokenizer,
        vocab_size=config.vocab_size,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )
    encoded = encoder.encode(chat, thinking=thinking)
    options, stops = encoded.request.inference_options, tuple(encoded.request.parsing_options.stop_sequences)
    watched = print_ids and bool(stops)
    return Prompt(
        token_ids=encoded.token_ids,
        stop_ids=frozenset(encoder.stop_token_ids),
        answer=IdAnswer() if print_ids else ChatAnswer(encoder, encoded),
        tokenizer=tokenizer if watched else None,
        stop=stops if watched else (),
        max_tokens=DEFAULT_MAX_TOKENS if options.max_tokens is None else options.max_tokens,
        temperature=DEFAULT_TEMPERATURE if options.temperature is None else options.temperature,
        top_p=1.0 if options.top_p is None else options.top_p,
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
