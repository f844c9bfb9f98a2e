"""The table of held states: who may have which, until when, and how much memory they may take together."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from deepinfer_jax.errors import ConfigError
from serving.errors import refusal

DEFAULT_LEASE_SECONDS = 45.0
RELEASED = "released"
"""Why a state ended that was given back."""


@runtime_checkable
class Holding(Protocol):
    """What is held. ``end`` is called once, with the reason, and gives everything back."""

    def end(self, reason: str) -> None: ...


_State = TypeVar("_State", bound=Holding)


@dataclasses.dataclass
class Lease(Generic[_State]):
    """One held state.

    Attributes:
        state: what is held.
        tokens, bytes: its size; bytes are the most there can be until it is complete.
        expires: by the table's clock; None while the state is computed, which the caller's deadline bounds.
    """

    state: _State
    tokens: int
    bytes: int
    expires: float | None = None


@dataclasses.dataclass
class LeaseCounts:
    """What became of leases: ended by ``ReleaseKv``, by time, and otherwise; and calls for unknown ids."""

    opened: int = 0
    refused: int = 0
    released: int = 0
    expired: int = 0
    dropped: int = 0
    unknown: int = 0


class Leases(Generic[_State]):
    """Holds states while they are computed and under a lease afterwards. For one thread.

    Every state that is opened is ended once: by :meth:`release`, :meth:`drop`, or by :meth:`sweep` when its lease has
    passed. Nothing is found behind its end, whether it was swept or not.
    """

    def __init__(
        self,
        *,
        seconds: float = DEFAULT_LEASE_SECONDS,
        most_bytes: int,
        most_states: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an empty table.

        Args:
          seconds: of a lease.
          most_bytes, most_states: that are held together.
          clock: seconds, steady.
        """
        for name, value in (("seconds", seconds), ("most_bytes", most_bytes), ("most_states", most_states)):
            if not value > 0:
                raise ConfigError(f"leases.{name}", value, "above 0")
        self.seconds, self.most_bytes, self.most_states = seconds, most_bytes, most_states
        self._clock = clock
        self._leases: dict[str, Lease[_State]] = {}
        self.counts = LeaseCounts()
        self.bytes = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, make: Callable[[], _State], *, tokens: int, size: int) -> str:
        """Hold a new state while it is computed. Returns its id, which nobody can guess.

        Args:
          make: makes it, once it is clear that there is room; what it raises leaves the table as it was.
          tokens: whose state it is.
          size: most bytes of it.

        Raises:
          OverloadedError: there is no room.
        """
        self.sweep()
        if len(self._leases) >= self.most_states or self.bytes + size > self.most_bytes:
            self.counts.refused += 1
            found = f"{len(self._leases)} states of {self.bytes} bytes are held; {size} more are too many"
            accepted = f"{self.most_states} states of {self.most_bytes} bytes"
            raise refusal("KV_POOL_EXHAUSTED", f"{found}; accepted: {accepted}", accepted=accepted)
        kv_id = secrets.token_hex(16)
        self._leases[kv_id] = Lease(make(), tokens, size)
        self.bytes += size
        self.tokens += tokens
        self.counts.opened += 1
        return kv_id

    def complete(self, kv_id: str, size: int) -> float | None:
        """Begin the lease of a state that is computed, of ``size`` bytes. Returns its seconds; None if it has ended."""
        lease = self._find(kv_id)
        if lease is None:
            return None
        self.bytes += size - lease.bytes
        lease.bytes = size
        lease.expires = self._clock() + self.seconds
        return self.seconds

    def find(self, kv_id: str) -> _State | None:
        """A held state, its lease renewed; None, counted, where there is none of this id or no longer."""
        if not self.renew(kv_id):
            self.counts.unknown += 1
            return None
        return self._leases[kv_id].state

    def renew(self, kv_id: str) -> bool:
        """Let the lease of a state begin anew. Returns whether it is held."""
        lease = self._find(kv_id)
        if lease is not None and lease.expires is not None:
            lease.expires = self._clock() + self.seconds
        return lease is not None

    def release(self, kv_id: str) -> bool:
        """End a state because its receiver has it. Returns whether it was held; an unknown one is counted."""
        if self._find(kv_id) is None:
            self.counts.unknown += 1
            return False
        self.counts.released += 1
        self._end(kv_id, RELEASED)
        return True

    def drop(self, kv_id: str, reason: str) -> None:
        """End a state because it will never be complete or of use; without effect where it has ended."""
        if self._find(kv_id) is not None:
            self.counts.dropped += 1
            self._end(kv_id, reason)

    def drop_all(self, reason: str) -> None:
        """End all states."""
        for kv_id in list(self._leases):
            self.drop(kv_id, reason)

    def sweep(self) -> float | None:
        """End states whose lease has passed. Returns seconds until the next one could; None while there is none."""
        now = self._clock()
        for kv_id, lease in list(self._leases.items()):
            if lease.expires is not None and lease.expires <= now:
                self._expire(kv_id)
        ends = [lease.expires for lease in self._leases.values() if lease.expires is not None]
        return min(ends) - now if ends else None

    def _find(self, kv_id: str) -> Lease[_State] | None:
        lease = self._leases.get(kv_id)
        if lease is not None and lease.expires is not None and lease.expires <= self._clock():
            self._expire(kv_id)
            return None
        return lease

    def _expire(self, kv_id: str) -> None:
        self.counts.expired += 1
        self._end(kv_id, "its lease has expired")

    def _end(self, kv_id: str, reason: str) -> None:
        lease = self._leases.pop(kv_id)
        self.bytes -= lease.bytes
        self.tokens -= lease.tokens
        lease.state.end(reason)


_SWEEP_SECONDS = 1.0


async def keep_swept(leases: Leases[Any]) -> None:
    """End leases in time though nobody calls; never returns."""
    while True:
        left = leases.sweep()
        # A lease that begins meanwhile lasts longer than this, or ends a little late.
        await asyncio.sleep(_SWEEP_SECONDS if left is None else min(left, _SWEEP_SECONDS))
