"""The engine for asyncio: its loop in a thread of its own, news as asynchronous streams."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, TypeVar

from deepinfer_jax.arrival import Arrival, Receiver
from deepinfer_jax.engine import Engine
from deepinfer_jax.handover import Handover
from deepinfer_jax.request import Output, Request

_Result = TypeVar("_Result")
_Order = tuple[Callable[[], None], Callable[[BaseException], None]]
_Stream = tuple[asyncio.AbstractEventLoop, "asyncio.Queue[Output | BaseException]"]


class EngineClosedError(RuntimeError):
    """The engine was closed, or its loop failed, before the request ended."""


class AsyncEngine:
    """Owns an engine and the thread that turns its loop.

    Use as a context manager, or close it. Every method may be called from any thread.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._orders: collections.deque[_Order] = collections.deque()
        self._lock = threading.Lock()
        self._streams: dict[int, tuple[_Stream, set[int]]] = {}
        self._wake, self._closing = threading.Event(), False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        """End the loop and the engine. Requests that still run end with :class:`EngineClosedError`."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    @property
    def receiver(self) -> Receiver:
        """Opens snapshots for this engine, in any thread."""
        return self._engine.receiver

    async def call(self, function: Callable[[Engine], _Result]) -> _Result:
        """What ``function`` returns or raises for the engine, called between two steps.

        Raises:
          EngineClosedError: the engine ended first.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Result] = loop.create_future()

        def order() -> None:
            try:
                _call(loop, _succeed, answer, function(self._engine))
            except Exception as error:
                _call(loop, _fail, answer, error)

        self._order(order, lambda error: _call(loop, _fail, answer, error))
        return await answer

    async def stream(
        self,
        request: Request,
        submitted_as: Callable[[int], None] = lambda number: None,
        *,
        arrival: Arrival | None = None,
        handover: Handover | None = None,
        encoder_only: bool = False,
    ) -> AsyncGenerator[Output, None]:
        """News of a request as they come, of all branches. Leaving the stream early aborts the request.

        Args:
          request: what is asked for.
          submitted_as: told the request's number in the engine once it is queued.
          arrival, handover, encoder_only: see :meth:`deepinfer_jax.engine.Engine.submit`.

        Raises:
          InputError: the request cannot be served.
          OverloadError: too many requests wait.
          EngineClosedError: the engine ended first.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Output | BaseException] = asyncio.Queue()
        submitted: asyncio.Future[int] = loop.create_future()
        submit = functools.partial(
            self._engine.submit, request, arrival=arrival, handover=handover, encoder_only=encoder_only
        )
        self._order(
            lambda: self._submit(submit, request.params.n, (loop, queue), submitted),
            lambda error: _call(loop, _fail, submitted, error),
        )
        open_branches = request.params.n
        try:
            submitted_as(await asyncio.shield(submitted))
            while open_branches:
                output = await queue.get()
                if isinstance(output, BaseException):
                    raise output
                open_branches -= output.finish_reason is not None
                yield output
        finally:
            if open_branches:
                # The engine may learn of the request after the caller has gone.
                submitted.add_done_callback(self._abort_submitted)

    def abort(self, number: int) -> None:
        """End a request between two steps, with last news to its stream; one that has ended stays as it is."""
        with contextlib.suppress(EngineClosedError):
            self._order(lambda: self._engine.abort(number), lambda error: None)

    async def trace(self, directory: Path, steps: int) -> None:
        """Have the next steps profiled; see :meth:`deepinfer_jax.engine.Engine.trace`.

        Raises:
          InputError: fewer steps than one, or the trace before has not ended.
          EngineClosedError: the engine is closed.
        """
        await self.call(lambda engine: engine.trace(directory, steps))

    def _abort_submitted(self, submitted: asyncio.Future[int]) -> None:
        if not submitted.cancelled() and submitted.exception() is None:
            self.abort(submitted.result())

    def _order(self, order: Callable[[], None], refuse: Callable[[BaseException], None]) -> None:
        """Have something done between two steps; ``refuse`` is called instead if the engine ends before."""
        with self._lock:
            if self._closing:
                raise EngineClosedError("the engine is closed") from self._failure
            self._orders.append((order, refuse))
        self._wake.set()

    def _submit(
        self, submit: Callable[[], int], branches: int, stream: _Stream, submitted: asyncio.Future[int]
    ) -> None:
        loop, _ = stream
        try:
            number = submit()
        except Exception as error:
            _call(loop, _fail, submitted, error)
            return
        self._streams[number] = (stream, set(range(branches)))
        _call(loop, _succeed, submitted, number)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.clear()
                while self._orders:
                    order, _ = self._orders.popleft()
                    order()
                if self._engine.busy:
                    self._deliver(self._engine.step())
                else:
                    self._wake.wait()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            with self._lock:
                self._closing = True
            self._engine.close()
            ended = EngineClosedError("the engine ended before the request")
            ended.__cause__ = self._failure
            for _, refuse in self._orders:
                refuse(ended)
            for (loop, queue), _ in self._streams.values():
                _call(loop, queue.put_nowait, ended)

    def _deliver(self, news: list[Output]) -> None:
        for output in news:
            (loop, queue), open_branches = self._streams[output.request_id]
            _call(loop, queue.put_nowait, output)
            if output.finish_reason is not None:
                open_branches.discard(output.branch)
                if not open_branches:
                    del self._streams[output.request_id]


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any) -> None:
    """Call in an event loop from another thread; a loop that has closed has nobody waiting."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)


def _succeed(future: asyncio.Future[_Result], result: _Result) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
