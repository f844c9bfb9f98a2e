"""An address whose gRPC server is given up: another one takes its place, and what runs goes on."""

import asyncio
import contextlib
import socket
import struct

import pytest

from serving.async_client import AsyncClient
from serving.errors import UnavailableError
from serving.events import Delta, Started
from serving.server import Server
from tests.serving.clusters import ONCE, ScriptedWorker, eventually, forever
from tests.serving.test_routed_answer import PARAMS, PROMPT, STARTED, ended, tokens


def frame(kind, flags, stream, content):
    """A frame of HTTP/2."""
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


def header(name, value):
    """A header as it is, in HPACK."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_of(path):
    """The bytes of a connection that calls a method of this name."""
    post, http = b"\x83", b"\x86"
    headers = post + http + header(b":path", path) + header(b":authority", b"x")
    headers += header(b"content-type", b"application/grpc") + header(b"te", b"trailers")
    settings, whole, last = frame(4, 0, 0, b""), 4, 1
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + settings
        + frame(1, whole, 1, headers)
        + frame(0, last, 1, struct.pack(">BI", 0, 0))
    )


# As a call of `GetLoad` with a bit flipped.
DAMAGED = call_of(b"/deepinfer.v1\xaeInference/GetLoad")


def send(address, content):
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.removeprefix("unix:"))
    else:
        host, port = address.split(":")
        connection = socket.create_connection((host, int(port)))
    connection.sendall(content)
    return connection


@pytest.fixture(params=["port", "path"])
def listen(request, tmp_path):
    return "127.0.0.1:0" if request.param == "port" else f"unix:{tmp_path / 'socket'}"


async def load(client):
    """The load of a server, as soon as it answers."""
    for _ in range(100):
        with contextlib.suppress(UnavailableError):
            return await client.load(timeout=10.0)
        await asyncio.sleep(0.05)
    raise AssertionError("nothing listens any more")


def test_a_damaged_name_of_a_method_ends_nothing(listen, caplog):
    async def run():
        go_on = asyncio.Event()

        async def wait(call):
            await go_on.wait()

        worker = ScriptedWorker("w", "all", generate=[[STARTED, tokens(5), wait, tokens(6, 7, 8, seq=1), ended("w")]])
        worker.load.queued_requests = 3
        server = Server(worker.services(), worker="w")
        port = await server.start(listen)
        await server.ready()
        address = listen if listen.startswith("unix:") else f"127.0.0.1:{port}"
        async with AsyncClient(address, retries=ONCE) as client:
            answer = client.generate(PROMPT, PARAMS)
            events = [await anext(answer), await anext(answer)]
            assert [type(event) for event in events] == [Started, Delta]
            for _ in range(2):
                with send(address, DAMAGED):
                    await eventually(lambda: "another one listens" in caplog.text)
                caplog.clear()
            async with AsyncClient(address, retries=ONCE) as another:
                assert (await load(another)).queued_requests == 3
            go_on.set()
            events += [event async for event in answer]
            assert sum(len(event.tokens) for event in events if isinstance(event, Delta)) == 4
        # Nothing is kept of those that were given up.
        await eventually(lambda: not server._listener._retiring)
        await server.stop(0.0)
        assert worker.running == 0
        async with AsyncClient(address, retries=ONCE) as client:
            with pytest.raises(UnavailableError):
                await client.load(timeout=10.0)

    asyncio.run(run())


def test_an_end_while_a_server_that_was_given_up_still_has_calls(listen, caplog):
    async def run():
        worker = ScriptedWorker("w", "all", generate=[[STARTED, forever]])
        server = Server(worker.services(), worker="w")
        port = await server.start(listen)
        address = listen if listen.startswith("unix:") else f"127.0.0.1:{port}"
        async with AsyncClient(address, retries=ONCE) as client:
            answer = client.generate(PROMPT, PARAMS)
            await anext(answer)
            with send(address, DAMAGED):
                await eventually(lambda: "another one listens" in caplog.text)
            await server.stop(0.0)
            with pytest.raises(UnavailableError):
                await anext(answer)
        assert worker.running == 0

    asyncio.run(run())
