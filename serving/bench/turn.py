"""One timed answer, and the prompts that are asked for."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterable

import numpy as np

from deepinfer_jax.request import SamplingParams
from serving.client import Client
from serving.events import Delta


@dataclasses.dataclass(frozen=True)
class Turn:
    """An answer.

    Attributes:
        tokens: of it.
        first_seconds, last_seconds: from asking until the first and the last of them.
    """

    tokens: tuple[int, ...]
    first_seconds: float
    last_seconds: float

    @property
    def token_seconds(self) -> float:
        """Between two tokens, on average."""
        return (self.last_seconds - self.first_seconds) / max(1, len(self.tokens) - 1)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Best and median of several turns."""

    best: float
    median: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of values where less is better."""
        values = list(values)
        return cls(min(values), statistics.median(values))


def greedy(tokens: int) -> SamplingParams:
    """The likeliest tokens, so many of them whatever they are."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def random_prompt(random: np.random.Generator, vocabulary: int, length: int) -> tuple[int, ...]:
    """A prompt that no cache has anything of."""
    return tuple(random.integers(0, vocabulary, length).tolist())


def answer_served(client: Client, prompt: tuple[int, ...], params: SamplingParams) -> Turn:
    """One request to a server; nothing of it is cached."""
    begin = time.perf_counter()
    tokens: list[int] = []
    first = last = begin
    for event in client.generate(prompt, params, read_cache=False):
        if isinstance(event, Delta):
            last = time.perf_counter()
            first = last if not tokens else first
            tokens += event.tokens
    return Turn(tuple(tokens), first - begin, last - begin)
