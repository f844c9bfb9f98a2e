"""``deepinfer-jax serve``: a server in one of its roles."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from serving.addresses import check_free
from serving.configuration import ROLES, Configuration, load_configuration, merged, parse_override
from serving.deployment import deploy, process_name
from serving.loaded_engine import load_engine
from serving.logs import start_logging
from serving.transfer_probe import available

_log = logging.getLogger("serving.command")

EPILOG = """
\b
Examples:
  deepinfer-jax serve
  deepinfer-jax serve --config server.toml --set engine.slots=16
  deepinfer-jax serve --role prefill --listen 127.0.0.1:8501
  deepinfer-jax serve --role decode --listen 127.0.0.1:8502
  deepinfer-jax serve --role gateway --worker 127.0.0.1:8501 --worker 127.0.0.1:8502
  deepinfer-jax serve --role gateway --worker dns:workers.example:8500 --print-config > gateway.toml
"""


@click.command(name="serve", epilog=EPILOG)
@click.option(
    "--config",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="TOML file for everything; --print-config shows one.",
)
@click.option("--role", type=click.Choice(ROLES), help="What the process does.  [default: all]")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="Checkpoint directory.  [default: the small trained model that comes with the library]",
)
@click.option("--listen", metavar="ADDRESS", help="HOST:PORT or unix:PATH.  [default: 127.0.0.1:8500]")
@click.option("--name", metavar="NAME", help="Of the process, in receipts, logs and metrics.")
@click.option("--worker", "workers", multiple=True, metavar="ADDRESS", help="A gateway's worker; may be repeated.")
@click.option("--metrics", metavar="HOST:PORT", help="Where Prometheus reads metrics.  [default: nowhere]")
@click.option(
    "--allow-plaintext",
    is_flag=True,
    help="Listen on addresses that other machines reach: nothing is encrypted, and everybody may ask.",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Any key, as in engine.slots=4.")
@click.option("--print-config", is_flag=True, help="Print the configuration that these options make, and end.")
def command(
    path: Path | None,
    role: str | None,
    model: str | None,
    listen: str | None,
    name: str | None,
    workers: tuple[str, ...],
    metrics: str | None,
    allow_plaintext: bool,
    overrides: tuple[str, ...],
    print_config: bool,
) -> None:
    """Serve a model over gRPC.

    Role all does everything in one process. For many, start prefill workers (they compute prompts), decode workers
    (they answer) and a gateway, which clients call. Options win over the file. A server is ready once its health says
    SERVING, when all steps are compiled. SIGTERM or Ctrl-C ends it: unhealthy first, then no new requests, then the end
    of those that run or of server.drain_seconds; a second signal ends it at once, with status 130.
    """
    tables: dict[str, Any] = functools.reduce(merged, map(parse_override, overrides), {})
    given: dict[str, dict[str, Any]] = {
        "server": {"role": role, "listen": listen, "name": name, "allow_plaintext": allow_plaintext or None},
        "model": {"directory": model},
        "gateway": {"workers": list(workers) or None},
        "metrics": {"listen": metrics},
    }
    configuration = load_configuration(path, merged(tables, _present(given)))
    if print_config:
        click.echo(configuration.toml(), nl=False)
        return
    run(configuration)


def run(configuration: Configuration) -> None:
    """Serve until a signal comes.

    Raises:
      ConfigError, CheckpointError: the server cannot be started.
      KeyboardInterrupt: a second signal came, and what ran was refused.
    """
    name, server = process_name(configuration), configuration.server
    check_free(server.listen, "server.listen")
    if configuration.metrics.listen:
        check_free(configuration.metrics.listen, "metrics.listen")
    start_logging(configuration.logging.level, configuration.logging.format, name, logging.StreamHandler())
    built = None
    if server.role != "gateway":
        # Before this process has the device, which some cannot share.
        configuration = dataclasses.replace(configuration, kv=available(configuration.kv, server.role))
        built = load_engine(configuration, name, lambda line: _log.info("starting: %s", line))
    hurried = asyncio.run(_serve(configuration, name, built))
    _log.info("ended")
    if hurried:
        raise KeyboardInterrupt


async def _serve(configuration: Configuration, name: str, built: Any) -> bool:
    """Serve until a signal comes. Returns whether another one came."""
    loop, stopping, at_once = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            at_once.set()
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await deploy(configuration, name, built, stopping, at_once=at_once)
    return at_once.is_set()


def _present(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The keys that have a value."""
    return {table: {key: value for key, value in keys.items() if value is not None} for table, keys in tables.items()}
