"""Chat in and out: OpenAI-style messages to token ids, and the parser for the answer's ids.

The ``deepseek-recipe`` package renders and encodes; this module loads it with the checkpoint's tokenizer, checks that
tokenizer's control tokens, and turns refusals into one error type. A rendered prompt is never encoded again as a
string: text written by a user would then become control tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import deepseek_recipe as recipe

from deepinfer_jax.errors import CheckpointError, InputError
from deepinfer_jax.text.tokenizer import Tokenizer

MODEL_NAME = "DeepSeek-V4.1-Flash"
RELEASED_VOCAB_SIZE = 129280
# Ids that the released weights were trained with. A tokenizer.json of another release loads without complaint and puts
# some of these spellings elsewhere (the V4 file: System absent, image at 129279).
RELEASED_CONTROL_TOKENS: Mapping[str, int] = MappingProxyType(
    {
        recipe.SpecialToken.Bos.default_str(): 0,
        recipe.SpecialToken.Eos.default_str(): 1,
        recipe.SpecialToken.System.default_str(): 128799,
        recipe.SpecialToken.User.default_str(): 128803,
        recipe.SpecialToken.Assistant.default_str(): 128804,
        recipe.SpecialToken.ThinkingStart.default_str(): 128821,
        recipe.SpecialToken.ThinkingEnd.default_str(): 128822,
        recipe.SpecialToken.Dsml.default_str(): 128825,
        recipe.SpecialToken.LatestReminder.default_str(): 128828,
    }
)
NO_CHAT_REMEDY = "use the released tokenizer.json, or give the prompt by --prompt or --token-ids"


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
    """A chat ready for the engine.

    Attributes:
        token_ids: the encoded conversation; one placeholder id per image.
        request: the converted request. ``request.inference_options`` holds the request's sampling settings,
            ``request.parsing_options`` how to read the answer, ``request.resolve_max_tokens`` its length limit.
        image_sources: the images, in the order of their placeholders; empty unless the encoder accepts images.
    """

    token_ids: tuple[int, ...]
    request: recipe.ConversationRequest
    image_sources: tuple[recipe.ImageSource, ...]


@dataclasses.dataclass(frozen=True)
class ChatEncoder:
    """Encodes chats for one checkpoint. Build it with :meth:`from_tokenizer`, which makes the start-up checks.

    Attributes:
        tokenizer: the checkpoint's tokenizer.
        model_name: the name used for requests without one, and in answers.
        stop_token_ids: ids that end an answer. The engine strips them: they are no part of its text.
        accepts_images: whether conversations may hold images.
        codec: the same tokenizer file, loaded by ``deepseek_recipe``.
        options: conversion options, the accepted model names among them.
    """

    tokenizer: Tokenizer
    model_name: str
    stop_token_ids: tuple[int, ...]
    accepts_images: bool
    codec: recipe.Tokenizer
    options: recipe.ConversionOptions

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        bos_token_id: int,
        eos_token_id: int,
        image_token_id: int | None = None,
        model_name: str = MODEL_NAME,
    ) -> ChatEncoder:
        """Check the control tokens and load the codec.

        Args:
            tokenizer: the checkpoint's tokenizer.
            vocab_size, bos_token_id, eos_token_id: as in the checkpoint's ModelConfig.
            image_token_id: as in ModelConfig, for a caller that expands image placeholders; None refuses images.
            model_name: a name that requests may use besides the released one.

        Raises:
            CheckpointError: a control token is missing or has another id than the configuration or the release says.
        """
        check_control_tokens(
            tokenizer,
            vocab_size=vocab_size,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            image_token_id=image_token_id,
        )
        version = recipe.ModelVersion.DeepseekV41Flash
        names = {MODEL_NAME: version, model_name: version}
        return cls(
            tokenizer=tokenizer,
            model_name=model_name,
            stop_token_ids=(eos_token_id,),
            accepts_images=image_token_id is not None,
            codec=recipe.Tokenizer.from_file(str(tokenizer.path)),
            options=recipe.ConversionOptions().with_model_versions_by_name(names),
        )

    def encode(self, chat: Sequence[Any] | Mapping[str, Any], *, thinking: bool = False) -> ChatPrompt:
        """Render and encode a chat.

        Args:
            chat: a list of messages ``{"role": ..., "content": ...}``, or the body of a Chat Completions request; a
                body without ``model`` gets ``model_name``.
            thinking: whether the model reasons before it answers. ``thinking`` and ``reasoning_effort`` of a request
                body win over it.

        Raises:
            InputError: the request is malformed, asks for what the protocol refuses, or holds images although images
                are not accepted.
            CheckpointError: the tokenizer lacks a control token that this conversation needs.
        """
        request = self._convert(chat, thinking)
        encoding = recipe.DeepseekV41Encoding()
        rendered = encoding.render_conversation(request.conversation)
        if rendered.image_sources and not self.accepts_images:
            raise InputError("messages", f"{len(rendered.image_sources)} image(s)", "text only, at this entry point")
        self._check_needed_tokens(rendered)
        token_ids = encoding.with_tokenizer(self.codec).encode(request.conversation)
        return ChatPrompt(tuple(token_ids), request, tuple(rendered.image_sources))

    def answer_processor(self, prompt: ChatPrompt, answer_id: str) -> recipe.StreamProcessor:
        """A parser that splits the answer's token ids into reasoning, content and tool calls.

        Feed it ``InferenceChunk.ready()`` first, then ``InferenceChunk.tokens(ids)`` with stop ids stripped, then
        ``InferenceChunk.finish(reason)``; each push returns Chat Completions chunks.

        Args:
            prompt: the chat being answered.
            answer_id: the ``id`` of the produced chunks.
        """
        generator = recipe.ChatCompletionRequest.chunk_generator(prompt.request, answer_id, self.model_name)
        return recipe.StreamProcessor(generator, prompt.request.parsing_options, self.codec)

    def _convert(self, chat: Sequence[Any] | Mapping[str, Any], thinking: bool) -> recipe.ConversationRequest:
        body = {"model": self.model_name, **(chat if isinstance(chat, Mapping) else {"messages": list(chat)})}
        try:
            return recipe.ChatCompletionRequest(body).convert(self.options.with_default_thinking_mode(thinking))
        except (recipe.ConversionError, TypeError, ValueError) as error:
            raise InputError("chat", body, "a Chat Completions request", str(error)) from error

    def _check_needed_tokens(self, rendered: recipe.RenderedPrompt) -> None:
        needed = dict.fromkeys(rendered.prompt[start:end] for start, end in rendered.special_ranges)
        _require_spellings(self.tokenizer, needed)


def check_control_tokens(
    tokenizer: Tokenizer, *, vocab_size: int, bos_token_id: int, eos_token_id: int, image_token_id: int | None = None
) -> None:
    """The start-up check of a tokenizer that shall encode chats.

    BOS and EOS must have the configuration's ids. With the released vocabulary (129280 rows) every control token of the
    prompt format must have its released id. Image placeholders are checked where ``image_token_id`` is given.

    Raises:
        CheckpointError: a control token is missing or has another id.
    """
    expected = {
        recipe.SpecialToken.Bos.default_str(): bos_token_id,
        recipe.SpecialToken.Eos.default_str(): eos_token_id,
    }
    if image_token_id is not None:
        expected[recipe.SpecialToken.Image.default_str()] = image_token_id
    _require_ids(tokenizer, expected, "the configuration")
    if vocab_size == RELEASED_VOCAB_SIZE:
        image = {recipe.SpecialToken.Image.default_str(): recipe.IMAGE_SPECIAL_TOKEN_ID}
        released = {**RELEASED_CONTROL_TOKENS, **(image if image_token_id is not None else {})}
        _require_ids(tokenizer, released, "the released vocabulary")


def _require_ids(tokenizer: Tokenizer, expected: Mapping[str, int], authority: str) -> None:
    _require_spellings(tokenizer, expected)
    found = {spelling: tokenizer.control_tokens[spelling] for spelling in expected}
    wrong = {spelling: token_id for spelling, token_id in found.items() if token_id != expected[spelling]}
    if wrong:
        accepted = ", ".join(f"{spelling} = {expected[spelling]}" for spelling in wrong)
        raise CheckpointError(str(tokenizer.path), wrong, f"{accepted}, by {authority}", NO_CHAT_REMEDY)


def _require_spellings(tokenizer: Tokenizer, needed: Mapping[str, Any]) -> None:
    missing = [spelling for spelling in needed if spelling not in tokenizer.control_tokens]
    if missing:
        raise CheckpointError(
            str(tokenizer.path),
            f"a tokenizer that lacks {len(missing)} control token(s)",
            f"one that has {', '.join(missing)}",
            NO_CHAT_REMEDY,
        )
