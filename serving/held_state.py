"""A request's state on the worker that computed it: sealed sections, made as soon as the engine gives pages away.

Sealing runs in threads, once for each section, however often it is pulled. Everything else is for one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, Protocol, runtime_checkable

from deepinfer_jax.cache.records import StateFormat
from deepinfer_jax.cache.snapshot import META
from deepinfer_jax.handover import Handover
from serving.errors import ServingError, refusal
from serving.kv_sections import StatePlan
from serving.leases import RELEASED
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvEndpoint

_log = logging.getLogger("serving.kv")

# So that the first pages of a prompt that a cache has are read and checked while later ones are sealed, and an end is
# noticed soon.
_BLOCKS_AT_ONCE = 8


@runtime_checkable
class SectionStorage(Protocol):
    """Where the sections of one state are kept. May be used from several threads."""

    @property
    def endpoint(self) -> KvEndpoint | None:
        """Where a receiver finds them without a call; None if it does not."""

    def put(self, sections: Mapping[str, bytes]) -> None:
        """Keep the next sections, in the order of the plan; without effect once it is closed."""

    def get(self, name: str) -> bytes | None:
        """A section that was put; None if it was not, or the storage is closed."""

    def close(self) -> None:
        """Give everything back."""


class HeapStorage:
    """Sections in this process's memory."""

    def __init__(self) -> None:
        self._sections: dict[str, bytes] = {}
        self._closed = False

    @property
    def endpoint(self) -> KvEndpoint | None:
        """None: other processes cannot look here."""
        return None

    def put(self, sections: Mapping[str, bytes]) -> None:
        if not self._closed:
            self._sections |= sections

    def get(self, name: str) -> bytes | None:
        return self._sections.get(name)

    def close(self) -> None:
        self._closed, self._sections = True, {}


class HeldState:
    """One held state; give :attr:`handover` to the engine.

    Attributes:
        handover: where the engine puts what it computes.
        plan: the sections there will be.
        complete_pages: blocks whose pages are sealed.
        complete: whether all sections are.
        ended: why it ended, and nothing is here any more; None while it is held.
    """

    def __init__(self, form: StateFormat, plan: StatePlan, storage: SectionStorage, sealer: Executor) -> None:
        """Must be called in the event loop that will use it.

        Args:
          form: how the state is cut into records.
          plan: of the state.
          storage: which is closed with the state.
          sealer: runs the sealing.
        """
        self._loop = asyncio.get_running_loop()
        self._storage, self._sealer = storage, sealer
        # Readers have nothing to do before sections are made of what the engine gives.
        self._given, self._pulse = asyncio.Event(), asyncio.Event()
        self.handover = Handover(form, self._from_engine)
        self.plan = plan
        self.complete_pages, self.complete = 0, False
        self.ended: str | None = None
        self._sealing = self._loop.create_task(self._seal())

    @property
    def endpoint(self) -> KvEndpoint | None:
        """Where it can be had beside a Pull."""
        return self._storage.endpoint

    @property
    def computed_tokens(self) -> int:
        """Tokens whose sections are there."""
        tokens = self.complete_pages * self.handover.form.layout.block_tokens
        return self.plan.computed if self.complete else min(self.plan.computed, tokens)

    @property
    def received(self) -> bool:
        """Whether it was given back once it was computed: a receiver may have all of it before that is known here."""
        return self.handover.meta is not None and self.ended == RELEASED

    def computed_at(self) -> float | None:
        """When the last token was computed, by ``time.monotonic``; None before."""
        return self.handover.computed_at

    def section(self, name: str) -> bytes | None:
        """A section of the plan; None while it is not there.

        Raises:
          StateError: the state has ended.
        """
        if self.ended is not None:
            raise expired(self.ended)
        return self._storage.get(name)

    def changed(self) -> Coroutine[Any, Any, bool]:
        """Waits until there is more than at this call, or an end."""
        return self._pulse.wait()

    def end(self, reason: str) -> None:
        """Give everything back; without effect where it has ended."""
        if self.ended is not None:
            return
        self.ended = reason
        self._sealing.cancel()
        self._storage.close()
        self._changed()

    def _from_engine(self) -> None:
        # A loop that has closed holds no state.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._given.set)

    def _changed(self) -> None:
        pulse, self._pulse = self._pulse, asyncio.Event()
        pulse.set()

    async def _seal(self) -> None:
        try:
            while not self.complete:
                self._given.clear()
                # In this order: where the first is there, the second will not grow.
                meta, ready = self.handover.meta, self.handover.ready
                if meta is not None and ready - self.complete_pages <= _BLOCKS_AT_ONCE:
                    # At once, as somebody waits for it.
                    await self._loop.run_in_executor(self._sealer, self._seal_end, self.complete_pages, ready)
                    self.complete_pages, self.complete = ready, True
                elif self.complete_pages < ready:
                    stop = min(ready, self.complete_pages + _BLOCKS_AT_ONCE)
                    await self._loop.run_in_executor(self._sealer, self._seal_pages, self.complete_pages, stop)
                    self.complete_pages = stop
                elif self.handover.failure is not None:
                    return
                else:
                    await self._given.wait()
                    continue
                self._changed()
        except Exception:
            _log.exception("sealing a state failed")
            self.end("its sections could not be made")

    def _seal_pages(self, first: int, stop: int) -> None:
        self._storage.put(self.handover.pages(first, stop))
        self.handover.forget(first, stop)

    def _seal_end(self, first: int, stop: int) -> None:
        if first < stop:
            self._seal_pages(first, stop)
        rest = self.handover.rest()
        self._storage.put({name: rest[name] for name in (*(name for name in rest if name != META), META)})
        self.handover.forget_rest()


def expired(reason: str) -> ServingError:
    """The refusal of a state that is not held any more."""
    return refusal("KV_EXPIRED", f"the state is not here: {reason}")
