"""A server of the protocol: its port, health, reflection, and the order in which it goes down."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from serving.call_guard import CallGuard
from serving.channels import Options, server_options
from serving.listener import Listener

STOP_SECONDS = 0.5
"""Given to calls that are refused at the end, so that their statuses reach the callers."""


@dataclasses.dataclass(frozen=True)
class Service:
    """One service of a server.

    Attributes:
        name: full name, ``deepinfer.v1.Inference``.
        servicer: its handlers, which take a request and a ``ServedCall``.
        add: the generated function that adds them to a server.
        starting: names of the methods that begin new work, which a draining server refuses.
    """

    name: str
    servicer: Any
    add: Callable[[Any, grpc.aio.Server], None]
    starting: tuple[str, ...] = ()


class Server:
    """Services on one port. It is not healthy until :meth:`ready`, and ends by :meth:`stop`."""

    def __init__(
        self,
        services: Iterable[Service],
        *,
        worker: str = "",
        reflection_enabled: bool = True,
        options: Options | None = None,
    ) -> None:
        """Must be called in the event loop that will run it.

        Args:
          services: what it serves.
          worker: its name, for details of errors.
          reflection_enabled: whether clients without the protocol's definitions can ask for them.
          options: of gRPC; None takes those for tokens.
        """
        self._services, self._reflection_enabled = tuple(services), reflection_enabled
        self._options = server_options() if options is None else options
        self._names = tuple(service.name for service in self._services)
        starting = {f"/{service.name}/{method}" for service in self._services for method in service.starting}
        self.guard = CallGuard(worker, frozenset(starting))
        self._health = health.aio.HealthServicer()
        self._listener = Listener(self._make)

    async def start(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listen; calls are taken from now on, though health says NOT_SERVING.

        Args:
          address: ``HOST:PORT``, where port 0 takes a free one, or ``unix:PATH``.
          credentials: for TLS; None is plain text.

        Returns:
          The port.

        Raises:
          RuntimeError: the address cannot be had.
        """
        await self._say(health_pb2.HealthCheckResponse.NOT_SERVING)
        return await self._listener.start(address, credentials)

    async def ready(self) -> None:
        """Tell health checks that work is welcome."""
        await self._say(health_pb2.HealthCheckResponse.SERVING)

    async def stop(
        self,
        grace: float,
        settled: Callable[[], Awaitable[None]] | None = None,
        at_once: asyncio.Event | None = None,
    ) -> None:
        """Go down: unhealthy first, then no new work, then the end of what runs or of ``grace`` seconds.

        Args:
          grace: what runs then is refused.
          settled: waits for what is to be done besides, while calls that end old work are still taken.
          at_once: ends the grace once it is set.
        """
        await self._health.enter_graceful_shutdown()
        self.guard.drain()
        ending = asyncio.create_task(self._ended(settled))
        hurried = asyncio.create_task((at_once or asyncio.Event()).wait())
        try:
            done, _ = await asyncio.wait((ending, hurried), timeout=grace, return_when=asyncio.FIRST_COMPLETED)
            if ending in done:
                await ending
        finally:
            ending.cancel()
            hurried.cancel()
            self.guard.end()
            await self._listener.stop(STOP_SECONDS)

    def _make(self) -> grpc.aio.Server:
        server = grpc.aio.server(interceptors=(self.guard,), options=self._options)
        for service in self._services:
            service.add(service.servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._reflection_enabled:
            names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        return server

    async def _ended(self, settled: Callable[[], Awaitable[None]] | None) -> None:
        await self.guard.idle()
        if settled is not None:
            await settled()

    async def _say(self, status: Any) -> None:
        for name in ("", *self._names):
            await self._health.set(name, status)
