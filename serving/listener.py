"""The gRPC server behind an address, opened again where gRPC gives one up.

A call whose method is no UTF-8 ends the loop of ``grpc.aio`` that takes calls (seen with grpcio 1.85): what runs goes
on, but the address is closed for good, and nothing tells the process. One damaged byte would take a worker away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import grpc

from serving.addresses import UNIX, bound

_log = logging.getLogger("serving.listener")

_LOOK_SECONDS = 0.25
# So long a server that was given up may take to remove its socket, which must not be its successor's.
_REMOVAL_SECONDS = 2.0


class Listener:
    """One address, and the servers that take its calls, one after the other. For one event loop."""

    def __init__(self, make: Callable[[], grpc.aio.Server]) -> None:
        """``make``: a server with all its services, which was not started."""
        self._make = make
        self._server: grpc.aio.Server | None = None
        self._keeping: asyncio.Task[None] | None = None
        # Those that take no more calls and finish what they have.
        self._retiring: dict[asyncio.Task[None], grpc.aio.Server] = {}

    async def start(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Take calls. Returns the port.

        Args:
          address: ``HOST:PORT``, where port 0 takes a free one, or ``unix:PATH``.
          credentials: for TLS; None is plain text.

        Raises:
          RuntimeError: the address cannot be had.
        """
        port = await self._open(address, credentials)
        self._keeping = asyncio.create_task(self._keep(bound(address, port), credentials))
        return port

    async def stop(self, grace: float) -> None:
        """Take no more calls; cancel those that still run after so many seconds."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait((self._keeping,))
        retiring, last = tuple(self._retiring), () if self._server is None else (self._server,)
        await asyncio.gather(*(server.stop(grace) for server in (*last, *self._retiring.values())))
        # They see the same end. Cancelling one would cancel what gRPC itself waits for.
        await asyncio.gather(*retiring)

    async def _open(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        server = self._make()
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
        await server.start()
        self._server = server
        return port

    async def _keep(self, address: str, credentials: grpc.ServerCredentials | None) -> None:
        while True:
            server = self._server
            assert server is not None
            try:
                await server.wait_for_termination(timeout=_LOOK_SECONDS)
            except Exception as error:
                _log.error("gRPC has given the server up, another one listens: %s", error)
                task = asyncio.create_task(self._retire(server))
                self._retiring[task] = server
                task.add_done_callback(self._retiring.pop)
                await self._open_again(address, credentials)

    async def _open_again(self, address: str, credentials: grpc.ServerCredentials | None) -> None:
        if address.startswith(UNIX):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REMOVAL_SECONDS):
                    while Path(address.removeprefix(UNIX)).exists():
                        await asyncio.sleep(0.01)
        while True:
            try:
                await self._open(address, credentials)
                return
            except RuntimeError as error:
                _log.error("no server listens: %s", error)
                await asyncio.sleep(_LOOK_SECONDS)

    async def _retire(self, server: grpc.aio.Server) -> None:
        """Give a server's memory back once its calls have ended."""
        # What it was given up for is raised again.
        with contextlib.suppress(Exception):
            await server.wait_for_termination()
        await server.stop(None)
