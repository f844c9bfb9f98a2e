"""Workers and gateways for tests, as real servers in the test's event loop: over tiny engines, or by a script."""

import asyncio
import contextlib
import dataclasses
import math
import threading

from deepinfer_jax.async_engine import AsyncEngine
from serving.async_client import AsyncClient
from serving.channels import RetryPolicy
from serving.configuration import Configuration, GatewaySection, KvSection, ServerSection
from serving.deployment import deploy
from serving.gateway import GatewayService
from serving.model_info import model_info
from serving.proto.deepinfer.v1 import inference_pb2, inference_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from serving.server import Server, Service
from serving.worker_services import WorkerServices, worker_services
from serving.workers import Workers
from tests.running_engines import built, fresh_engine

FINGERPRINT = "0" * 64
POLL = 0.05
ONCE = RetryPolicy(attempts=1)


@contextlib.asynccontextmanager
async def serving(*services, worker="", grace=0.0):
    """A ready server, and the address that reaches it."""
    server = Server(services, worker=worker)
    port = await server.start("127.0.0.1:0")
    await server.ready()
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(grace)


class Throttle:
    """Lets an engine take a number of steps; any number until it is told one."""

    def __init__(self, engine):
        self._left, self._changed = math.inf, threading.Condition()
        step = engine.step

        def throttled():
            with self._changed:
                self._changed.wait_for(lambda: self._left > 0)
                self._left -= 1
            return step()

        engine.step = throttled

    def allow(self, steps):
        with self._changed:
            self._left = steps
            self._changed.notify_all()


@dataclasses.dataclass
class EngineWorker:
    """A worker over an engine; ``stop`` is its end without notice."""

    server: Server
    address: str
    engine: AsyncEngine
    throttle: Throttle
    parts: WorkerServices

    async def stop(self):
        await self.server.stop(0)
        self.throttle.allow(math.inf)

    async def idle(self):
        """Whether nothing of any request is left, once the engine has come to rest."""

        def held(engine):
            return (engine.busy, engine.books.used_blocks, engine.books.used_slots)

        names = ("deepinfer_kv_held_states", "deepinfer_kv_held_bytes", "deepinfer_kv_arriving_bytes")
        for _ in range(200):
            kept = [registry.get_sample_value(name) for registry in self.parts.registries for name in names]
            if await self.engine.call(held) == (False, 0, 0) and not any(kept):
                return True
            await asyncio.sleep(0.02)
        return False


def described(inner, name, role):
    """What a worker over a tiny engine serves."""
    return model_info(
        inner,
        model="tiny",
        weights_id="",
        numerics="f32",
        fingerprint=inner.receiver.form.fingerprint,
        stop_strings=False,
        worker=name,
        role=role,
        kv_handles=role == "decode",
    )


@contextlib.asynccontextmanager
async def engine_worker(name, *, role="all", decoder="off", build=built, **changes):
    """A worker over a tiny engine of its own; ``changes``: of its settings."""
    inner = fresh_engine("f32", decoder, build=build, **changes)
    info = described(inner, name, role)
    throttle, engine = Throttle(inner), AsyncEngine(inner)
    try:
        async with (
            worker_services(inner, engine, info, KvSection()) as parts,
            serving(*parts.services, worker=name) as (server, address),
        ):
            parts.advertise([f"grpc://{address}"])
            yield EngineWorker(server, address, engine, throttle, parts)
    finally:
        throttle.allow(math.inf)
        await asyncio.to_thread(engine.close)


@contextlib.asynccontextmanager
async def deployed(decoder="off", build=built, **changes):
    """A process of role all over a tiny engine: a client, and whether nothing of any request is left."""
    inner = fresh_engine("f32", decoder, build=build, **changes)
    info = described(inner, "all", "all")
    # However slow the machine is: that is not what is tested here.
    settings = GatewaySection(poll_seconds=POLL, call_seconds=60.0)
    configuration = Configuration(server=ServerSection(listen="127.0.0.1:0"), gateway=settings)
    stopping, address = asyncio.Event(), asyncio.get_running_loop().create_future()
    process = asyncio.create_task(deploy(configuration, "all", (inner, info), stopping, address.set_result))

    async def idle():
        await eventually(lambda: not inner.busy)
        return (inner.books.used_blocks, inner.books.used_slots) == (0, 0)

    try:
        await asyncio.wait((process, address), return_when=asyncio.FIRST_COMPLETED)
        async with AsyncClient(address.result(), retries=ONCE) as client:
            yield client, idle
    finally:
        stopping.set()
        await process


@contextlib.asynccontextmanager
async def gateway(*addresses, tokenizer=None, **settings):
    """A gateway over workers, and a client of it."""
    section = GatewaySection(workers=addresses, **{"poll_seconds": POLL, "call_seconds": 2.0} | settings)
    workers = Workers(section)
    service = GatewayService(workers, section, name="gate", tokenizer=tokenizer)
    await workers.start()
    try:
        async with (
            serving(service.service(), worker="gate") as (server, address),
            AsyncClient(address, retries=ONCE) as client,
        ):
            yield Gate(server, address, service, workers, client)
    finally:
        await service.close()
        await workers.close()


@dataclasses.dataclass
class Gate:
    """A gateway with a client of it."""

    server: Server
    address: str
    service: GatewayService
    workers: Workers
    client: AsyncClient


class ScriptedWorker(inference_pb2_grpc.InferenceServicer, prefill_pb2_grpc.PrefillServicer):
    """Does what it is told to: each ``Generate`` and ``Prefill`` is the next turn of its list, the last one again.

    A turn is a list of messages, exceptions to end with, and functions of the call to await.
    """

    def __init__(self, name, role, generate=(), prefill=(), **info):
        self.name, self._generate, self._prefill = name, list(generate), list(prefill)
        self.info = inference_pb2.ModelInfo(
            model="tiny",
            vocabulary=96,
            max_context=96,
            fingerprint=FINGERPRINT,
            page_tokens=16,
            max_logprobs=20,
            replay_mode=types_pb2.REPLAY_MODE_EXACT,
            worker=name,
            role=role,
            kv_handles=True,
            **info,
        )
        self.load = inference_pb2.Load(shards=[inference_pb2.ShardLoad(slots=8, pages=1000)])
        self.generated, self.prefilled, self.released, self.aborted = [], [], [], []
        self.cancelled = self.running = 0

    def services(self):
        return (
            Service("deepinfer.v1.Inference", self, inference_pb2_grpc.add_InferenceServicer_to_server, ("Generate",)),
            Service("deepinfer.v1.Prefill", self, prefill_pb2_grpc.add_PrefillServicer_to_server, ("Prefill",)),
        )

    @contextlib.asynccontextmanager
    async def serving(self):
        async with serving(*self.services(), worker=self.name) as (_, address):
            yield address

    async def Generate(self, request, call):
        self.generated.append(request)
        await self._play(self._generate, call)

    async def Prefill(self, request, call):
        self.prefilled.append(request)
        await self._play(self._prefill, call)

    async def ReleaseKv(self, request, call):
        self.released.append(request.kv_id)
        return prefill_pb2.ReleaseKvResponse(released=True)

    async def Abort(self, request, call):
        self.aborted.append(request.request_id)
        return inference_pb2.AbortResponse(found=True)

    async def GetModelInfo(self, request, call):
        return self.info

    async def GetLoad(self, request, call):
        return self.load

    async def _play(self, turns, call):
        turn = turns.pop(0) if len(turns) > 1 else turns[0]
        self.running += 1
        try:
            for step in turn:
                if isinstance(step, Exception):
                    raise step
                if callable(step):
                    await step(call)
                else:
                    await call.write(step)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


async def forever(call):
    """A turn's step that does not end."""
    await asyncio.Event().wait()


async def eventually(condition):
    """Wait for a condition; it fails if that takes long."""
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not become true")
