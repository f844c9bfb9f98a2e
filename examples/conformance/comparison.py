"""Results beside a kit: one outcome for every array and every chain."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from examples.conformance.kit import CHAINS_FILE, INPUTS, Chain, Kit, Results, order_of, taps_file
from examples.conformance.selections import SCORES_OF, Arrays, pick_offsets

# A selection gap from which on every implementation chooses the same in float32.
CLEAR_GAP = 2e-5
# A chain's token decides where its margin is this large; the second bound is for sequences with an unclear selection.
DECISIVE_MARGIN, DECISIVE_MARGIN_UNCLEAR = 1e-3, 0.1


@dataclasses.dataclass(frozen=True)
class Tolerances:
    """Of one numerics: for arrays of values, with exceptions by array, and for differing picks.

    ``relative``: whether differences are root mean squares over all rows, relative to the kit's; otherwise they are the
    largest ``|got - want| / max(1, |want|)``. ``near_tie``: see :func:`examples.conformance.selections.pick_offsets`.
    """

    relative: bool
    values: float
    exceptions: Mapping[str, float]
    near_tie: float


# In `released`, outputs pass products whose inputs are rounded to fp8: there two implementations differ by a bin.
TOLERANCES: Mapping[str, Tolerances] = MappingProxyType(
    {
        "f32": Tolerances(False, 1e-4, MappingProxyType({"logits": 2e-4}), near_tie=CLEAR_GAP),
        "released": Tolerances(True, 1e-2, MappingProxyType({"attn_out": 5e-2, "ffn_out": 5e-2}), near_tie=0.25),
    }
)


class Verdict(enum.Enum):
    """What became of an array: ``UNKNOWN`` ones are in the results only, and are not looked at."""

    PASS = "pass"
    FAIL = "FAIL"
    MISSING = "missing"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One line of a report. ``difference`` and ``tolerance`` are None where nothing could be compared."""

    name: str
    verdict: Verdict
    difference: float | None = None
    tolerance: float | None = None
    remark: str = ""

    @classmethod
    def of(cls, name: str, difference: float, tolerance: float, remark: str = "") -> Outcome:
        """Pass up to and including the tolerance; NaN fails."""
        return cls(name, Verdict.PASS if difference <= tolerance else Verdict.FAIL, difference, tolerance, remark)


def compare(kit: Kit, results: Results) -> list[Outcome]:
    """Every array of the kit, then what is in the results only, then what is damaged there."""
    outcomes = [_compare_chain(name, chain, results.chains.get(name)) for name, chain in kit.chains.items()]
    unknown = [f"{CHAINS_FILE} {name}" for name in results.chains if name not in kit.chains]
    for numerics, arrays in kit.taps.items():
        got = results.taps.get(numerics, {})
        compared = {name for name in arrays if name.rpartition(".")[2] not in INPUTS}
        for prompt in kit.prompts:
            outcomes += _compare_prompt(numerics, _of(prompt, arrays), _of(prompt, got), f"{numerics} {prompt}")
        unknown += [f"{taps_file(numerics)} {name}" for name in got if name not in compared]
    outcomes += [Outcome(name, Verdict.UNKNOWN) for name in unknown]
    return outcomes + [Outcome(name, Verdict.FAIL, remark=fault) for name, fault in results.damaged.items()]


def _of(prompt: str, arrays: Arrays) -> Arrays:
    return {name.removeprefix(f"{prompt}."): array for name, array in arrays.items() if name.startswith(f"{prompt}.")}


def _compare_chain(name: str, chain: Chain, got: tuple[int, ...] | None) -> Outcome:
    """The margin of the first step that chose otherwise, which must not decide; behind it nothing is compared."""
    label = f"chain {name}"
    if got is None:
        return Outcome(label, Verdict.MISSING)
    clear = chain.selection_gap is None or chain.selection_gap >= CLEAR_GAP
    bound = DECISIVE_MARGIN if clear else DECISIVE_MARGIN_UNCLEAR
    if len(got) != len(chain.tokens):
        return Outcome(label, Verdict.FAIL, remark=f"{len(got)} tokens instead of {len(chain.tokens)}")
    for step, (theirs, ours) in enumerate(zip(got, chain.tokens, strict=True)):
        if theirs != ours:
            remark = f"step {step} chose {theirs} instead of {ours}"
            return Outcome.of(label, max(0.0, chain.margins[step]), bound, remark)
    return Outcome.of(label, 0.0, bound)


def _compare_prompt(numerics: str, want: Arrays, got: Arrays, label: str) -> Iterator[Outcome]:
    """The arrays of one prompt in the order in which they are computed.

    A row whose picks differ in a near tie computes something else from there on, and is left out.
    """
    tolerances = TOLERANCES[numerics]
    kept = np.ones(len(want.get("positions", ())), bool)
    for name in sorted(want, key=order_of):
        expected, kind = want[name], name.rpartition(".")[2]
        if kind in INPUTS:
            continue
        tolerance = tolerances.exceptions.get(kind, tolerances.values)
        array, title = got.get(name), f"{label} {name}"
        if array is None:
            yield Outcome(title, Verdict.MISSING)
        elif (fault := _misfit(array, expected)) is not None:
            yield Outcome(title, Verdict.FAIL, remark=fault)
        elif not kept.any():
            yield Outcome(title, Verdict.FAIL, remark="no row is left: all differed in near ties before")
        elif kind == "positions":
            yield Outcome.of(title, float(np.abs(array - expected).max(initial=0)), 0.0)
        elif kind in SCORES_OF:
            scores = want[name.removesuffix(kind) + SCORES_OF[kind]]
            offsets, differing = np.where(kept, pick_offsets(array, expected, scores), 0), _rows_differ(array, expected)
            remark = f"{(kept & differing).sum()} of {kept.sum()} rows differ" if (kept & differing).any() else ""
            kept &= ~differing
            yield Outcome.of(title, float(offsets.max()), tolerances.near_tie, remark)
        else:
            measure = _relative if tolerances.relative else _largest
            yield Outcome.of(title, measure(array[kept], expected[kept]), tolerance, _left_out(kept))


def _misfit(got: np.ndarray, want: np.ndarray) -> str | None:
    """What is wrong with an array before its numbers are looked at."""
    if got.shape != want.shape:
        return f"shape {list(got.shape)} instead of {list(want.shape)}"
    kind = jnp.integer if jnp.issubdtype(want.dtype, jnp.integer) else jnp.floating
    if not jnp.issubdtype(got.dtype, kind):
        return f"dtype {got.dtype} instead of {kind.__name__}"
    return None


def _rows_differ(got: np.ndarray, want: np.ndarray) -> Bool[np.ndarray, " rows"]:
    """Whether rows hold other picks, whatever their order."""
    return (np.sort(got, axis=1) != np.sort(want, axis=1)).any(axis=1)


def _left_out(kept: Bool[np.ndarray, " rows"]) -> str:
    return "" if kept.all() else f"without {(~kept).sum()} of {kept.size} rows"


def _largest(got: np.ndarray, want: np.ndarray) -> float:
    return float((_difference(got, want) / np.maximum(1, np.abs(_finite(want)))).max(initial=0))


def _relative(got: np.ndarray, want: np.ndarray) -> float:
    size = np.sqrt(np.square(_finite(want)).mean()) if want.size else 1.0
    difference = np.sqrt(np.square(_difference(got, want)).mean()) if want.size else 0.0
    return float(difference / size) if size > 0 else float(difference)


def _difference(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Distances; 0 where both are the same infinity, infinite where one alone is infinite or a NaN."""
    ours, theirs = want.astype(np.float64), got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        distance = np.abs(theirs - ours)
    return np.where(theirs == ours, 0, np.where(np.isnan(distance), np.inf, distance))


def _finite(values: np.ndarray) -> np.ndarray:
    exact = values.astype(np.float64)
    return np.where(np.isfinite(exact), exact, 0)
