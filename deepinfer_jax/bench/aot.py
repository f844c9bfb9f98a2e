"""Compile the released size for accelerators that are not there, and check the compiler's own memory figures.

``python -m deepinfer_jax.bench.aot`` (or ``make aot``): every compile runs in a process of its own, under limits of
time and memory; results are collected, printed and checked. What this proves, and what not: docs/accelerators.md.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

from deepinfer_jax.bench.abstract_step import Figures
from deepinfer_jax.bench.targets import GIB, TARGETS, Target, target_named
from deepinfer_jax.errors import DeepInferError, InputError

# The packed weights of "released" unpack slowly for TPUs still: it is compiled on request.
NUMERICS = ("bf16", "released")
DEFAULT_NUMERICS = ("bf16",)
SECONDS = 120
MEMORY = 6 * GIB
SMALLEST_CACHE_SHARE = 0.2
# A compile may wait for other programs' use of the processors; beyond this it hangs.
LONGEST_WAIT = 900
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
HEADINGS = (
    "target",
    "numerics",
    "weights GiB",
    "caches GiB",
    "temporaries GiB",
    "in use of GiB",
    "updated in place",
    "lower s",
    "compile s",
    "processor s",
    "peak GiB",
    "checks",
)


class CompileError(DeepInferError):
    """A compile that failed, took too long or took too much memory."""

    subject = "compile"


def run_compile(target: Target, numerics: str) -> Figures:
    """Compile in a process of its own.

    Raises:
      CompileError: with the last line that the process wrote, and more in a note, or with the limit it passed.
    """
    key = f"{target.name} {numerics}"
    with tempfile.TemporaryDirectory() as directory:
        result, log = Path(directory, "figures.json"), Path(directory, "log")
        command = [sys.executable, "-m", "deepinfer_jax.bench.abstract_step", target.name, numerics, str(result)]
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            try:
                _watch(process, key)
            finally:
                process.kill()
                process.wait()
        if process.returncode or not result.exists():
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            error = CompileError(key, lines[-1] if lines else "ended without a word", "a program that compiles")
            error.add_note("\n".join(lines[-20:]))
            raise error
        return Figures(**json.loads(result.read_text(encoding="utf-8")))


def _watch(process: subprocess.Popen[bytes], key: str) -> None:
    """Wait for the end of a process or of its limits."""
    begin = time.monotonic()
    while process.poll() is None:
        if time.monotonic() - begin > LONGEST_WAIT:
            raise CompileError(key, f"{LONGEST_WAIT} s without an end", f"a compile of at most {SECONDS} s")
        if resident_bytes(process.pid) > MEMORY:
            raise CompileError(key, f"over {MEMORY // GIB} GiB of host memory", f"at most {MEMORY // GIB} GiB")
        time.sleep(0.1)


def resident_bytes(process: int) -> int:
    """Resident memory of a process; 0 where the system does not tell, or after its end."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))


def problems(figures: Figures) -> list[str]:
    """What the figures of a compile do not fulfil; empty if all is well.

    Compile time is the smaller of wall-clock and processor seconds: the one counts what other programs took, the other
    what ran at the same time.
    """
    found = []
    if figures.temporaries >= figures.smallest_pool:
        found.append(f"temporaries of {_gib(figures.temporaries)} GiB, a pool has {_gib(figures.smallest_pool)}")
    if figures.aliased < figures.state:
        found.append(f"{_gib(figures.state - figures.aliased)} GiB of the state are not updated in place")
    if figures.pool_copies:
        found.append(f"{figures.pool_copies} copies of a pool")
    if figures.needed > figures.memory:
        found.append(f"needs {_gib(figures.needed)} GiB of {_gib(figures.memory)}")
    if figures.state < SMALLEST_CACHE_SHARE * figures.memory:
        found.append(f"caches fill less than {SMALLEST_CACHE_SHARE:.0%} of the memory")
    seconds = min(figures.lower_seconds + figures.compile_seconds, figures.processor_seconds)
    if seconds > SECONDS:
        found.append(f"took {seconds:.0f} s, more than {SECONDS}")
    if figures.peak_memory > MEMORY:
        found.append(f"took {_gib(figures.peak_memory)} GiB of host memory, more than {MEMORY // GIB}")
    return found


def table(results: Sequence[Figures]) -> str:
    """The figures as a Markdown table."""
    rows = [HEADINGS, ("---",) * len(HEADINGS), *map(_row, results)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(figures: Figures) -> tuple[str, ...]:
    return (
        target_named(figures.target).title,
        figures.numerics,
        _gib(figures.parameters),
        f"{_gib(figures.state)} ({figures.state / figures.memory:.0%})",
        _gib(figures.temporaries),
        f"{_gib(figures.needed)} of {_gib(figures.memory)}",
        f"{min(1.0, figures.aliased / figures.state):.0%}",
        f"{figures.lower_seconds:.0f}",
        f"{figures.compile_seconds:.0f}",
        f"{figures.processor_seconds:.0f}",
        _gib(figures.peak_memory),
        "; ".join(problems(figures)) or "hold",
    )


def _gib(number: int) -> str:
    return f"{number / GIB:.2f}"


def replace_measured(document: str, measured: str) -> str:
    """A document with the part between its two marks replaced.

    Raises:
      InputError: the document lacks the marks.
    """
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise InputError("--write", "a document without marks", f"one with {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{measured}\n{END}{tail}"


def _versions() -> str:
    packages = ("jax", *(target.wheel for target in TARGETS if target.wheel))
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)


@click.command()
@click.option("--target", "names", multiple=True, type=click.Choice([target.name for target in TARGETS]))
@click.option("--numerics", multiple=True, type=click.Choice(NUMERICS), help="bf16 unless given.")
@click.option("--write", type=click.Path(path_type=Path, dir_okay=False), help="Put the results into this document.")
def main(names: tuple[str, ...], numerics: tuple[str, ...], write: Path | None) -> None:
    """Compile the released-size decode step for 64 devices of each target, or of those given.

    Exit codes: 0 all checks hold; 1 a compile failed or a check does not hold; 2 a compiler's wheel is missing.
    """
    targets = [target for target in TARGETS if not names or target.name in names]
    results, failed = [], False
    try:
        for target in targets:
            target.check_wheel()
        for target in targets:
            for name in numerics or DEFAULT_NUMERICS:
                click.echo(f"compiling for {target.title}, numerics {name}", err=True)
                try:
                    results.append(run_compile(target, name))
                except CompileError as error:
                    click.echo("\n".join([*getattr(error, "__notes__", []), f"Error: {error}"]), err=True)
                    failed = True
        measured = table(results)
        click.echo(measured)
        if write is not None:
            document = write.read_text(encoding="utf-8")
            measured = f"{measured}\n\nMeasured with {_versions()}."
            write.write_text(replace_measured(document, measured), encoding="utf-8")
    except DeepInferError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    sys.exit(1 if failed or any(map(problems, results)) else 0)


if __name__ == "__main__":
    main()
