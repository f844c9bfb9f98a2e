"""Servers for tests: real ones on a free port, in the test's event loop or in a thread with one of their own."""

import asyncio
import contextlib
import threading

import grpc

from serving.proto.deepinfer.v1 import inference_pb2_grpc
from serving.proto.deepinfer.v1.inference_pb2 import GenerateResponse
from serving.server import Server, Service

NAME = "deepinfer.v1.Inference"


class ScriptedService(inference_pb2_grpc.InferenceServicer):
    """Answers every ``Generate`` by the next turn: a list of messages and exceptions, or a function of the call."""

    def __init__(self, *turns):
        self.turns = list(turns)
        self.calls = []
        self.cancelled = self.running = 0

    def service(self):
        return Service(NAME, self, inference_pb2_grpc.add_InferenceServicer_to_server, ("Generate",))

    async def Generate(self, request, call):
        self.calls.append((request, call))
        self.running += 1
        turn = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        try:
            await (turn(call) if callable(turn) else _play(turn, call))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


async def _play(turn, call):
    for step in turn:
        if isinstance(step, Exception):
            raise step
        await call.write(step)


def messages(*events):
    """Messages from keyword arguments of ``GenerateResponse``."""
    return [GenerateResponse(**event) for event in events]


@contextlib.asynccontextmanager
async def started(*services, grace=5.0, **settings):
    """A ready server, and the target that reaches it."""
    server = Server([service.service() for service in services], **settings)
    port = await server.start("127.0.0.1:0")
    await server.ready()
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(grace)


@contextlib.contextmanager
def in_thread(*services, **settings):
    """The target of a server that runs in a thread, for clients that block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def enter():
        context = started(*services, **settings)
        _, target = await context.__aenter__()
        return context, target

    try:
        context, target = asyncio.run_coroutine_threadsafe(enter(), loop).result()
        try:
            yield target
        finally:
            asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def raw_stream(target, method, content, timeout):
    """All messages of a call of bytes, as bytes; its error is raised."""
    with grpc.insecure_channel(target) as channel:
        return list(channel.unary_stream(method)(content, timeout=timeout))


def raw_unary(target, method, content, timeout, metadata=()):
    """The answer to a call of bytes, and the call."""
    with grpc.insecure_channel(target) as channel:
        return channel.unary_unary(method).with_call(content, timeout=timeout, metadata=metadata)
