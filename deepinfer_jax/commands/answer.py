"""An engine's news as something to read: plain text, the parts of a chat answer, or the ids themselves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import deepseek_recipe as recipe

from deepinfer_jax.request import Output
from deepinfer_jax.text.chat import ChatEncoder, ChatPrompt


@dataclasses.dataclass(frozen=True)
class Piece:
    """What became readable: ``text`` of the answer, ``reasoning`` before it. ``last``: the answer ends here."""

    text: str = ""
    reasoning: str = ""
    last: bool = False


@runtime_checkable
class Answer(Protocol):
    """How one answer is read."""

    def push(self, output: Output) -> Piece:
        """What became readable with these news. Raises InputError for an id that the tokenizer does not know."""

    def finish(self, *, complete: bool) -> Piece:
        """What was held back. ``complete`` is False where the answer was cut off by its length limit."""


class IdAnswer:
    """The ids themselves, separated by spaces; needs no tokenizer."""

    def __init__(self) -> None:
        self._separator = ""

    def push(self, output: Output) -> Piece:
        text = ""
        for token_id in output.tokens:
            text, self._separator = f"{text}{self._separator}{token_id}", " "
        return Piece(text)

    def finish(self, *, complete: bool) -> Piece:
        del complete
        return Piece()


class TextAnswer:
    """The engine's own text, control tokens spelled out."""

    def push(self, output: Output) -> Piece:
        return Piece(output.text)

    def finish(self, *, complete: bool) -> Piece:
        del complete
        return Piece()


class ChatAnswer:
    """A chat answer: its content is the text; tool calls follow it, one JSON object a line.

    The ``deepseek-recipe`` processor splits the ids, and ends the answer at the request's stop sequences.
    """

    def __init__(self, encoder: ChatEncoder, prompt: ChatPrompt) -> None:
        self._tokenizer = encoder.tokenizer
        self._processor = encoder.answer_processor(prompt, "answer")
        self._response = recipe.ChatCompletionResponse("answer", encoder.model_name, 0, len(prompt.token_ids), 0)
        self._read(self._processor.push(recipe.InferenceChunk.ready()))

    def push(self, output: Output) -> Piece:
        for token_id in output.tokens:
            # The processor drops unknown ids in silence.
            self._tokenizer.spelling_of(token_id)
        return self._read(self._processor.push(recipe.InferenceChunk.tokens(list(output.tokens))))

    def finish(self, *, complete: bool) -> Piece:
        chunks = []
        if not self._processor.finished:
            reason = recipe.InferenceFinishReason.Stop if complete else recipe.InferenceFinishReason.Length
            chunks = self._processor.push(recipe.InferenceChunk.finish(reason))
        held_back = self._read([*chunks, *self._processor.finish()])
        message = json.loads(self._response.to_json())["choices"][0]["message"]
        calls = "".join(f"\n{json.dumps(call, ensure_ascii=False)}" for call in message.get("tool_calls") or ())
        return dataclasses.replace(held_back, text=held_back.text + calls)

    def _read(self, chunks: Iterable[Any]) -> Piece:
        text, reasoning = "", ""
        for chunk in chunks:
            for choice in json.loads(chunk.to_json())["choices"]:
                text += choice["delta"].get("content") or ""
                reasoning += choice["delta"].get("reasoning_content") or ""
            self._response.accumulate(chunk)
        return Piece(text, reasoning, last=self._processor.finished)
