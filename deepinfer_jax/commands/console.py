"""The terminal of a running command: results on standard output, everything about them on standard error."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from deepinfer_jax.checkpoint.reader import load_model
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.params import parameters
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics


class Console:
    """Where a command writes. ``quiet`` silences standard error, errors excepted.

    Both streams remember whether their last line is open, so that on a terminal, where they mix, each begins on a line
    of its own.
    """

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._text_open = False
        self._remarks_open = False
        # A locale whose encoding lacks a character shall cost that character and not the whole answer.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")

    def text(self, piece: str) -> None:
        """Write a piece of the result to standard output, at once."""
        if piece:
            self._close_remarks()
            # Set first: an interrupt may fall between the two.
            self._text_open = not piece.endswith("\n")
            click.echo(piece, nl=False)

    def close_text(self) -> None:
        """End the last line of the result, if it is open."""
        if self._text_open:
            self.text("\n")

    def remark(self, piece: str) -> None:
        """Write a piece of text that accompanies the result, such as a model's reasoning."""
        if piece and not self._quiet:
            self._remarks_open = not piece.endswith("\n")
            click.echo(piece, nl=False, err=True)

    def note(self, line: str, *, terminal_only: bool = False) -> None:
        """Write one line about the command's work."""
        if terminal_only and not sys.stderr.isatty():
            return
        self._close_remarks()
        self.remark(f"{line}\n")

    @contextmanager
    def progress(self, total: int, unit: str) -> Iterator[Callable[[], None]]:
        """A progress bar over ``total`` steps, shown on a terminal only; the value makes one step."""
        # None leaves the decision to tqdm, which looks at the stream.
        disabled = True if self._quiet else None
        with tqdm(total=total, unit=unit, leave=False, disable=disabled, file=sys.stderr) as bar:
            yield lambda: bar.update(1)

    def load_model(self, directory: Path, config: ModelConfig, numerics: Numerics, **options: Any) -> Model:
        """Read a checkpoint's weights under a progress bar; options and errors as of :func:`load_model`."""
        read = [item for item in parameters(Model.describe(config)) if item.released]
        with self.progress(len(read), " weights") as step:
            return load_model(directory, numerics, progress=lambda name: step(), **options)[1]

    def _close_remarks(self) -> None:
        if self._remarks_open:
            self.remark("\n")
