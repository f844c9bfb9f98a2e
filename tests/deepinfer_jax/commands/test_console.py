"""Where commands write: order of the two streams on a terminal, progress, and narrow encodings."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from deepinfer_jax.checkpoint.reader import load_model
from deepinfer_jax.commands import console as module
from deepinfer_jax.commands.console import Console
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import F32
from tests.golden import DATA


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """One terminal behind both streams; not a fixture, since pytest sets the streams anew before the test itself."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_text_reasoning_and_notes_stand_on_lines_of_their_own(monkeypatch):
    terminal = open_terminal(monkeypatch)
    console = Console(quiet=False)
    console.remark("Let me ")
    console.remark("see.")
    console.text("The ")
    console.text("")
    console.text("sea")
    console.close_text()
    console.close_text()
    console.note("2 tokens")
    assert terminal.getvalue() == "Let me see.\nThe sea\n2 tokens\n"


def test_a_note_closes_reasoning_that_no_text_followed(monkeypatch):
    terminal = open_terminal(monkeypatch)
    console = Console(quiet=False)
    console.remark("Let me")
    console.note("1 tokens")
    assert terminal.getvalue() == "Let me\n1 tokens\n"


def test_quiet_keeps_the_text_only(monkeypatch):
    terminal = open_terminal(monkeypatch)
    console = Console(quiet=True)
    console.remark("Let me see.")
    console.note("note")
    with console.progress(3, " weights") as step:
        step()
    console.text("The sea\n")
    console.close_text()
    assert terminal.getvalue() == "The sea\n"


def test_progress_and_passing_notes_are_for_terminals(monkeypatch):
    terminal = open_terminal(monkeypatch)
    console = Console(quiet=False)
    with console.progress(3, " weights") as step:
        step()
    console.note("compiling", terminal_only=True)
    assert "/3 [" in terminal.getvalue()
    assert terminal.getvalue().endswith("compiling\n")
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with console.progress(3, " weights") as step:
        step()
    console.note("compiling", terminal_only=True)
    assert file.getvalue() == ""


def test_a_narrow_encoding_costs_characters_and_not_the_answer(monkeypatch):
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding="iso-8859-1"))
    Console(quiet=True).text("Grüße 海\n")
    assert content.getvalue() == "Grüße ?\n".encode("iso-8859-1")


def test_reading_weights_makes_every_step_of_its_progress_bar(monkeypatch):
    class Counting(Console):
        """Counts the steps of its progress bars."""

        total = steps = 0

        @contextmanager
        def progress(self, total: int, unit: str) -> Iterator[Callable[[], None]]:
            self.total += total
            yield self.step

        def step(self) -> None:
            self.steps += 1

    monkeypatch.setattr(module, "load_model", load_model)
    directory = DATA / "tiny-a" / "bf16"
    counting = Counting(quiet=False)
    counting.load_model(directory, ModelConfig.from_directory(directory), F32)
    assert counting.total == counting.steps > 100
