"""A profile of a few of an engine's steps, on host and device, for the tools that read ``jax.profiler`` traces."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from pathlib import Path

import jax.profiler

from deepinfer_jax.errors import InputError

STEP_NAME = "engine step"


@dataclasses.dataclass
class _Trace:
    """``first``: number of the first traced step; None before it begins."""

    directory: Path
    steps: int
    first: int | None = None


class Tracer:
    """At most one trace at a time: it begins with the next step and ends when so many steps were read.

    Reading the last step waits for it, so that its device work is in the trace; the step behind it is on its way by
    then, and in part too.
    """

    def __init__(self) -> None:
        self._trace: _Trace | None = None

    def want(self, directory: Path, steps: int) -> None:
        """Ask for a trace.

        Raises:
          InputError: fewer steps than one, or another trace is wanted or runs.
        """
        if steps < 1:
            raise InputError("trace steps", steps, "1 or more")
        if self._trace is not None:
            remedy = f"wait for the end of the one into {self._trace.directory}"
            raise InputError("trace", str(directory), "one trace at a time", remedy)
        self._trace = _Trace(directory, steps)

    def begin(self, number: int) -> None:
        """Before the work of a step begins, on host or device: a trace that is wanted begins with step ``number``."""
        trace = self._trace
        if trace is None or trace.first is not None:
            return
        try:
            jax.profiler.start_trace(trace.directory)
        except RuntimeError as error:
            # The process has one profiler, and steps go on whoever uses it.
            self._trace = None
            warnings.warn(f"no trace into {trace.directory}: {error}", RuntimeWarning, stacklevel=2)
            return
        trace.first = number

    def step(self, number: int) -> contextlib.AbstractContextManager[object]:
        """Names the dispatch of a step in the trace."""
        if self._trace is None or self._trace.first is None:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation(STEP_NAME, step_num=number)

    def read(self, number: int) -> None:
        """A step was read: the last one ends the trace."""
        trace = self._trace
        if trace is not None and trace.first is not None and number >= trace.first + trace.steps - 1:
            self.end()

    def idle(self) -> None:
        """Nothing is left to do: a trace that runs ends, one that is wanted waits."""
        if self._trace is not None and self._trace.first is not None:
            self.end()

    def end(self) -> None:
        """End a trace that runs, and forget one that is wanted."""
        trace, self._trace = self._trace, None
        if trace is not None and trace.first is not None:
            jax.profiler.stop_trace()
