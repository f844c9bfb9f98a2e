"""What gRPC and gateways add to the engine: per token, and until the first one."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from deepinfer_jax.engine import Engine
from serving.bench.alone import answer_alone
from serving.bench.cluster import Addresses
from serving.bench.turn import Spread, Turn, answer_served, greedy, random_prompt
from serving.client import Client

_ANSWER_SECONDS = 600.0

WAYS = {
    "worker": "a decode worker that does everything, over gRPC",
    "relay": "the same through a gateway",
    "gateway": "prefill worker, hand-over, decode worker, gateway",
}
"""Ways to an answer, by what they add to the engine."""


@dataclasses.dataclass(frozen=True)
class WayFigures:
    """One way to the same answers, whose turns alternate with those of the engine alone.

    Attributes:
        way: name of it.
        first_token_ms, token_us: until the first token in milliseconds, and from one to the next in microseconds.
        added_first_token_ms, added_token_us: more than the engine alone: the difference of the best turns, and the
            median of the differences of neighbouring ones.
    """

    way: str
    first_token_ms: Spread
    token_us: Spread
    added_first_token_ms: Spread
    added_token_us: Spread


@dataclasses.dataclass(frozen=True)
class OverheadFigures:
    """Prompts of ``prompt`` tokens with ``tokens`` new ones, one at a time."""

    prompt: int
    tokens: int
    turns: int
    alone_first_token_ms: Spread
    alone_token_us: Spread
    ways: tuple[WayFigures, ...]


def measure_overhead(
    engine: Engine,
    addresses: Addresses,
    *,
    prompt: int = 128,
    tokens: int = 64,
    turns: int = 8,
    progress: Callable[[], None] = lambda: None,
) -> OverheadFigures:
    """Ask the same by every way that there is, in turns.

    Args:
      engine: alone, with the settings of the workers.
      addresses: of the cluster.
      prompt, tokens: lengths.
      turns: of each way; one more comes first, and does not count.
      progress: called behind each.
    """
    targets = {"worker": addresses.decode, "relay": addresses.relay, "gateway": addresses.gateway}
    random, params = np.random.default_rng(0), greedy(tokens)
    alone: list[Turn] = []
    served: dict[str, list[Turn]] = {way: [] for way, target in targets.items() if target is not None}
    with contextlib.ExitStack() as stack:
        clients = {way: stack.enter_context(Client(targets[way] or "", timeout=_ANSWER_SECONDS)) for way in served}
        for _ in range(turns + 1):
            asked = random_prompt(random, engine.config.vocab_size, prompt)
            alone.append(answer_alone(engine, asked, params))
            for way, client in clients.items():
                served[way].append(answer_served(client, asked, params))
            progress()
    return OverheadFigures(
        prompt=prompt,
        tokens=tokens,
        turns=turns,
        alone_first_token_ms=_first_tokens(alone[1:]),
        alone_token_us=_tokens(alone[1:]),
        ways=tuple(compare(way, alone[1:], found[1:]) for way, found in served.items()),
    )


def compare(way: str, alone: Sequence[Turn], served: Sequence[Turn]) -> WayFigures:
    """Figures of a way whose turns have neighbours of the engine alone."""
    pairs = list(zip(alone, served, strict=True))
    first, token = _first_tokens(served), _tokens(served)
    return WayFigures(
        way=way,
        first_token_ms=first,
        token_us=token,
        added_first_token_ms=Spread(
            first.best - _first_tokens(alone).best,
            1e3 * statistics.median(other.first_seconds - own.first_seconds for own, other in pairs),
        ),
        added_token_us=Spread(
            token.best - _tokens(alone).best,
            1e6 * statistics.median(other.token_seconds - own.token_seconds for own, other in pairs),
        ),
    )


def _first_tokens(turns: Sequence[Turn]) -> Spread:
    return Spread.of(1e3 * turn.first_seconds for turn in turns)


def _tokens(turns: Sequence[Turn]) -> Spread:
    return Spread.of(1e6 * turn.token_seconds for turn in turns)
