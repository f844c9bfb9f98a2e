"""What a comparison of engines found: rates per engine, ratios between engines, and the part of the machine reached.

On a machine that is shared or throttled the absolute figures move by a factor of two; ratios within one run hold. The
best of several turns is what an engine can do, and the median beside it shows how quiet the machine was.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from deepinfer_jax.bench.cost import decode_bytes_per_step, prefill_flops_per_token
from deepinfer_jax.bench.machine import MachineRates
from deepinfer_jax.bench.process import Turn
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import Numerics

OWN_NAME = "deepinfer-jax"


@dataclasses.dataclass(frozen=True)
class Row:
    """One engine, in one numerics, at one batch: tokens per second over the whole batch.

    A turn's decode rate is the mean over its steps. ``turns``: how many count. ``cpu_ms_per_token``: processor time of
    the median turn, over all its tokens.
    """

    engine: str
    numerics: str
    batch: int
    prefill_best: float
    prefill_median: float
    decode_best: float
    decode_median: float
    cpu_ms_per_token: float
    turns: int


@dataclasses.dataclass(frozen=True)
class Ratio:
    """This engine's figure divided by a peer's: of the best turns (``best``, which counts) and of the medians.

    ``ours`` and ``peer`` name engine and numerics. ``aim``: what the project aims at.
    """

    what: str
    ours: str
    peer: str
    best: float
    median: float
    aim: float


@dataclasses.dataclass(frozen=True)
class Fraction:
    """The part of the machine that this engine's best turns reach; see :mod:`deepinfer_jax.bench.cost`.

    ``gemm``: of the measured rate of matrix products in the compute dtype, in prefill. ``read``: of the measured read
    bandwidth, in decode.
    """

    numerics: str
    batch: int
    gemm: float
    read: float


@dataclasses.dataclass(frozen=True)
class Failure:
    """An engine that could not be set up, or that stopped in the middle."""

    engine: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All results of a run. ``load_average_*``: the machine's one-minute load when it began and when it ended.

    ``versions``: of every library involved. ``parameters``: of the models, where an engine tells.
    """

    prompt: int
    steps: int
    processors: int
    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]
    fractions: tuple[Fraction, ...]
    machine: MachineRates | None
    versions: Mapping[str, str]
    parameters: Mapping[str, int]
    failures: tuple[Failure, ...]
    load_average_before: float
    load_average_after: float


@dataclasses.dataclass(frozen=True)
class Question:
    """A ratio that the project wants to know: best of this engine's rows over best of the peers' rows.

    ``rate`` is "prefill" or "decode". ``numerics`` restricts both sides, ``peer`` the other one; None means any.
    """

    what: str
    rate: str
    batch: int
    aim: float
    numerics: str | None = None
    peer: str | None = None

    def answer(self, rows: Iterable[Row]) -> Ratio | None:
        """The ratio, or None where one side was not measured."""
        here = [row for row in rows if row.batch == self.batch and self.numerics in (None, row.numerics)]
        ours = [row for row in here if row.engine == OWN_NAME]
        theirs = [row for row in here if row.engine != OWN_NAME and self.peer in (None, row.engine)]
        if not ours or not theirs:
            return None
        left, right = max(ours, key=self._best), max(theirs, key=self._best)
        return Ratio(
            what=self.what,
            ours=left.numerics,
            peer=f"{right.engine} {right.numerics}",
            best=self._best(left) / self._best(right),
            median=self._median(left) / self._median(right),
            aim=self.aim,
        )

    def _best(self, row: Row) -> float:
        return row.prefill_best if self.rate == "prefill" else row.decode_best

    def _median(self, row: Row) -> float:
        return row.prefill_median if self.rate == "prefill" else row.decode_median


QUESTIONS = (
    Question("prefill, batch 8, f32", "prefill", 8, 1.5, numerics="f32"),
    Question("prefill, batch 8, bf16", "prefill", 8, 1.3, numerics="bf16"),
    Question("decode, batch 8", "decode", 8, 2.0),
    Question("decode, batch 1, beside fastllm", "decode", 1, 1.0, peer="fastllm"),
    Question("decode, batch 1, beside torch", "decode", 1, 4.0, peer="torch"),
)


def ratios(rows: Sequence[Row]) -> tuple[Ratio, ...]:
    """The answers to :data:`QUESTIONS` that the rows allow."""
    answers = (question.answer(rows) for question in QUESTIONS)
    return tuple(answer for answer in answers if answer is not None)


def row_of(engine: str, numerics: str, batch: int, prompt: int, steps: int, turns: Sequence[Turn]) -> Row:
    """Summarise one or more turns of a workload."""
    prefill = [batch * prompt / turn.prefill_seconds for turn in turns]
    decode = [turn.decode_tokens / turn.decode_seconds for turn in turns]
    return Row(
        engine=engine,
        numerics=numerics,
        batch=batch,
        prefill_best=max(prefill),
        prefill_median=statistics.median(prefill),
        decode_best=max(decode),
        decode_median=statistics.median(decode),
        cpu_ms_per_token=1e3 * statistics.median(turn.cpu_seconds for turn in turns) / (batch * (prompt + steps)),
        turns=len(turns),
    )


def fractions(
    rows: Iterable[Row], config: ModelConfig, rates: MachineRates, prompt: int, steps: int
) -> tuple[Fraction, ...]:
    """The part of the machine that each of this engine's rows reaches, at the middle of the decoded positions."""
    flops = prefill_flops_per_token(config, prompt)
    found = []
    for row in rows:
        if row.engine == OWN_NAME:
            numerics = Numerics.preset(row.numerics)
            step_bytes = decode_bytes_per_step(config, numerics, row.batch, prompt + steps // 2)
            found.append(
                Fraction(
                    numerics=row.numerics,
                    batch=row.batch,
                    gemm=row.prefill_best * flops / rates.gemm(numerics.dtype),
                    read=row.decode_best / row.batch * step_bytes / rates.read,
                )
            )
    return tuple(found)
