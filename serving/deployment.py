"""A server process in the role that its configuration gives it, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from deepinfer_jax.async_engine import AsyncEngine, EngineClosedError
from deepinfer_jax.engine import Engine
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.text.tokenizer import Tokenizer
from serving.addresses import UNIX, bound, split_address
from serving.configuration import Configuration
from serving.discovery import Discovery
from serving.gateway import GatewayService
from serving.loaded_engine import model_directory
from serving.metrics_page import metrics_page
from serving.proto.deepinfer.v1.inference_pb2 import ModelInfo
from serving.server import Server
from serving.worker_services import worker_services
from serving.workers import Workers

_log = logging.getLogger("serving.deployment")
_WATCH_SECONDS = 1.0


def process_name(configuration: Configuration) -> str:
    """What the process calls itself."""
    server = configuration.server
    return server.name or f"{server.role}@{server.advertise or server.listen}"


async def deploy(
    configuration: Configuration,
    name: str,
    built: tuple[Engine, ModelInfo] | None,
    stopping: asyncio.Event,
    listening: Callable[[str], None] = lambda address: None,
    at_once: asyncio.Event | None = None,
) -> None:
    """Serve until told to stop, then finish what runs.

    Args:
      configuration: of the process.
      name: of the process.
      built: the engine and what it serves; None for a gateway. It is closed at the end.
      stopping: ends the service once it is set.
      listening: told the address. Health says when requests are welcome: of a gateway, once it has a worker.
      at_once: refuses what runs once it is set behind ``stopping``.

    Raises:
      ConfigError: an address cannot be had.
      CheckpointError: the gateway's model directory has no tokenizer.
      EngineClosedError: the engine has failed.
    """
    registries: list[CollectorRegistry] = []
    async with contextlib.AsyncExitStack() as stack:
        role, listen = configuration.server.role, configuration.server.listen
        workers: tuple[str, ...] = configuration.gateway.workers
        if built is not None:
            if role == "all":
                # The gateway speaks to the engine's services as it would to those of another process.
                place = stack.enter_context(tempfile.TemporaryDirectory(prefix="deepinfer-"))
                workers = (f"{UNIX}{Path(place, 'worker')}",)
            own = listen if role != "all" else workers[0]
            worker = _worker(configuration, name, built, own, registries, stopping, at_once)
            address = await stack.enter_async_context(worker)
        if role in ("all", "gateway"):
            address = await stack.enter_async_context(_gateway(configuration, name, workers, registries, at_once))
        if configuration.metrics.listen:
            port = stack.enter_context(_page(configuration.metrics.listen, registries))
            _log.info("metrics at port %d", port)
        _log.info("listening", extra={"address": address, "role": role})
        listening(address)
        await stopping.wait()
        _log.info("stopping", extra={"role": role})


@contextlib.asynccontextmanager
async def _worker(
    configuration: Configuration,
    name: str,
    built: tuple[Engine, ModelInfo],
    listen: str,
    registries: list[CollectorRegistry],
    stopping: asyncio.Event,
    at_once: asyncio.Event | None,
) -> AsyncIterator[str]:
    """A worker's server; the value is its address."""
    inner, info = built
    engine = AsyncEngine(inner)
    watching = asyncio.create_task(_watch(engine, stopping))
    try:
        async with worker_services(inner, engine, info, configuration.kv, _host(configuration)) as parts:
            registries += parts.registries
            server = Server(parts.services, worker=name, reflection_enabled=configuration.server.reflection)
            address = await _start(server, listen)
            parts.advertise(_bulk_uris(configuration, address))
            await server.ready()
            try:
                yield address
            finally:
                await server.stop(configuration.server.drain_seconds, parts.settled, at_once)
        if watching.done():
            await watching
    finally:
        watching.cancel()
        await asyncio.to_thread(engine.close)


async def _watch(engine: AsyncEngine, stopping: asyncio.Event) -> None:
    """End the process when its engine has failed: who supervises it can start another one."""
    try:
        while True:
            await engine.call(lambda inner: None)
            await asyncio.sleep(_WATCH_SECONDS)
    except EngineClosedError:
        _log.critical("the engine has failed")
        stopping.set()
        raise


@contextlib.asynccontextmanager
async def _gateway(
    configuration: Configuration,
    name: str,
    addresses: Sequence[str],
    registries: list[CollectorRegistry],
    at_once: asyncio.Event | None,
) -> AsyncIterator[str]:
    """A gateway's server; the value is its address. It is ready once there is a worker that answers."""
    settings = configuration.gateway
    tokenizer = Tokenizer.from_directory(model_directory(configuration.model)) if settings.stop_strings else None
    workers = Workers(settings, Discovery(addresses))
    service = GatewayService(workers, settings, name=name, role=configuration.server.role, tokenizer=tokenizer)
    registries.append(service.metrics.registry)
    server = Server([service.service()], worker=name, reflection_enabled=configuration.server.reflection)
    await workers.start()
    try:
        address = await _start(server, configuration.server.listen)
        welcoming = asyncio.create_task(_welcome(server, workers))
        try:
            if workers.info is not None:
                await welcoming
            yield address
        finally:
            welcoming.cancel()
            await server.stop(configuration.server.drain_seconds, at_once=at_once)
            await service.close()
    finally:
        await workers.close()


async def _welcome(server: Server, workers: Workers) -> None:
    """Say that work is welcome once somebody can do it."""
    await workers.found()
    await server.ready()


async def _start(server: Server, listen: str) -> str:
    """Start a server. Gives the address where it is reached, which has a port where any free one was asked for."""
    try:
        port = await server.start(listen)
    except RuntimeError as error:
        raise ConfigError("server.listen", listen, "an address that is free", str(error)) from error
    return bound(listen, port)


def _host(configuration: Configuration) -> str:
    """Where other workers reach this machine; that of a socket in the file system is reached from here alone."""
    address = configuration.server.advertise or configuration.server.listen
    return "127.0.0.1" if address.startswith(UNIX) else split_address(address, "server.listen")[0]


def _bulk_uris(configuration: Configuration, address: str) -> list[str]:
    """Where decode workers fetch this worker's states."""
    advertised = configuration.server.advertise
    if address.startswith(UNIX) and not advertised:
        return [f"grpc+unix://{Path(address.removeprefix(UNIX)).absolute()}"]
    return [f"grpc://{advertised or address}"]


@contextlib.contextmanager
def _page(listen: str, registries: list[CollectorRegistry]) -> Iterator[int]:
    try:
        with metrics_page(listen, registries) as port:
            yield port
    except OSError as error:
        raise ConfigError("metrics.listen", listen, "an address that is free", str(error)) from error
