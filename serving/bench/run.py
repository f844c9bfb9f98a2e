"""The parts of the benchmark, one after the other, on servers that are started for them or run already."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.records import StateFormat
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine import Engine
from deepinfer_jax.numerics import Numerics
from serving.bench.alone import check_same, load_alone
from serving.bench.cluster import Addresses, measured_configuration, started
from serving.bench.input_rate import measure_input
from serving.bench.overhead import measure_overhead
from serving.bench.overlap import measure_overlap
from serving.bench.report import Report
from serving.bench.streams import measure_streams
from serving.bench.transfer import measure_transfer
from serving.bench.wide_model import NAME, write_wide_model
from serving.client import Client
from serving.configuration import Configuration, ModelSection
from serving.proto.deepinfer.v1.inference_pb2 import ModelInfo
from serving.proto.deepinfer.v1.types_pb2 import REPLAY_MODE_EXACT

PARTS = ("overhead", "input", "overlap", "transfer", "streams")
OVERLAP_TRANSPORTS = ("shm", "grpc")

Bar = Callable[[int, str], AbstractContextManager[Callable[[], None]]]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured. Lengths are in tokens.

    Attributes:
        turns: of each way to an answer, and of each kind of transfer five times as many.
        prompt, tokens: of the requests whose time is compared.
        inputs, shared, own: prompts, what they have in common, and what each has alone.
        streams, stream_prompt, stream_tokens: how many, and their lengths.
        long_prompt, long_turns: whose state is handed over, and how often of each kind.
        transfer_tokens: of the state of which the speed of transfers is measured.
    """

    turns: int = 8
    prompt: int = 128
    tokens: int = 64
    inputs: int = 12
    shared: int = 1920
    own: int = 128
    streams: int = 128
    stream_prompt: int = 64
    stream_tokens: int = 32
    long_prompt: int = 4000
    long_turns: int = 7
    transfer_tokens: int = 65_536


@dataclasses.dataclass(frozen=True)
class Terminal:
    """Where a run tells what it does: ``note`` lines, ``bar`` a progress bar of so many steps of a unit."""

    note: Callable[[str], None]
    bar: Bar


def run_parts(
    model: ModelSection,
    parts: Collection[str],
    sizes: Sizes,
    terminal: Terminal,
    *,
    running: Addresses | None = None,
    environment: Mapping[str, str] | None = None,
) -> Report:
    """Measure.

    Args:
      model: what the servers have.
      parts: some of :data:`PARTS`.
      sizes: how much.
      terminal: where it is told.
      running: servers that run already; None starts some.
      environment: of servers that are started.

    Raises:
      InputError: the servers that run have another model.
      ProcessError: servers do not start.
      ServingError: a server refuses.
    """
    report = Report(model.name or model.directory or "the model that comes with the library")
    if "transfer" in parts:
        with terminal.bar(5 * sizes.turns, " transfers") as step:
            report.transfer = measure_transfer(
                _released_form(), tokens=sizes.transfer_tokens, rounds=5 * sizes.turns, progress=step
            )
    if {"overhead", "input"} & set(parts):
        with _servers(measured_configuration(model), running, terminal, environment) as cluster:
            _measure_speed(report, cluster, parts, sizes, terminal)
    if "overlap" in parts:
        with contextlib.ExitStack() as stack:
            own = model
            if running is None and not model.directory:
                terminal.note(f"drawing {NAME}, for overlap")
                own = write_wide_model(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deepinfer-"))))
            report.overlap_model = own.name or report.model
            cluster = stack.enter_context(_servers(measured_configuration(own), running, terminal, environment))
            _measure_overlap(report, cluster, sizes, terminal)
    if "streams" in parts:
        configuration = measured_configuration(model, streams=sizes.streams)
        with _servers(configuration, running, terminal, environment) as cluster:
            _measure_streams(report, cluster, sizes, terminal)
    return report


@dataclasses.dataclass(frozen=True)
class _Cluster:
    """Servers, what they say of themselves, and the configuration of the engine beside them."""

    addresses: Addresses
    info: ModelInfo
    configuration: Configuration

    @property
    def gateway(self) -> str:
        return self.addresses.gateway or ""


@contextlib.contextmanager
def _servers(
    configuration: Configuration,
    running: Addresses | None,
    terminal: Terminal,
    environment: Mapping[str, str] | None,
) -> Iterator[_Cluster]:
    with contextlib.ExitStack() as stack:
        if running is None:
            running = stack.enter_context(started(configuration, terminal.note, environment))
        with Client(running.gateway or "") as client:
            info = client.model_info()
        yield _Cluster(running, info, configuration)


@contextlib.contextmanager
def _alone(cluster: _Cluster, terminal: Terminal) -> Iterator[Engine]:
    """The servers' engine in this process."""
    engine = load_alone(cluster.configuration, terminal.note)
    try:
        check_same(engine, cluster.info)
        yield engine
    finally:
        engine.close()


def _measure_speed(report: Report, cluster: _Cluster, parts: Collection[str], sizes: Sizes, terminal: Terminal) -> None:
    if "overhead" in parts:
        with _alone(cluster, terminal) as engine, terminal.bar(sizes.turns + 1, " turns") as step:
            report.overhead = measure_overhead(
                engine,
                cluster.addresses,
                prompt=sizes.prompt,
                tokens=sizes.tokens,
                turns=sizes.turns,
                progress=step,
            )
    if "input" in parts:
        with terminal.bar(sizes.inputs, " prompts") as step:
            report.input = measure_input(
                cluster.gateway,
                cluster.info.vocabulary,
                prompts=sizes.inputs,
                shared=sizes.shared,
                own=sizes.own,
                progress=step,
            )


def _measure_overlap(report: Report, cluster: _Cluster, sizes: Sizes, terminal: Terminal) -> None:
    prefill, decode = cluster.addresses.prefill, cluster.addresses.decode
    if prefill is None or decode is None:
        report.left_out["overlap"] = "as the addresses of a prefill worker and of a decode worker are not known"
    elif sizes.long_prompt + 2 > cluster.info.max_context:
        report.left_out["overlap"] = f"as requests have at most {cluster.info.max_context} tokens"
    else:
        with terminal.bar(2 * len(OVERLAP_TRANSPORTS) * sizes.long_turns, " hand-overs") as step:
            report.overlap = measure_overlap(
                prefill,
                decode,
                cluster.info.vocabulary,
                prompt=sizes.long_prompt,
                turns=sizes.long_turns,
                transports=OVERLAP_TRANSPORTS,
                progress=step,
            )


def _measure_streams(report: Report, cluster: _Cluster, sizes: Sizes, terminal: Terminal) -> None:
    if not (cluster.info.deterministic and cluster.info.replay_mode == REPLAY_MODE_EXACT):
        report.left_out["streams"] = "as these servers do not run with engine.deterministic and replay mode exact"
        return
    with _alone(cluster, terminal) as engine, terminal.bar(sizes.streams, " requests") as step:
        report.streams = measure_streams(
            engine,
            cluster.gateway,
            streams=sizes.streams,
            prompt=sizes.stream_prompt,
            tokens=sizes.stream_tokens,
            progress=step,
        )


def _released_form() -> StateFormat:
    """Of the released model, whatever the servers have: small models have small states."""
    config, numerics = ModelConfig.preset("v4.1-flash"), Numerics.preset("released")
    return StateFormat.of("", config, numerics, PageLayout.of(config))
