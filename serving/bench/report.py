"""All figures of a run of the benchmark, as JSON and as a table."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

from deepinfer_jax.commands.table import aligned
from serving.bench.input_rate import InputFigures
from serving.bench.overhead import WAYS, OverheadFigures
from serving.bench.overlap import OverlapFigures
from serving.bench.streams import StreamFigures
from serving.bench.transfer import TransferFigures

Row = tuple[str, str, str]

LEAST_GRPC_SHARE, LEAST_SHM_SHARE = 0.60, 0.50
MOST_OUTSTANDING, MOST_EXPOSED = 0.25, 0.40


@dataclasses.dataclass
class Report:
    """What was measured; None was not.

    Attributes:
        model, overlap_model: that the servers had, and those of the part ``overlap``.
        left_out: parts that could not be measured, and why.
    """

    model: str
    overlap_model: str = ""
    overhead: OverheadFigures | None = None
    input: InputFigures | None = None
    overlap: Sequence[OverlapFigures] | None = None
    transfer: TransferFigures | None = None
    streams: StreamFigures | None = None
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        parts = {name: _document(getattr(self, name)) for name in _PARTS}
        models = {"model": self.model, "overlap_model": self.overlap_model}
        return models | parts | {"left_out": self.left_out, "load_average": os.getloadavg()[0]}

    def text(self) -> str:
        """For people."""
        rows = [("figure", "value", "aim"), *self._rows()]
        left = "".join(f"\n  {part}: left out, {reason}" for part, reason in self.left_out.items())
        return f"{self.model}\n\n{aligned(rows)}{left}\n  load average {os.getloadavg()[0]:.1f}\n"

    def _rows(self) -> Iterator[Row]:
        if self.overhead is not None:
            yield from _overhead_rows(self.overhead)
        if self.input is not None:
            yield from _input_rows(self.input)
        for one in self.overlap or ():
            yield from _overlap_rows(one, self.overlap_model)
        if self.transfer is not None:
            yield from _transfer_rows(self.transfer)
        if self.streams is not None:
            yield from _stream_rows(self.streams)


_PARTS = ("overhead", "input", "overlap", "transfer", "streams")


def _document(figures: Any) -> Any:
    """Fields and properties of figures."""
    if figures is None or isinstance(figures, list):
        return figures and [_document(one) for one in figures]
    derived = {name: getattr(figures, name) for name, item in vars(type(figures)).items() if isinstance(item, property)}
    return dataclasses.asdict(figures) | derived


def _overhead_rows(figures: OverheadFigures) -> Iterator[Row]:
    alone = f"the engine alone, {figures.prompt} + {figures.tokens} tokens"
    first, token = figures.alone_first_token_ms, figures.alone_token_us
    yield f"{alone}: first token, best (median)", f"{first.best:,.1f} ({first.median:,.1f}) ms", ""
    yield f"{alone}: a token", f"{token.best:,.0f} ({token.median:,.0f}) us", ""
    for way in figures.ways:
        first, token = way.added_first_token_ms, way.added_token_us
        yield f"{WAYS[way.way]}: first token", f"{first.best:+,.1f} ({first.median:+,.1f}) ms", ""
        yield f"{WAYS[way.way]}: a token", f"{token.best:+,.0f} ({token.median:+,.0f}) us", ""


def _input_rows(figures: InputFigures) -> Iterator[Row]:
    name = f"input of {figures.prompts} prompts, {figures.shared} tokens in common and {figures.own} each"
    yield f"{name}: with hits", f"{figures.with_hits:,.0f} tokens/s", ""
    yield f"{name}: without", f"{figures.without_hits:,.0f} tokens/s", ""


def _overlap_rows(figures: OverlapFigures, model: str) -> Iterator[Row]:
    name = f"hand-over of {figures.prompt} tokens, {figures.bytes / 1e6:.1f} MB by {figures.transport}"
    yield f"{name}, of", model, ""
    yield f"{name}: to come when computed", f"{figures.outstanding_share:.1%}", f"at most {MOST_OUTSTANDING:.0%}"
    yield f"{name}: behind that", f"{1e3 * figures.exposed_seconds:,.1f} ms", ""
    if figures.whole_seconds is not None:
        yield f"{name}: if all is", f"{1e3 * figures.whole_seconds:,.1f} ms", ""
        yield f"{name}: behind that, of all", f"{figures.exposed_share:.1%}", f"at most {MOST_EXPOSED:.0%}"


def _transfer_rows(figures: TransferFigures) -> Iterator[Row]:
    name = f"{figures.bytes / 1e6:.0f} MB of state"
    for key, what in (
        ("bare_grpc", f"bare gRPC, {figures.chunk_bytes:,} bytes a message"),
        ("bare_grpc_lanes", f"the same, {figures.lanes} connections"),
        ("grpc", f"{name} by gRPC"),
        ("bare_tcp", "bare TCP"),
        ("shm", f"{name} by shared memory"),
        ("sealing", "sealing, one thread"),
        ("opening", "checking seals, one thread"),
    ):
        yield what, f"{getattr(figures, key) / 1e6:,.0f} MB/s", ""
    yield "gRPC, of bare gRPC", f"{figures.grpc_share:.1%}", f"at least {LEAST_GRPC_SHARE:.0%}"
    yield "shared memory, of bare TCP", f"{figures.shm_share:.1%}", f"at least {LEAST_SHM_SHARE:.0%}"


def _stream_rows(figures: StreamFigures) -> Iterator[Row]:
    name = f"{figures.streams} streams of {figures.prompt} + {figures.tokens} tokens"
    yield f"{name}: equal to the engine alone", f"{figures.equal}", f"{figures.streams}"
    yield f"{name}: open at a time", f"{figures.held}", f"{figures.streams}"
    yield f"{name}: answering at a time", f"{figures.answering}", ""
    yield f"{name}: together", f"{figures.tokens_per_second:,.0f} tokens/s", ""
