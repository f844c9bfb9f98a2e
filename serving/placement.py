"""Which worker gets a request: pure policies over what is known of the workers' load.

Prefill is work that ends, so a prompt goes where the fewest tokens are outstanding. Decoding occupies a place for as
long as it lasts: each running request costs time in every step, and so does the length of its cache. Both policies
follow published descriptions of the original's production system (placement on the decode side by request count and
total cache length) and of DualPath, whose balance level is used here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

SLACK = 1.05
"""How far above the mean a cache may grow before only cache lengths count."""


@dataclasses.dataclass(frozen=True)
class PrefillLoad:
    """What is known of a worker that computes prompts.

    Attributes:
        name: unique among the workers.
        outstanding_tokens: prompt tokens that wait or run; without what its caches hold of them, where that is known.
        available: it is reachable, healthy, and takes new requests.
    """

    name: str
    outstanding_tokens: int
    available: bool = True


@dataclasses.dataclass(frozen=True)
class DecodeShard:
    """One shard of a worker that decodes; see :class:`DecodeLoad`.

    Attributes:
        requests: those that run there, of at most ``slots``.
        cache_tokens: tokens whose state they have, together.
        pages: in use, of ``all_pages``.
    """

    requests: int
    slots: int
    cache_tokens: int
    pages: int
    all_pages: int


@dataclasses.dataclass(frozen=True)
class DecodeLoad:
    """What is known of a worker that decodes.

    Attributes:
        name: unique among the workers.
        shards: at least one.
        waiting_requests: those that have no shard yet, ``waiting_tokens`` long together.
        page_tokens: tokens of a page.
        available: it is reachable, healthy, and takes new requests.
    """

    name: str
    shards: tuple[DecodeShard, ...]
    waiting_requests: int = 0
    waiting_tokens: int = 0
    page_tokens: int = 128
    available: bool = True

    @property
    def requests(self) -> float:
        """Requests for each shard, those that wait included."""
        return (self.waiting_requests + sum(shard.requests for shard in self.shards)) / len(self.shards)

    @property
    def cache_tokens(self) -> float:
        """Tokens for each shard, those of requests that wait included."""
        return (self.waiting_tokens + sum(shard.cache_tokens for shard in self.shards)) / len(self.shards)

    def has_room(self, tokens: int) -> bool:
        """Whether a request of so many tokens would run at once: nobody waits, and a shard has a slot and pages."""
        pages = -(-tokens // self.page_tokens)
        return not self.waiting_requests and any(
            shard.requests < shard.slots and shard.pages + pages <= shard.all_pages for shard in self.shards
        )


def choose_prefill(workers: Iterable[PrefillLoad], excluded: Collection[str] = ()) -> str | None:
    """The worker with the fewest outstanding tokens, of equal ones the first by name; None where there is none.

    ``excluded``: names of workers that have failed the request.
    """
    usable = [worker for worker in workers if worker.available and worker.name not in excluded]
    return min(usable, key=lambda worker: (worker.outstanding_tokens, worker.name)).name if usable else None


def choose_decode(workers: Iterable[DecodeLoad], tokens: int, excluded: Collection[str] = ()) -> str | None:
    """The worker where a request of so many tokens, prompt and answer, does least harm; None where there is none.

    Only workers at which it would run at once count, if there are any. Among these a short request goes where the
    fewest requests run, and a long one where caches are shortest: a request is long for a worker whose cache it would
    lift above the mean, by more than :data:`SLACK`. Equal ones are ordered by name.

    ``excluded``: names of workers that have failed the request.
    """
    usable = [worker for worker in workers if worker.available and worker.name not in excluded]
    candidates = [worker for worker in usable if worker.has_room(tokens)] or usable
    if not candidates:
        return None
    level = SLACK * (tokens + sum(worker.cache_tokens for worker in candidates)) / len(candidates)
    below = [worker for worker in candidates if worker.cache_tokens + tokens <= level]
    if below:
        return min(below, key=lambda worker: (worker.requests, worker.cache_tokens, worker.name)).name
    return min(candidates, key=lambda worker: (worker.cache_tokens, worker.requests, worker.name)).name
