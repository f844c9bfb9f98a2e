"""How long work on a checkpoint tells how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Progress = Callable[[int, str], AbstractContextManager[Callable[[], object]]]
"""Opens a phase of ``total`` steps of a unit; what it yields is called after every step."""


@contextmanager
def silent(total: int, unit: str) -> Iterator[Callable[[], object]]:
    """Tell nobody."""
    del total, unit
    yield lambda: None
