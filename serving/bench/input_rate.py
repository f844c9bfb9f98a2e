"""How much input a cluster takes: tokens of prompts per second, those that caches have counted or not."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable

import numpy as np

from serving.bench.turn import greedy, random_prompt
from serving.client import Client

_ANSWER_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class InputFigures:
    """Prompts that begin alike, each answered with one token.

    Attributes:
        prompts, shared, own: how many, and their lengths: what all have in common, and what each has alone.
        at_once: prompts that are open at a time, behind the first.
        input_tokens, hit_tokens: of all prompts, and those of them that a cache had.
        seconds: from the first prompt to the last answer.
    """

    prompts: int
    shared: int
    own: int
    at_once: int
    input_tokens: int
    hit_tokens: int
    seconds: float

    @property
    def with_hits(self) -> float:
        """Input tokens per second."""
        return self.input_tokens / self.seconds

    @property
    def without_hits(self) -> float:
        """Those that were computed, per second."""
        return (self.input_tokens - self.hit_tokens) / self.seconds


def measure_input(
    target: str,
    vocabulary: int,
    *,
    prompts: int = 12,
    shared: int = 1920,
    own: int = 128,
    at_once: int = 2,
    progress: Callable[[], None] = lambda: None,
) -> InputFigures:
    """Have prompts answered; all but the first find what they share in a cache, if there is one.

    Args:
      target: of the server.
      vocabulary: ids are below it.
      prompts, shared, own, at_once: see :class:`InputFigures`.
      progress: called behind each prompt.
    """
    # Another run on the same cluster must not have warmed it.
    random = np.random.default_rng()
    beginning = random_prompt(random, vocabulary, shared)
    asked = [beginning + random_prompt(random, vocabulary, own) for _ in range(prompts)]
    params = greedy(1)
    with Client(target, timeout=_ANSWER_SECONDS) as client, concurrent.futures.ThreadPoolExecutor(at_once) as threads:

        def hits(prompt: tuple[int, ...]) -> int:
            found = client.complete(prompt, params).finished.receipt.engine.hit_tokens
            progress()
            return found

        begin = time.perf_counter()
        hit_tokens = hits(asked[0]) + sum(threads.map(hits, asked[1:]))
        seconds = time.perf_counter() - begin
    return InputFigures(prompts, shared, own, at_once, sum(map(len, asked)), hit_tokens, seconds)
