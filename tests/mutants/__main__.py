"""Try mutants: ``python -m tests.mutants [--list] [--only NAME ...]``. Exit status 1 unless all are caught."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.table import Mutant, mutants
from tests.mutants.trial import Result, Verdict, copy_repository, run_tests, try_mutant

LAST_LINES = 30  # of pytest's output, where a run went wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the mutants and what they break, and stop")
    parser.add_argument("--only", action="append", metavar="NAME", help="try this mutant alone; may be repeated")
    options = parser.parse_args(arguments)
    chosen = mutants()
    if options.only:
        unknown = sorted(set(options.only) - {mutant.name for mutant in chosen})
        if unknown:
            parser.error(f"no mutant {', '.join(unknown)}; --list prints all of them")
        chosen = [mutant for mutant in chosen if mutant.name in options.only]
    if options.list:
        width = max(len(mutant.name) for mutant in chosen)
        for mutant in chosen:
            print(f"{mutant.name:{width}}  {mutant.file}: {mutant.breaks}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copy = Path(directory)
        copy_repository(copy)
        return try_all(copy, chosen)


def try_all(copy: Path, chosen: Sequence[Mutant]) -> int:
    """Run every selection unchanged, then one mutant after the other; print the table as it grows."""
    for mutant in chosen:
        mutant.applied((copy / mutant.file).read_text(encoding="utf-8"))
    selections = sorted({test for mutant in chosen for test in mutant.caught_by})
    unchanged = run_tests(copy, selections)
    print(f"{len(selections)} selections without a change: {unchanged.seconds:.0f} s", flush=True)
    if unchanged.verdict is not Verdict.SURVIVED:
        print_end(unchanged)
        return 1
    width = max(len(mutant.name) for mutant in chosen)
    results = []
    for mutant in chosen:
        result = try_mutant(copy, mutant)
        results.append(result)
        print(f"{mutant.name:{width}}  {result.seconds:5.1f} s  {result.verdict.value:8}  {result.test}", flush=True)
        if result.verdict is Verdict.INVALID:
            print_end(result)
    counts = {verdict: sum(result.verdict is verdict for result in results) for verdict in Verdict}
    seconds = unchanged.seconds + sum(result.seconds for result in results)
    print(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()) + f" in {seconds:.0f} s")
    return 0 if counts[Verdict.CAUGHT] == len(results) else 1


def print_end(result: Result) -> None:
    """Print the last lines of a run that went wrong."""
    print("\n".join(f"    {line}" for line in result.output.splitlines()[-LAST_LINES:]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
