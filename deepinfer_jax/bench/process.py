"""An engine in a process of its own, which answers turns over :mod:`deepinfer_jax.bench.drivers.line_protocol`.

Between turns the process is stopped (SIGSTOP): whatever threads an idle engine keeps spinning, the others have the
machine to themselves, and start-up and compilation are still paid once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

# Of what a failed engine wrote last, this much is quoted.
QUOTED_CHARACTERS = 300
# An engine whose output has ended gets this long to end itself.
END_SECONDS = 5.0


class EngineError(Exception):
    """An engine that could not be started, ended, hung or answered what is no answer; the message says which."""


@dataclasses.dataclass(frozen=True)
class EngineCommand:
    """How an engine is started.

    ``name`` and ``numerics`` are how results call it. ``arguments``: the command line. ``environment``: all of its
    environment variables. ``processors``: it may use this many of those that this process may use.
    """

    name: str
    numerics: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    processors: int

    @property
    def title(self) -> str:
        """Name and numerics, for people."""
        return f"{self.name} {self.numerics}"


@dataclasses.dataclass(frozen=True)
class Turn:
    """Times of one turn, in seconds; see the line protocol."""

    prefill_seconds: float
    decode_seconds: float
    decode_tokens: float
    cpu_seconds: float

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Turn:
        """Check an answer.

        Raises:
          EngineError: a time is missing or is no positive number.
        """
        fields = {field.name: answer.get(field.name) for field in dataclasses.fields(cls)}
        for name, value in fields.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise EngineError(f"answered {name} {value!r}, expected a number above 0")
        return cls(**{name: float(answer[name]) for name in fields})


class EngineProcess:
    """A running engine, used as a context: the process ends with it.

    ``facts`` is what the engine said of itself when it was ready. What it prints beside answers is in ``log``.
    """

    def __init__(self, command: EngineCommand, log: Path, start_seconds: float) -> None:
        """Start the engine, wait until it is ready, and stop it until its first turn.

        Raises:
          EngineError: it could not be started, or was not ready within ``start_seconds``.
        """
        self._log = log
        self._received = b""
        with log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    command.arguments,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    env=dict(command.environment),
                    bufsize=0,
                )
            except OSError as error:
                raise EngineError(f"could not be started: {error}") from error
        try:
            _limit_processors(self._process.pid, command.processors)
            self.facts: Mapping[str, Any] = self._read(start_seconds)
            self._process.send_signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    @property
    def identifier(self) -> int:
        """The number of the process."""
        return self._process.pid

    def turn(self, batch: int, prompt: int, steps: int, seed: int, seconds: float) -> Turn:
        """Let the engine run one turn, its warm-up included the first time, within ``seconds``.

        Raises:
          EngineError: it ended, gave no answer in time, or answered what is no turn. The process is gone then.
        """
        request = json.dumps({"batch": batch, "prompt": prompt, "steps": steps, "seed": seed})
        try:
            self._process.send_signal(signal.SIGCONT)
            self._write(request)
            turn = Turn.of(self._read(seconds))
            self._process.send_signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise
        return turn

    def close(self) -> None:
        """End the process; it holds nothing worth saving."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            raise EngineError(self._ending()) from None

    def _read(self, seconds: float) -> Mapping[str, Any]:
        """The next line, a JSON object."""
        pipe = self._process.stdout
        assert pipe is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise EngineError(f"gave no answer within {seconds:g} s{self._last_words()}")
            piece = os.read(pipe.fileno(), 1 << 16)
            if not piece:
                raise EngineError(self._ending())
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EngineError(f"answered {line[:QUOTED_CHARACTERS].decode(errors='replace')!r}, expected a JSON object")
        return answer

    def _ending(self) -> str:
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"closed its output without ending{self._last_words()}"
        return f"ended with status {status}{self._last_words()}"

    def _last_words(self) -> str:
        return quoted_end(self._log)


def quoted_end(log: Path) -> str:
    """The last line of a log that says anything, and where the log is: the end of an error's sentence."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    spoken = [line.strip() for line in lines if line.strip()]
    last = f": {spoken[-1][-QUOTED_CHARACTERS:]}" if spoken else ""
    return f"{last} (see {log})"


def run_to_end(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Run a program that prepares something; what it prints is in ``log``.

    Raises:
      EngineError: it could not be started or failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                arguments, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
            )
        except OSError as error:
            raise EngineError(f"could not be started: {error}") from error
    if done.returncode:
        raise EngineError(f"{Path(arguments[0]).name} ended with status {done.returncode}{quoted_end(log)}")


def _limit_processors(process: int, processors: int) -> None:
    """Leave a process that many processors, before it counts them; where the system cannot, it has all of them."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process, sorted(os.sched_getaffinity(0))[:processors])
