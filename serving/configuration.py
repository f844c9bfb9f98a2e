"""The configuration of a server: one TOML file for every role, checked strictly."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.numerics import NUMERICS_NAMES
from deepinfer_jax.replay import Replay
from deepinfer_jax.settings import EngineSettings
from serving.addresses import check_address, is_unspecified, split_address
from serving.tables import read_table, write_table

ROLES = ("all", "prefill", "decode", "gateway")
PREFILL_WAYS = ("full", "encoder_only", "none")
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("json", "text")
TRANSPORTS = ("shm", "jax", "grpc")


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(key, value, f"one of {', '.join(choices)}")


def _check_positive(section: object, *keys: str) -> None:
    for key in keys:
        value = getattr(section, key)
        if not 0 < value < math.inf:
            raise ConfigError(key, value, "above 0")


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """The model.

    Attributes:
        directory: of the checkpoint; empty is the small trained model that comes with the library.
        name: what clients are told; empty is the directory's name.
        numerics: f32, f32q, bf16 or released, see the README.
    """

    directory: str = ""
    name: str = ""
    numerics: str = "f32"

    def __post_init__(self) -> None:
        _check_choice("numerics", self.numerics, NUMERICS_NAMES)


@dataclasses.dataclass(frozen=True)
class ServerSection:
    """The process.

    Attributes:
        role: all (everything in one process), prefill, decode or gateway.
        name: of the process in receipts, logs and metrics; empty is its role and address.
        listen: HOST:PORT, [IPV6]:PORT or unix:PATH; port 0 is any free one.
        advertise: HOST:PORT at which other workers reach this one, where that is not the address it listens on.
        allow_plaintext: listen on addresses that other machines reach, unencrypted and for everybody.
        reflection: let tools such as grpcurl ask which services there are.
        drain_seconds: how long running requests may go on once the process is told to end.
    """

    role: str = "all"
    name: str = ""
    listen: str = "127.0.0.1:8500"
    advertise: str = ""
    allow_plaintext: bool = False
    reflection: bool = True
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        _check_choice("role", self.role, ROLES)
        check_address(self.listen, "listen", plaintext=self.allow_plaintext)
        if self.advertise:
            split_address(self.advertise, "advertise")
        if not 0 <= self.drain_seconds < math.inf:
            raise ConfigError("drain_seconds", self.drain_seconds, "0 or more seconds")


@dataclasses.dataclass(frozen=True)
class GatewaySection:
    """What a gateway does with requests; a process of role all has one too.

    Attributes:
        workers: HOST:PORT or unix:PATH of every worker, or dns:NAME:PORT for all addresses that a name has. What a
            worker does it says itself. Role all needs none.
        fingerprint: that workers must have; empty takes that of the first one that is found.
        prefill: what prefill workers compute of a prompt. full: all of it. encoder_only: the encoder layers of all but
            the last tokens, the rest on the decode worker; needs engine.replay.decoder compact everywhere. none: decode
            workers compute prompts themselves.
        prefill_fallback: where no prefill worker can be reached, decode workers compute prompts themselves.
        max_requests: requests that may be open at a time; more are refused.
        max_prompt_tokens: prompt tokens that may wait for their first token at a time; more are refused.
        attempts: workers that a request may go to, one after the other, when workers fail.
        return_seconds: how long an answer that has begun waits for a worker to come back where none is left; no longer
            than its deadline.
        deadline_margin: seconds that a worker's deadline lies before the client's, so that its answer is in time.
        poll_seconds: how often workers are asked for their load.
        call_seconds: how long such a small question may take.
        resolve_seconds: how often names are resolved again.
        stop_strings: end answers at stop strings, by the tokenizer of the model's directory.
    """

    workers: tuple[str, ...] = ()
    fingerprint: str = ""
    prefill: str = "full"
    prefill_fallback: bool = True
    max_requests: int = 1024
    max_prompt_tokens: int = 1 << 22
    attempts: int = 4
    return_seconds: float = 60.0
    deadline_margin: float = 0.1
    poll_seconds: float = 1.0
    call_seconds: float = 5.0
    resolve_seconds: float = 10.0
    stop_strings: bool = True

    def __post_init__(self) -> None:
        _check_choice("prefill", self.prefill, PREFILL_WAYS)
        _check_positive(self, "max_requests", "max_prompt_tokens", "attempts")
        _check_positive(self, "poll_seconds", "call_seconds", "resolve_seconds")
        for name in ("deadline_margin", "return_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(name, getattr(self, name), "0 or more seconds")
        for number, worker in enumerate(self.workers):
            name = worker.removeprefix("dns:")
            if name != worker or not worker.startswith("unix:"):
                split_address(name, f"workers[{number}]")


@dataclasses.dataclass(frozen=True)
class KvSection:
    """State on its way from prefill workers to decode workers.

    Attributes:
        lease_seconds: how long a prefill worker holds state that nobody fetches.
        held_bytes: of states that a prefill worker holds together; beyond them prompts are refused.
        held_states: the same, as a number of states.
        arriving_bytes: of states that a decode worker fetches together.
        lanes: connections from a decode worker to a prefill worker.
        chunk_bytes: of a message, 65,536 to 2,097,152.
        patience_seconds: without a byte, after which a transfer is taken for broken; not where its sender says that it
            has no more yet.
        transports: ways to hand state over: grpc; shm between processes of one host, which share memory; jax between
            devices, by JAX's experimental transfer engine, on all workers that have it. jax needs a network where
            nobody is hostile, as anyone who reaches its port can end the process, two processes that can have the
            device at a time while a worker starts, when a trial tells whether it works, and server.advertise where a
            worker listens on all addresses.
    """

    lease_seconds: float = 45.0
    held_bytes: int = 4 << 30
    held_states: int = 1024
    arriving_bytes: int = 4 << 30
    lanes: int = 2
    chunk_bytes: int = 1 << 20
    patience_seconds: float = 5.0
    transports: tuple[str, ...] = ("shm", "grpc")

    def __post_init__(self) -> None:
        _check_positive(self, "lease_seconds", "held_bytes", "held_states", "arriving_bytes", "lanes")
        _check_positive(self, "patience_seconds")
        if not 1 << 16 <= self.chunk_bytes <= 1 << 21:
            raise ConfigError("chunk_bytes", self.chunk_bytes, "65,536 to 2,097,152")
        for number, transport in enumerate(self.transports):
            _check_choice(f"transports[{number}]", transport, TRANSPORTS)
        if "grpc" not in self.transports:
            raise ConfigError("transports", self.transports, "a list that has grpc, which works everywhere")


@dataclasses.dataclass(frozen=True)
class LoggingSection:
    """Logs, on standard error. They never hold anything of a prompt or an answer.

    Attributes:
        level: debug, info, warning or error.
        format: json (one object a line) or text.
    """

    level: str = "info"
    format: str = "json"

    def __post_init__(self) -> None:
        _check_choice("level", self.level, LEVELS)
        _check_choice("format", self.format, FORMATS)


@dataclasses.dataclass(frozen=True)
class MetricsSection:
    """Metrics for Prometheus, over HTTP.

    Attributes:
        listen: HOST:PORT; empty is nowhere.
    """

    listen: str = ""

    def __post_init__(self) -> None:
        if self.listen:
            split_address(self.listen, "listen")


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Configuration of deepinfer-jax serve.

    Attributes:
        model: What is served.
        server: The process: its role, and where it listens.
        engine: What the engine may use, and how it runs. Gateways have none.
        kv: State on its way from prefill workers to decode workers.
        gateway: Workers, and how requests are spread over them.
        logging: Logs, on standard error. They never hold anything of a prompt or an answer.
        metrics: Metrics for Prometheus, over HTTP.
    """

    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    server: ServerSection = dataclasses.field(default_factory=ServerSection)
    engine: EngineSettings = dataclasses.field(default_factory=lambda: EngineSettings(replay=Replay(mode="bounded")))
    kv: KvSection = dataclasses.field(default_factory=KvSection)
    gateway: GatewaySection = dataclasses.field(default_factory=GatewaySection)
    logging: LoggingSection = dataclasses.field(default_factory=LoggingSection)
    metrics: MetricsSection = dataclasses.field(default_factory=MetricsSection)

    def __post_init__(self) -> None:
        if self.metrics.listen:
            check_address(self.metrics.listen, "metrics.listen", plaintext=self.server.allow_plaintext)
        if self.server.role == "gateway" and not self.gateway.workers:
            raise ConfigError("gateway.workers", [], "at least one worker, for role gateway")
        if self.server.role == "all" and self.gateway.workers:
            accepted = "no workers, as a process of role all is its own"
            raise ConfigError("gateway.workers", self.gateway.workers, accepted, "use role gateway")
        if self.server.role == "prefill" and not self.server.advertise and is_unspecified(self.server.listen):
            accepted = "HOST:PORT at which decode workers reach this one, as it listens on all addresses"
            raise ConfigError("server.advertise", "", accepted)
        if self.engine.encoder_only and self.server.role != "prefill":
            raise ConfigError("engine.encoder_only", True, f"false for role {self.server.role}")
        decoder = self.engine.replay.decoder
        if self.server.role == "all" and self.gateway.prefill == "encoder_only" and decoder != "compact":
            raise ConfigError("gateway.prefill", "encoder_only", "full unless engine.replay.decoder is compact")

    def toml(self) -> str:
        """All of it as a file with comments."""
        return write_table(self)


def load_configuration(path: Path | None, overrides: Mapping[str, Any]) -> Configuration:
    """Read a configuration file.

    Args:
      path: the file; None has defaults alone.
      overrides: tables that win over the file's.

    Raises:
      ConfigError: the file is no TOML, a key is unknown, or a value not accepted.
      OSError: the file cannot be read.
    """
    tables: dict[str, Any] = {}
    if path is not None:
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(str(path), str(error), "a TOML file") from error
    return read_table(Configuration(), merged(tables, overrides))


def parse_override(text: str) -> dict[str, Any]:
    """The tables of ``table.key=value``; the value is TOML, or a string without quotes.

    Raises:
      ConfigError: there is no key.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(text, "no value", "KEY=VALUE, as in engine.slots=4")
    for written in (value, f"'{value}'"):
        try:
            return tomllib.loads(f"{key} = {written}")
        except tomllib.TOMLDecodeError:
            continue
    raise ConfigError(key, value, "KEY=VALUE with a TOML value, as in engine.slots=4")


def merged(tables: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Both, table by table; ``others`` win."""
    both = dict(tables)
    for key, value in others.items():
        nested = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = merged(both[key], value) if nested else value
    return both
