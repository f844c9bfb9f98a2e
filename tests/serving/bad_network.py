"""A network between two processes that damages, cuts off or holds what passes: a proxy in a thread of its own."""

import asyncio
import contextlib
import dataclasses
import math
import random
import threading


class Fault:
    """What happens to bytes on their way; this one is none. One fault is for one use."""

    async def pass_on(self, passed, content):
        """What becomes of the next bytes of a connection, in one direction, that has ``passed`` so many before."""
        return content


class CutError(Exception):
    """The connection is gone."""


@dataclasses.dataclass
class Flips(Fault):
    """Every so many bytes, wherever they pass, one bit is turned, a number of times."""

    every: int
    times: float = math.inf
    seed: int = 0

    def __post_init__(self):
        self._random = random.Random(self.seed)
        self._left = self._distance()

    def _distance(self):
        return self._random.randint(self.every // 2, self.every)

    async def pass_on(self, passed, content):
        content, at = bytearray(content), 0
        while self.times and at + self._left < len(content):
            at += self._left
            content[at] ^= 1 << self._random.randrange(8)
            self.times -= 1
            self._left = self._distance()
        self._left -= len(content) - at
        return bytes(content)


@dataclasses.dataclass
class Cuts(Fault):
    """Connections end behind so many bytes in a direction, a number of times."""

    after: int
    times: float = math.inf

    async def pass_on(self, passed, content):
        if self.times and passed + len(content) > self.after:
            self.times -= 1
            raise CutError
        return content


@dataclasses.dataclass
class Stall(Fault):
    """Behind so many bytes in a direction nothing passes any more, until it is ``over``."""

    after: int = 0
    over: bool = False
    waiting: int = 0

    async def pass_on(self, passed, content):
        if passed + len(content) > self.after:
            self.waiting += 1
            while not self.over:
                await asyncio.sleep(0.005)
            self.waiting -= 1
        return content


class BadNetwork:
    """Passes connections on to a unix socket. Use as a context manager.

    Attributes:
        address: where it listens.
        fault: of what passes from now on.
        passed: bytes that came through towards those who connect.
    """

    def __init__(self, path):
        self._path = str(path)
        self.address, self.fault, self.passed = "", Fault(), 0

    def __enter__(self):
        self._loop, listening = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(listening),))
        self._thread.start()
        listening.wait()
        return self

    def __exit__(self, *details):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    async def _run(self, listening):
        self._end, self._connections = asyncio.Event(), set()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        listening.set()
        await self._end.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connect(self, reader, writer):
        task = asyncio.current_task()
        self._connections.add(task)
        try:
            # Where nobody listens behind it, the connection ends at once.
            with contextlib.suppress(OSError, CutError, asyncio.CancelledError):
                await self._join(reader, writer)
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def _join(self, reader, writer):
        far_reader, far_writer = await asyncio.open_unix_connection(self._path)
        ways = [
            asyncio.create_task(self._pump(reader, far_writer, counted=False)),
            asyncio.create_task(self._pump(far_reader, writer, counted=True)),
        ]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in done:
                way.result()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            far_writer.transport.abort()

    async def _pump(self, reader, writer, *, counted):
        passed = 0
        while content := await reader.read(1 << 16):
            changed = await self.fault.pass_on(passed, content)
            passed += len(content)
            if counted:
                self.passed += len(changed)
            writer.write(changed)
            await writer.drain()
