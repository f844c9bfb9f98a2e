"""The servers that are measured: processes of this machine that a benchmark starts, or a cluster that runs already."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from deepinfer_jax.replay import Replay
from deepinfer_jax.settings import EngineSettings
from serving.configuration import Configuration, GatewaySection, ModelSection
from serving.processes import ProcessError, Processes

# The first worker may have to compile its steps.
_STARTING_SECONDS = 600.0
_POOL_BYTES = 1 << 26
_TILES = 3


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Where servers are reached; None are not there, or not known.

    Attributes:
        gateway: has prompts computed by a prefill worker, where there is one.
        relay: a gateway that has everything done by the decode worker.
        prefill, decode: workers.
    """

    gateway: str | None = None
    relay: str | None = None
    prefill: str | None = None
    decode: str | None = None


def measured_configuration(model: ModelSection, *, streams: int | None = None) -> Configuration:
    """The configuration of servers that a benchmark starts, and of the engine beside them; two step shapes.

    Args:
      model: what they serve.
      streams: requests that run at a time, with results that depend on nothing else; None is for one or two requests at
        a time, in the servers' usual mode.
    """
    slots = streams or 2
    engine = EngineSettings(
        slots=slots,
        decode_rows=(slots,),
        prefill_tiles=(_TILES,),
        memory=_POOL_BYTES,
        deterministic=streams is not None,
        replay=Replay("bounded" if streams is None else "exact"),
    )
    return Configuration(model=model, engine=engine, gateway=GatewaySection(stop_strings=False))


@contextlib.contextmanager
def started(
    configuration: Configuration, note: Callable[[str], None], environment: Mapping[str, str] | None = None
) -> Iterator[Addresses]:
    """A prefill worker, a decode worker and two gateways, until the context is left.

    Args:
      configuration: of all of them, but for roles and addresses.
      note: told what is going on.
      environment: of the processes; None is that of this one.

    Raises:
      ProcessError: one of them does not start; its message has the end of the log.
    """
    with tempfile.TemporaryDirectory(prefix="deepinfer-") as name:
        directory = Path(name)
        file = directory / "server.toml"
        file.write_text(configuration.toml(), encoding="utf-8")
        addresses = Addresses(*(f"127.0.0.1:{port}" for port in _free_ports(4)))
        with Processes(directory, ["--config", str(file)], note, environment) as processes:
            workers = [f"--worker={address}" for address in (addresses.prefill, addresses.decode)]
            places = [
                ("prefill", addresses.prefill or ""),
                ("decode", addresses.decode or ""),
                ("gateway", addresses.gateway or "", *workers),
                ("gateway", addresses.relay or "", *workers, "--set", "gateway.prefill=none"),
            ]
            try:
                processes.start_all(places, seconds=_STARTING_SECONDS)
            except ProcessError as error:
                # The logs go with the directory.
                raise ProcessError(f"{error}, which ends with {_last_line(processes)}") from error
            yield addresses


def _last_line(processes: Processes) -> str:
    """Of the log of a process that has ended, or of the last one."""
    ended = [process for process in processes.running if process.popen.poll() is not None]
    lines = (ended or processes.running)[-1].log.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1] if lines else "nothing"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(one.getsockname()[1]) for one in sockets]
