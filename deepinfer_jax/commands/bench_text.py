"""Results of ``deepinfer-jax bench`` as text, for people."""

from __future__ import annotations

from deepinfer_jax.bench.agreement import Agreement
from deepinfer_jax.bench.comparison import Comparison
from deepinfer_jax.bench.machine import MachineRates
from deepinfer_jax.bench.model import ModelFigures
from deepinfer_jax.commands.table import aligned


def figures_text(figures: ModelFigures) -> str:
    """One line per figure."""
    rows = [("figure", "best", "median")]
    for name, digits in (("prefill_tokens_per_second", 0), ("decode_tokens_per_second", 1), ("decode_step_ms", 2)):
        best, median = getattr(figures, name), getattr(figures, f"{name}_median")
        rows.append((name, f"{best:,.{digits}f}", f"{median:,.{digits}f}"))
    rows.append(("compile_seconds", f"{figures.compile_seconds:.1f}", ""))
    rows.append(("peak_memory_bytes", f"{figures.peak_memory_bytes:,}", ""))
    rows.append(("load_average", f"{figures.load_average:.2f}", ""))
    return aligned(rows, frozenset({1, 2}))


def comparison_text(result: Comparison) -> str:
    """Rates, ratios, parts of the machine, and the circumstances."""
    workload = f"prompt {result.prompt}, {result.steps} steps, {result.processors} processors; tokens per second"
    parts = [
        f"Engines ({workload})\n{_rows(result)}",
        f"Ratios, this engine over a peer\n{_ratios(result)}" if result.ratios else "",
        f"Machine\n{_machine(result.machine)}" if result.machine else "",
        f"Part of the machine that best turns reach\n{_fractions(result)}" if result.fractions else "",
        "".join(f"{name} {version}\n" for name, version in sorted(result.versions.items())),
        f"load average {result.load_average_before:.2f} before, {result.load_average_after:.2f} after\n",
    ]
    return "\n".join(part for part in parts if part)


def agreement_text(result: Agreement) -> str:
    """One sentence, and a line for every prompt that differs."""
    prompts = f"prompts of {result.length} tokens with a margin of {result.margin:g}, of {result.drawn} drawn"
    equal = f"{result.equal} of {result.compared} first tokens ({result.share:.0%}) equal those of {result.peer}"
    text = f"{equal}, numerics {result.numerics}; {prompts}\n"
    for margin, ours, theirs in result.differing:
        text += f"margin {margin:.2f}: {ours} here, {theirs} there\n"
    return text


def _rows(result: Comparison) -> str:
    heading = ("engine", "numerics", "batch", "prefill", "median", "decode", "median", "CPU ms/token", "turns")
    rows = [
        (
            row.engine,
            row.numerics,
            row.batch,
            f"{row.prefill_best:,.0f}",
            f"{row.prefill_median:,.0f}",
            f"{row.decode_best:,.1f}",
            f"{row.decode_median:,.1f}",
            f"{row.cpu_ms_per_token:.2f}",
            row.turns,
        )
        for row in sorted(result.rows, key=lambda row: row.batch)
    ]
    return aligned([heading, *rows], frozenset(range(2, 9)))


def _ratios(result: Comparison) -> str:
    heading = ("what", "ours", "peer", "best", "median", "aim")
    rows = [(one.what, one.ours, one.peer, f"{one.best:.2f}", f"{one.median:.2f}", one.aim) for one in result.ratios]
    return aligned([heading, *rows], frozenset({3, 4, 5}))


def _machine(rates: MachineRates) -> str:
    rows = [
        ("measured", "rate"),
        ("matrix product, float32", f"{rates.gemm_float32 / 1e9:,.0f} GFLOP/s"),
        ("matrix product, bfloat16", f"{rates.gemm_bfloat16 / 1e9:,.0f} GFLOP/s"),
        ("read", f"{rates.read / 1e9:,.1f} GB/s"),
    ]
    return aligned(rows, frozenset({1}))


def _fractions(result: Comparison) -> str:
    heading = ("numerics", "batch", "prefill, of matrix products", "decode, of read")
    ordered = sorted(result.fractions, key=lambda one: one.batch)
    rows = [(one.numerics, one.batch, f"{one.gemm:.0%}", f"{one.read:.0%}") for one in ordered]
    return aligned([heading, *rows], frozenset({1, 2, 3}))
