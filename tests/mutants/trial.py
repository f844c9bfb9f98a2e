"""A copy of the repository in which one change after another is tried."""

import dataclasses
import enum
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from serving.proto.build import ROOT, generate
from tests.mutants.table import Mutant

REPOSITORY = Path(__file__).resolve().parents[2]
COMPILATION_CACHE = ".jax_cache"
LONGEST_TRIAL = 300  # seconds

_FIRST_FAILURE = re.compile(r"^FAILED (?P<test>.+?)(?: - (?P<reason>.*))?$", re.MULTILINE)
# A test that only trips over a change (a type error, a shape that does not fit) shows nothing about what it checks.
_NOTICED = re.compile(r"AssertionError|assert |Failed: DID NOT RAISE")


class Verdict(enum.Enum):
    """What became of a change. INVALID: the tests neither passed nor failed by what they assert."""

    CAUGHT = "caught"
    SURVIVED = "survived"
    INVALID = "invalid"


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of one pytest run: the first failing test, or else what pytest printed; wall time in seconds."""

    verdict: Verdict
    test: str
    output: str
    seconds: float


def copy_repository(target: Path) -> None:
    """Copy what git tracks or would track, and make the protocol's modules, which it does not.

    The compilation cache is shared, so that unchanged code compiles once.
    """
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        source, destination = REPOSITORY / name, target / name
        if source.is_file():  # a deleted file stays listed until that is committed
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, destination)
    generate(target / ROOT.relative_to(REPOSITORY))
    cache = REPOSITORY / COMPILATION_CACHE
    cache.mkdir(exist_ok=True)
    (target / COMPILATION_CACHE).symlink_to(cache)


def run_tests(copy: Path, tests: Iterable[str], limit: float | None = None) -> Result:
    """Run tests in the copy until the first failure; ``limit`` is in seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "--tb=short", "-p", "no:cacheprovider", *tests]
    # Compiled modules are told apart by size and second, so a change and its reversal could be taken for each other.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "250"}
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, check=False, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return Result(Verdict.INVALID, "", f"no end within {limit} seconds", time.monotonic() - start)
    seconds, output = time.monotonic() - start, done.stdout + done.stderr
    if done.returncode == 0:
        return Result(Verdict.SURVIVED, "", output, seconds)
    failure = _FIRST_FAILURE.search(done.stdout)
    if done.returncode == 1 and failure and _NOTICED.match(failure["reason"] or ""):
        return Result(Verdict.CAUGHT, failure["test"], output, seconds)
    return Result(Verdict.INVALID, failure["test"] if failure else "", output, seconds)


def try_mutant(copy: Path, mutant: Mutant) -> Result:
    """Apply a change, run its tests, and put the file back."""
    file = copy / mutant.file
    source = file.read_text(encoding="utf-8")
    file.write_text(mutant.applied(source), encoding="utf-8")
    try:
        return run_tests(copy, mutant.caught_by, LONGEST_TRIAL)
    finally:
        file.write_text(source, encoding="utf-8")
