"""Sections of held states on offer to the transfer engines of other processes: few at a time, and not for long."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterable

import jax

from deepinfer_jax.errors import ConfigError
from serving.errors import bad_field
from serving.held_state import HeldState
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvOffered
from serving.transfer_engine import TransferEngine


@dataclasses.dataclass(frozen=True)
class OfferSettings:
    """How sections are offered.

    Attributes:
        batch_bytes: about the bytes of an offer; one section at least.
        most: offers at a time, over all receivers; further ones wait.
        seconds: after which an offer that nobody took is withdrawn.
        patience: seconds that a call waits for sections that are not there yet.
    """

    batch_bytes: int = 4 << 20
    most: int = 16
    seconds: float = 10.0
    patience: float = 1.0

    def __post_init__(self) -> None:
        for name in ("batch_bytes", "most", "seconds", "patience"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"offers.{name}", getattr(self, name), "above 0")


class Offers:
    """What one worker offers. For one event loop.

    Every offer ends: when its receiver says that it was taken, with its state, or after some seconds.
    """

    def __init__(self, engine: TransferEngine, settings: OfferSettings | None = None) -> None:
        """``engine``: is closed by whoever made it."""
        self._engine, self._settings = engine, settings or OfferSettings()
        self._places = asyncio.Semaphore(self._settings.most)
        self._open: dict[int, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def offer(self, state: HeldState, first: int) -> KvOffered:
        """Offer whole sections of a state from a place on; none where there are none yet.

        Raises:
          InvalidRequestError: a state of this plan has no such section.
          StateError: the state has ended.
        """
        sections = state.plan.sections
        if first > len(sections):
            raise bad_field("first", first, f"0 to {len(sections)}")
        if first == len(sections):
            return KvOffered()
        await self._some(state, first)
        try:
            async with asyncio.timeout(self._settings.patience):
                await self._places.acquire()
        except TimeoutError:
            return KvOffered()
        number = None
        try:
            batch = await asyncio.to_thread(self._put, state, first)
            # The state may have ended meanwhile.
            state.section(sections[first].name)
            if batch is None:
                return KvOffered()
            sizes, content = batch
            number = self._engine.offer(content, self._settings.seconds)
        finally:
            if number is None:
                self._places.release()
        self._open[number] = asyncio.create_task(self._withdraw(number, state))
        return KvOffered(number=number, section_bytes=sizes)

    def taken(self, numbers: Iterable[int]) -> None:
        """Forget offers that were pulled, which the engine has let go."""
        for number in numbers:
            task = self._open.pop(number, None)
            if task is not None:
                task.cancel()
                self._places.release()

    async def close(self) -> None:
        """Withdraw everything."""
        tasks, numbers = list(self._open.values()), list(self._open)
        self.taken(numbers)
        await asyncio.gather(*tasks, return_exceptions=True)
        for number in numbers:
            self._engine.withdraw(number)

    async def _some(self, state: HeldState, first: int) -> None:
        """Wait until a section is there, if that is soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.patience):
                while state.section(state.plan.sections[first].name) is None:
                    await state.changed()

    def _put(self, state: HeldState, first: int) -> tuple[list[int], jax.Array] | None:
        """The sizes of the next sections, and all of them on the device; None if there are none. Runs in a thread."""
        contents, size = list[bytes](), 0
        for section in state.plan.sections[first:]:
            content = state.section(section.name)
            if content is None or (contents and size + len(content) > self._settings.batch_bytes):
                break
            contents.append(content)
            size += len(content)
        return (list(map(len, contents)), self._engine.put(b"".join(contents))) if contents else None

    async def _withdraw(self, number: int, state: HeldState) -> None:
        """End an offer with its state or its time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.seconds):
                while state.ended is None:
                    await state.changed()
        del self._open[number]
        self._places.release()
        self._engine.withdraw(number)
