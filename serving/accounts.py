"""What a gateway knows of a worker's load between two times that the worker said it: its word, and what came since.

Several gateways may send requests to one worker, so its own word counts. It is as old as the last question, and many
requests fit between two of those; what this gateway has placed and seen ending since is therefore added to it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable

from serving.placement import DecodeLoad, DecodeShard, PrefillLoad
from serving.proto.deepinfer.v1.inference_pb2 import Load


@dataclasses.dataclass(eq=False)
class Reservation:
    """What a request will occupy on a worker, from its placement to its end.

    Attributes:
        prompt_tokens: that the worker computes there; fewer once it is known what its caches hold.
        tokens: prompt and answer.
        begun, ended: when, by the account's clock.
    """

    prompt_tokens: int
    tokens: int
    begun: float
    ended: float | None = None


class Account:
    """The load of one worker. Not for several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds, steady."""
        self._clock = clock
        self._said = Load()
        self._asked = clock()
        self._open: list[Reservation] = []
        self._ended: list[Reservation] = []

    @property
    def open_requests(self) -> int:
        """Requests that were placed here and have not ended."""
        return len(self._open)

    @property
    def said(self) -> Load:
        """The worker's last word."""
        return self._said

    def reserve(self, prompt_tokens: int, tokens: int) -> Reservation:
        """Note that a request goes to the worker."""
        reservation = Reservation(prompt_tokens, tokens, self._clock())
        self._open.append(reservation)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Note that it has ended there; may be repeated."""
        if reservation.ended is None:
            reservation.ended = self._clock()
            self._open.remove(reservation)
            self._ended.append(reservation)

    def ask(self) -> float:
        """The time of a question, for :meth:`hear`."""
        return self._clock()

    def hear(self, load: Load, asked: float) -> None:
        """Take the worker's word about its load, in answer to a question."""
        self._said, self._asked = load, asked
        self._ended = [one for one in self._ended if one.ended is not None and one.ended > asked]

    def prefill_load(self, name: str, *, available: bool) -> PrefillLoad:
        """Its load with prompts; see :class:`PrefillLoad`."""
        said = self._said.queued_tokens + sum(shard.prefill_tokens for shard in self._said.shards)
        came = sum(one.prompt_tokens for one in self._came())
        went = sum(one.prompt_tokens for one in self._went())
        return PrefillLoad(name, max(0, said + came - went), available)

    def decode_load(self, name: str, page_tokens: int, *, available: bool) -> DecodeLoad:
        """Its load with answers; see :class:`DecodeLoad`. A worker that has not said its shards is not available."""
        shards = [
            DecodeShard(
                requests=shard.running_requests + shard.held_requests,
                slots=shard.slots,
                cache_tokens=shard.cache_tokens + shard.held_tokens,
                pages=shard.used_pages,
                all_pages=shard.pages,
            )
            for shard in self._said.shards
        ]
        waiting, waiting_tokens = self._said.queued_requests, self._said.queued_tokens
        for one in self._went():
            _take(shards, one.tokens, page_tokens)
        for one in self._came():
            if not waiting and _put(shards, one.tokens, page_tokens):
                continue
            waiting, waiting_tokens = waiting + 1, waiting_tokens + one.tokens
        none = (DecodeShard(0, 0, 0, 0, 0),)
        return DecodeLoad(name, tuple(shards) or none, waiting, waiting_tokens, page_tokens, available and bool(shards))

    def _came(self) -> Iterable[Reservation]:
        """Requests that the worker's word does not know of yet."""
        return [one for one in self._open if one.begun > self._asked]

    def _went(self) -> Iterable[Reservation]:
        """Requests that its word counts, and that have ended since."""
        return [one for one in self._ended if one.begun <= self._asked]


def _put(shards: list[DecodeShard], tokens: int, page_tokens: int) -> bool:
    """Put a request on the shard with the fewest, as its worker will; False where none has room."""
    pages = -(-tokens // page_tokens)
    fits = [
        number
        for number, shard in enumerate(shards)
        if shard.requests < shard.slots and shard.pages + pages <= shard.all_pages
    ]
    if not fits:
        return False
    place = min(fits, key=lambda number: shards[number].requests)
    shards[place] = _moved(shards[place], 1, tokens, pages)
    return True


def _take(shards: list[DecodeShard], tokens: int, page_tokens: int) -> None:
    """Take a request from the shard with the most: which one it was on is not known here."""
    if shards:
        place = max(range(len(shards)), key=lambda number: shards[number].requests)
        shards[place] = _moved(shards[place], -1, -tokens, tokens // -page_tokens)


def _moved(shard: DecodeShard, requests: int, tokens: int, pages: int) -> DecodeShard:
    return dataclasses.replace(
        shard,
        requests=max(0, shard.requests + requests),
        cache_tokens=max(0, shard.cache_tokens + tokens),
        pages=max(0, shard.pages + pages),
    )
