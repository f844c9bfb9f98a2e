"""How a public op chooses its implementation.

Every op has one table of implementations under plain names. ``implementation=None`` means the op's default, which runs
on every platform; a name means exactly that one. Nothing falls back silently: an implementation that cannot do what it
is asked raises NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def choose(op: str, implementation: str | None, table: Mapping[str, Function], default: str) -> Function:
    """The function that ``implementation`` names in the op's ``table``; ``default`` when None.

    Raises:
      NotImplementedError: the op has no implementation of that name.
    """
    name = default if implementation is None else implementation
    if name not in table:
        raise NotImplementedError(f"{op} has no implementation {name!r}; it has {', '.join(sorted(table))}")
    return table[name]
