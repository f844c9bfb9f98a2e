"""What the next step runs: a pure policy over plain descriptions of the requests.

A step has room for decode rows (one new token of a request each) and for prefill tiles (several prompt tokens of one
request each), per shard. Running requests come first and share the tiles, so that a long prompt delays nobody by more
than a step's tiles; waiting requests are admitted while slots and blocks last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

# A waiting request that was passed over so often by later ones lets nobody pass any more.
PATIENCE = 64


@dataclasses.dataclass(frozen=True)
class Room:
    """What one step can run on each shard: single rows, and tiles of ``tile_rows`` rows."""

    decode_rows: int
    tiles: int
    tile_rows: int


@dataclasses.dataclass(frozen=True)
class Running:
    """A request with a slot.

    Attributes:
        id: the request.
        shard: where its state is.
        start: tokens whose state is computed or on its way.
        length: tokens it has, among them at most one that is still on its way.
        served: the last step that ran any of its tokens; requests that waited longest come first.
        priority: higher ones come first.
    """

    id: int
    shard: int
    start: int
    length: int
    served: int
    priority: int = 0

    @property
    def decodes(self) -> bool:
        """Whether one token is all it has to run."""
        return self.length - self.start == 1


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A request without a slot: how many blocks it needs to start, and how often others passed it.

    ``shard``: the only one it can go to; None for any.
    """

    id: int
    blocks: int
    tokens: int
    arrival: int
    priority: int = 0
    passed: int = 0
    shard: int | None = None


@dataclasses.dataclass(frozen=True)
class Shard:
    """What a shard has to spare, and what it already carries."""

    free_slots: int
    free_blocks: int
    requests: int
    cached_tokens: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """``count`` tokens of a request that a step runs, from token ``start`` on."""

    id: int
    start: int
    count: int


@dataclasses.dataclass(frozen=True)
class Admission:
    """A waiting request and the shard it goes to."""

    id: int
    shard: int


def plan_step(running: Sequence[Running], room: Room) -> list[Piece]:
    """The pieces of one step: every request at most once, decodes first, then prefill tiles in turns.

    Where a step has no decode rows, single tokens take tiles.
    """
    pieces: list[Piece] = []
    for shard in sorted({request.shard for request in running}):
        here = [request for request in running if request.shard == shard and request.length > request.start]
        rows = bool(room.decode_rows)
        decodes = _in_turn(request for request in here if request.decodes and rows)
        pieces += [Piece(request.id, request.start, 1) for request in decodes[: room.decode_rows]]
        pieces += _prefill(_in_turn(request for request in here if not (request.decodes and rows)), room)
    return pieces


def _in_turn(requests: Iterable[Running]) -> list[Running]:
    return sorted(requests, key=lambda request: (-request.priority, request.served, request.id))


def _prefill(requests: Sequence[Running], room: Room) -> list[Piece]:
    """Tiles go round: each request gets one before any gets a second."""
    tiles: dict[int, int] = {}
    left = room.tiles
    while left:
        wanting = [
            request
            for request in requests
            if request.length - request.start > tiles.get(request.id, 0) * room.tile_rows
        ]
        if not wanting:
            break
        for request in wanting[:left]:
            tiles[request.id] = tiles.get(request.id, 0) + 1
        left -= min(left, len(wanting))
    return [
        Piece(request.id, request.start, min(request.length - request.start, tiles[request.id] * room.tile_rows))
        for request in requests
        if request.id in tiles
    ]


def admit(waiting: Sequence[Waiting], shards: Mapping[int, Shard]) -> list[Admission]:
    """Which waiting requests get a slot now, and where.

    By priority, then by arrival; one that fits nowhere lets later ones pass, but only ``PATIENCE`` times.
    """
    spare = dict(shards)
    admitted = []
    for request in sorted(waiting, key=lambda request: (-request.priority, request.arrival)):
        shard = place(request, spare)
        if shard is None:
            if request.passed >= PATIENCE:
                break
            continue
        before = spare[shard]
        spare[shard] = Shard(
            before.free_slots - 1,
            before.free_blocks - request.blocks,
            before.requests + 1,
            before.cached_tokens + request.tokens,
        )
        admitted.append(Admission(request.id, shard))
    return admitted


def place(request: Waiting, shards: Mapping[int, Shard]) -> int | None:
    """The shard for a request, None where no shard has a slot and the blocks.

    A step takes as long as its busiest shard: requests longer than the mean go where the fewest tokens are cached,
    shorter ones where the fewest requests run.
    """
    fitting = {
        number: shard
        for number, shard in shards.items()
        if shard.free_slots > 0 and shard.free_blocks >= request.blocks and request.shard in (None, number)
    }
    if not fitting:
        return None
    requests = sum(shard.requests for shard in shards.values())
    mean = sum(shard.cached_tokens for shard in shards.values()) / max(requests, 1)
    if request.tokens > mean:
        return min(fitting, key=lambda number: (fitting[number].cached_tokens, fitting[number].requests, number))
    return min(fitting, key=lambda number: (fitting[number].requests, fitting[number].cached_tokens, number))


def victim(running: Sequence[Running], shard: int) -> Running | None:
    """The request that gives way when a shard has no block left: lowest priority, then the latest to arrive."""
    here = [request for request in running if request.shard == shard]
    return min(here, key=lambda request: (request.priority, -request.id), default=None)
