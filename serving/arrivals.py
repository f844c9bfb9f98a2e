"""States on their way into this process's engine: fetched, checked, opened, and given back where they were held."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

from deepinfer_jax.arrival import Arrival, Receiver
from deepinfer_jax.errors import ConfigError, OverloadError
from deepinfer_jax.replay import Replay
from serving.early_opening import EarlyOpening
from serving.errors import bad_field, refusal
from serving.events import ServedReceipt
from serving.generate_call import GenerateCall
from serving.kv_sections import StatePlan
from serving.kv_transport import Fetched, KvFetcher, TransferProgress
from serving.proto.deepinfer.v1 import types_pb2
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvHandle

DEFAULT_MOST_BYTES = 4 << 30


class Arrived:
    """A state that is here.

    Attributes:
        arrival: what the engine takes.
        answer: the tokens that were sampled behind it, which whoever has the handle knows.
        inserted: to be called once the engine has written the state to the device, and perhaps again.
    """

    def __init__(self, handle: KvHandle, fetched: Fetched[Arrival], inserted: Callable[[], None]) -> None:
        self.inserted = inserted
        meta, progress = fetched.opened.meta, fetched.progress
        self.arrival, self.answer = fetched.opened, meta.tokens[meta.prompt_length :]
        self._worker, self._transport = handle.worker, fetched.transport
        self._progress = progress
        progress.end()

    def sign(self, receipt: ServedReceipt) -> ServedReceipt:
        """A receipt that tells of the hand-over."""
        transfer, exposed = self._progress.seconds()
        timing = dataclasses.replace(receipt.timing, transfer=transfer, exposed_transfer=exposed)
        return dataclasses.replace(
            receipt,
            prefill_worker=self._worker,
            handed_over_bytes=self._progress.received,
            exposed_bytes=self._progress.exposed_bytes,
            transport=self._transport,
            timing=timing,
        )


class Arrivals:
    """Brings states to one engine. For one event loop.

    Attributes:
        bytes: of the states that are fetched or wait for the engine, at most.
    """

    def __init__(
        self,
        receiver: Receiver,
        replay: Replay,
        fetcher: KvFetcher,
        release: Callable[[KvHandle], Coroutine[Any, Any, None]],
        opener: Executor,
        most_bytes: int = DEFAULT_MOST_BYTES,
    ) -> None:
        """Bring states to an engine.

        Args:
          receiver: the engine's.
          replay: the engine's settings of it.
          fetcher: fetches states.
          release: gives one back where it is held; raises nothing.
          opener: runs their checks.
          most_bytes: of states that are fetched or wait for the engine; more are refused.
        """
        if most_bytes <= 0:
            raise ConfigError("arrivals.most_bytes", most_bytes, "above 0")
        self._receiver, self._replay, self._fetcher = receiver, replay, fetcher
        self._release, self._opener, self._most_bytes = release, opener, most_bytes
        self._fetching: set[tuple[int, TransferProgress]] = set()
        self._releasing: set[asyncio.Task[None]] = set()
        self.bytes = 0

    @property
    def backlog(self) -> int:
        """Bytes that are still to come, at most."""
        return sum(max(0, size - progress.received) for size, progress in self._fetching)

    @contextlib.asynccontextmanager
    async def receive(self, asked: GenerateCall, seconds: float) -> AsyncIterator[Arrived]:
        """The state of a call that has a handle; leave the context with the call.

        It is given back where it was held once it was inserted, and when the context is left before, however that
        happens; but not where this process has too much to do, as another one may take it then.

        Args:
          asked: the call.
          seconds: until its deadline.

        Raises:
          InvalidRequestError: the handle is not of this prompt.
          OverloadedError: too many states are on their way.
          StateError, DeadlineError: see :meth:`serving.kv_transport.KvFetcher.fetch`.
        """
        handle = asked.kv
        assert handle is not None
        plan = await asyncio.get_running_loop().run_in_executor(
            self._opener, StatePlan.of, self._receiver.form, self._computed(asked, handle), len(asked.prompt) + 1
        )
        self._take_room(plan.most_bytes)
        ended = False

        def end(*, released: bool = True) -> None:
            nonlocal ended
            if not ended:
                ended = True
                self.bytes -= plan.most_bytes
                if released:
                    self._give_back(handle)

        try:
            yield Arrived(handle, await self._fetch(asked, handle, plan, seconds), end)
        except OverloadError:
            # The engine's, which has not taken the state.
            end(released=False)
            raise
        finally:
            end()

    async def close(self) -> None:
        """Wait until everything is given back, and end the connections."""
        if self._releasing:
            await asyncio.wait(self._releasing)
        await self._fetcher.close()

    def _computed(self, asked: GenerateCall, handle: KvHandle) -> int:
        """Tokens whose state is needed."""
        if handle.fingerprint != self._receiver.form.fingerprint.hex():
            accepted = f"{self._receiver.form.fingerprint.hex()}; weights, configuration and page size must agree"
            raise bad_field("kv.fingerprint", handle.fingerprint, accepted, "KV_LAYOUT_MISMATCH")
        if asked.answer:
            raise bad_field("prompt_len", len(asked.prompt), "absent, as the state is the prompt's")
        length = len(asked.prompt)
        if handle.mode == types_pb2.PREFILL_MODE_ENCODER_ONLY:
            length = self._replay.decoder_floor(length)
        if not length or handle.computed_tokens != length:
            accepted = f"{length}, of a prompt of {len(asked.prompt)} tokens"
            raise bad_field("kv.computed_tokens", handle.computed_tokens, accepted, "KV_LAYOUT_MISMATCH")
        return length

    def _take_room(self, size: int) -> None:
        if self.bytes + size > self._most_bytes:
            accepted = f"{self._most_bytes} bytes of states on their way"
            message = f"{self.bytes} bytes of states are on their way; {size} more are too many"
            raise refusal("KV_POOL_EXHAUSTED", message, accepted=accepted)
        self.bytes += size

    async def _fetch(self, asked: GenerateCall, handle: KvHandle, plan: StatePlan, seconds: float) -> Fetched[Arrival]:
        opening = EarlyOpening(self._receiver.opening(plan.computed), self._opener)
        progress = TransferProgress(arrived=opening.take)
        entry = plan.most_bytes, progress
        self._fetching.add(entry)
        try:
            fetched = await self._fetcher.fetch(
                handle,
                plan,
                opening.finish,
                seconds=seconds,
                progress=progress,
            )
        finally:
            opening.close()
            self._fetching.discard(entry)
        meta = fetched.opened.meta
        if asked.first_token is not None and meta.tokens[meta.prompt_length :] != (asked.first_token,):
            raise bad_field("first_token", asked.first_token, "the token that was sampled behind the state")
        return fetched

    def _give_back(self, handle: KvHandle) -> None:
        task = asyncio.create_task(self._release(handle))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)
