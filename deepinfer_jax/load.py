"""How busy an engine is: what those need to know who choose between engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from deepinfer_jax.books import Books
from deepinfer_jax.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class ShardLoad:
    """One shard's part; requests are branches.

    Attributes:
        running_requests: those that have one of its ``slots``.
        cache_tokens: tokens whose state they have, together.
        prefill_tokens: tokens of their prompts that are still to be computed.
        used_blocks: blocks that they count on, of ``blocks``.
    """

    running_requests: int
    slots: int
    cache_tokens: int
    prefill_tokens: int
    used_blocks: int
    blocks: int


@dataclasses.dataclass(frozen=True)
class EngineLoad:
    """``waiting_requests`` have no shard yet; ``waiting_tokens`` are all their tokens, cached ones included."""

    waiting_requests: int
    waiting_tokens: int
    shards: tuple[ShardLoad, ...]


def engine_load(waiting: Collection[Sequence], running: Iterable[Sequence], books: Books) -> EngineLoad:
    """Count what waits and what runs."""
    on_shard: list[list[Sequence]] = [[] for _ in range(books.n_shards)]
    for sequence in running:
        on_shard[sequence.shard].append(sequence)
    return EngineLoad(
        waiting_requests=len(waiting),
        waiting_tokens=sum(sequence.length for sequence in waiting),
        shards=tuple(
            ShardLoad(
                running_requests=len(here),
                slots=books.slots,
                cache_tokens=sum(sequence.computed for sequence in here),
                prefill_tokens=sum(max(0, sequence.prompt_length - sequence.computed) for sequence in here),
                used_blocks=books.pool.used(shard),
                blocks=books.pool.blocks,
            )
            for shard, here in enumerate(on_shard)
        ),
    )
