"""Ways by which a receiver fetches a held state, and the choice between them.

A handle lists endpoints, best first. The first one that a transport of this process reaches is used; where it fails
without saying that the state is gone, the next one is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar, runtime_checkable

from deepinfer_jax.cache.snapshot import Snapshot
from deepinfer_jax.errors import SnapshotError
from serving.errors import ServingError, StateError, refusal
from serving.kv_sections import StatePlan
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvEndpoint, KvHandle

_Opened = TypeVar("_Opened")


class TransferProgress:
    """How far one transfer is; transports tell it, others look.

    Attributes:
        received: bytes so far.
        begun: when it began, in seconds of the clock.
        computed_at: when the last token was computed, by the same clock; None where the sender has not said so.
        sender_computed_at: the same by the clock of the sender's host.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, arrived: Callable[[Snapshot], None] = lambda sections: None
    ) -> None:
        """``clock``: seconds, steady; ``arrived``: is given sections as they are whole, before the transfer ends."""
        self._clock, self._arrived = clock, arrived
        self.begun = clock()
        self.received = 0
        self._ended: float | None = None
        self.computed_at: float | None = None
        self.sender_computed_at: float | None = None
        self._arrivals: list[tuple[float, int]] = []

    def add(self, size: int, sections: Snapshot = MappingProxyType({})) -> None:
        """Note that so many bytes came, and the sections that are whole with them."""
        if sections:
            self._arrived(sections)
        self.received += size
        self._arrivals.append((self._clock(), size))

    def computed(self, ago: float, at: float) -> None:
        """Note the word that the last token was computed so many seconds ago, by the sender's clock ``at``."""
        self.sender_computed_at, here = at, self._clock() - ago
        # Every word is late; the one that is least late counts.
        self.computed_at = here if self.computed_at is None else min(here, self.computed_at)

    def restart(self) -> None:
        """Note that everything comes again, by another transport."""
        self.received, self._arrivals = 0, []

    def end(self) -> None:
        """Note that the state is here, and checked; the word when it was computed may come later."""
        self._ended = self._clock()

    def seconds(self) -> tuple[float, float | None]:
        """Until its end, or now: since it began, and since the last token was computed or it began, what is later.

        The second is None where it is not known.
        """
        now = self._clock() if self._ended is None else self._ended
        return now - self.begun, None if self.computed_at is None else now - max(self.begun, self.computed_at)

    @property
    def exposed_bytes(self) -> int:
        """Those that came later than the last token was computed; 0 where that is not known."""
        at = self.computed_at
        return 0 if at is None else sum(size for arrived, size in self._arrivals if arrived > at)


@runtime_checkable
class KvTransport(Protocol):
    """One way to fetch states."""

    name: str
    """As receipts call it."""

    def reaches(self, endpoint: KvEndpoint) -> bool:
        """Whether it is this transport's, and can be reached from here."""

    async def fetch(
        self, handle: KvHandle, endpoint: KvEndpoint, plan: StatePlan, *, deadline: float, progress: TransferProgress
    ) -> Snapshot:
        """All sections of a state, which may still be computed. Cancelling it gives everything back.

        Args:
          handle: of the state.
          endpoint: one of its, which is reached.
          plan: the sections that are expected.
          deadline: by the event loop's clock; the caller ends the wait then.
          progress: is told how far it is.

        Raises:
          StateError: the state is gone, or arrives damaged.
          TransportError: this way does not work, whatever the state is.
          ServingError: the holder refuses.
        """

    async def close(self) -> None:
        """Give connections back."""


class TransportError(StateError):
    """A transport that gave up; another one may do."""

    def __init__(self, reason: str, message: str) -> None:
        error = refusal(reason, message)
        super().__init__(error.code, error.message, error.reason)


@dataclasses.dataclass(frozen=True)
class Fetched(Generic[_Opened]):
    """A state that arrived: what opening it gave, which transport brought it, and how."""

    opened: _Opened
    transport: str
    progress: TransferProgress


class KvFetcher:
    """Fetches states by the best way that both ends have."""

    def __init__(self, transports: Sequence[KvTransport]) -> None:
        """``transports``: at most one is asked for an endpoint, the first that reaches it."""
        self._transports = tuple(transports)

    async def fetch(
        self,
        handle: KvHandle,
        plan: StatePlan,
        opener: Callable[[Snapshot], Awaitable[_Opened]],
        *,
        seconds: float,
        progress: TransferProgress | None = None,
    ) -> Fetched[_Opened]:
        """Fetch and open a state.

        Args:
          handle: of the state.
          plan: what it must consist of.
          opener: checks it and gives what the caller wants of it; raises ``SnapshotError`` where it is damaged.
          seconds: until the deadline.
          progress: is told how far it is.

        Raises:
          StateError: the state cannot be had: KV_EXPIRED, KV_LAYOUT_MISMATCH, KV_DAMAGED.
          DeadlineError: not before the deadline.
        """
        progress, deadline = progress or TransferProgress(), asyncio.get_running_loop().time() + seconds
        ways = [
            (transport, endpoint)
            for endpoint in handle.endpoints
            for transport in [one for one in self._transports if one.reaches(endpoint)][:1]
        ]
        failure: ServingError = refusal("KV_EXPIRED", "no endpoint of the state can be reached from here")
        try:
            async with asyncio.timeout_at(deadline):
                for transport, endpoint in ways:
                    progress.restart()
                    try:
                        snapshot = await transport.fetch(handle, endpoint, plan, deadline=deadline, progress=progress)
                        return Fetched(await opener(snapshot), transport.name, progress)
                    except TransportError as error:
                        failure = error
                    except SnapshotError as error:
                        failure = refusal("KV_DAMAGED", str(error), field=error.key)
        except TimeoutError as error:
            raise refusal("DEADLINE_PASSED", "the deadline passed before the state was here") from error
        raise failure

    async def close(self) -> None:
        """Give all connections back."""
        for transport in self._transports:
            await transport.close()
