"""Training batches: windows of the token stream, drawn by seed and step alone, so that a resumed run sees the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Int32

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.text.tokenizer import Tokenizer
from examples.train_tiny.corpus import Document

Tokens = Int32[np.ndarray, " tokens"]


def encode_documents(documents: Iterable[Document], tokenizer: Tokenizer, config: ModelConfig) -> list[Tokens]:
    """Each document between the begin and the end token; text that spells a control token stays text."""
    return [
        np.asarray([config.bos_token_id, *tokenizer.encode_text(document.text), config.eos_token_id], np.int32)
        for document in documents
    ]


class Batches(Protocol):
    """What training draws from."""

    def batch(self, step: int, size: int) -> Int32[np.ndarray, "windows window"]:
        """The windows of one step; a function of the step alone."""


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of ``length + 1`` tokens (inputs and targets overlap in all but one) of a stream of documents."""

    stream: Tokens
    length: int
    seed: int

    @classmethod
    def of(cls, documents: Sequence[Tokens], length: int, seed: int) -> Windows:
        """Windows over documents laid end to end."""
        stream = np.concatenate(documents)
        if len(stream) <= length:
            raise ValueError(f"{len(stream)} tokens of text; accepted: more than a window of {length}")
        return cls(stream, length, seed)

    def batch(self, step: int, size: int) -> Int32[np.ndarray, "size window"]:
        """The windows of one step.

        An epoch cuts the stream into windows at an offset of its own and takes each once, in an order of its own.
        """
        per_epoch = len(self.stream) // self.length - 1
        return np.stack([self._window(*divmod(step * size + place, per_epoch)) for place in range(size)])

    def _window(self, epoch: int, place: int) -> Tokens:
        random = np.random.default_rng((self.seed, epoch))
        offset = random.integers(self.length)
        order = random.permutation(len(self.stream) // self.length - 1)
        start = offset + order[place] * self.length
        return self.stream[start : start + self.length + 1]


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Short windows of text first, then long ones, and from step ``chat_from`` on as many windows of chats beside them.

    A selection that takes few of many entries is nearly a random one at first, and hides what a query should find. In
    short windows it takes most of them.
    """

    short: Windows
    text: Windows
    chat: Windows
    long_from: int
    chat_from: int

    def batch(self, step: int, size: int) -> Int32[np.ndarray, "windows window"]:
        """The windows of one step: ``size`` long ones, or short ones with as many tokens; a function of the step."""
        if step < self.long_from:
            return self.short.batch(step, size * self.text.length // self.short.length)
        if step < self.chat_from:
            return self.text.batch(step, size)
        chats = size // 2
        return np.concatenate([self.chat.batch(step - self.chat_from, chats), self.text.batch(step, size)[chats:]])


@dataclasses.dataclass(frozen=True)
class Scored:
    """Windows in which every predicted token of some documents counts once: ``counted[i, t]`` is for target t."""

    windows: Int32[np.ndarray, "windows window"]
    counted: Bool[np.ndarray, "windows length"]


def scoring_windows(documents: Sequence[Tokens], length: int, padding: int) -> Scored:
    """Cut documents into windows that overlap by half: behind the first, tokens see at least ``length / 2`` back."""
    rows, counted = [], []
    for document in documents:
        for start, first in _starts(len(document) - 1, length):
            window = np.full(length + 1, padding, np.int32)
            part = document[start : start + length + 1]
            window[: len(part)] = part
            rows.append(window)
            places = np.arange(length)
            counted.append((places >= first) & (places < len(part) - 1))
    return Scored(np.stack(rows), np.stack(counted))


def _starts(targets: int, length: int) -> Iterator[tuple[int, int]]:
    """Start of each window, and the first place in it that no earlier window counts."""
    yield 0, 0
    done = length
    while done < targets:
        yield done - length // 2, length // 2
        done += length - length // 2
