"""Many streams at once through a gateway, and whether each has the tokens of the engine alone."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from deepinfer_jax.engine import Engine
from serving.async_client import AsyncClient
from serving.bench.alone import answer_alone
from serving.bench.turn import greedy, random_prompt
from serving.errors import ServingError
from serving.events import Delta

_ANSWER_SECONDS = 600.0
Prompt = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StreamFigures:
    """Streams that begin together.

    Attributes:
        streams: of them.
        prompt, tokens: lengths.
        held: most that were open at a time.
        answering: most of these that had their first token and not their last.
        equal: streams whose tokens are those of the engine alone.
        failed: streams that ended with an error.
        seconds: from the first call to the last end.
    """

    streams: int
    prompt: int
    tokens: int
    held: int
    answering: int
    equal: int
    failed: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of all streams together."""
        return self.streams * self.tokens / self.seconds

    @property
    def all_equal(self) -> bool:
        """Whether every one is that of the engine."""
        return self.equal == self.streams


def measure_streams(
    engine: Engine,
    target: str,
    *,
    streams: int = 128,
    prompt: int = 64,
    tokens: int = 32,
    progress: Callable[[], None] = lambda: None,
) -> StreamFigures:
    """Ask for all at once, and then the engine for one after the other.

    Args:
      engine: alone; its results and those of the servers depend on nothing but the request.
      target: of the gateway.
      streams, prompt, tokens: see :class:`StreamFigures`.
      progress: called behind each request of the engine alone.
    """
    random = np.random.default_rng(1)
    asked = [random_prompt(random, engine.config.vocab_size, prompt) for _ in range(streams)]
    held, answering, seconds, served = asyncio.run(ask_all(target, asked, tokens))
    alone = []
    for one in asked:
        alone.append(answer_alone(engine, one, greedy(tokens)).tokens)
        progress()
    return StreamFigures(
        streams=streams,
        prompt=prompt,
        tokens=tokens,
        held=held,
        answering=answering,
        equal=sum(found == wanted for found, wanted in zip(served, alone, strict=True)),
        failed=sum(found is None for found in served),
        seconds=seconds,
    )


async def ask_all(target: str, prompts: Sequence[Prompt], tokens: int) -> tuple[int, int, float, list[Prompt | None]]:
    """Streams that begin together.

    Returns:
      Most that were open at a time; most of these that had begun to answer; seconds; and the tokens of each, None where
      it failed.
    """
    opened = held = answering = most_answering = 0

    async def ask(client: AsyncClient, prompt: Prompt) -> Prompt | None:
        nonlocal opened, held, answering, most_answering
        found: list[int] = []
        opened += 1
        held = max(held, opened)
        try:
            async for event in client.generate(prompt, greedy(tokens), read_cache=False):
                if isinstance(event, Delta):
                    answering += not found
                    most_answering = max(most_answering, answering)
                    found += event.tokens
        except ServingError:
            return None
        finally:
            opened -= 1
            answering -= bool(found)
        return tuple(found)

    async with AsyncClient(target, timeout=_ANSWER_SECONDS) as client:
        begin = time.perf_counter()
        answers = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
        return held, most_answering, time.perf_counter() - begin, answers
