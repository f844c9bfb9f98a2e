"""Where workers are: addresses that are written down, and those that names have at the moment."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from serving.addresses import split_address

_log = logging.getLogger("serving.discovery")
DNS = "dns:"

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port to the addresses, ``HOST:PORT``, that it has; raises OSError where it has none."""


class Discovery:
    """Addresses of workers, asked for again and again."""

    def __init__(self, targets: Sequence[str], lookup: Lookup | None = None) -> None:
        """``targets``: ``HOST:PORT``, ``unix:PATH``, or ``dns:NAME:PORT`` for every address of a name."""
        self._targets = tuple(targets)
        self._lookup: Lookup = resolve if lookup is None else lookup
        self._known: dict[str, tuple[str, ...]] = {}

    async def addresses(self) -> tuple[str, ...]:
        """All of them, each once. A name that cannot be resolved keeps the addresses that it had."""
        found: dict[str, None] = {}
        for target in self._targets:
            name = target.removeprefix(DNS)
            found |= dict.fromkeys((target,) if name == target else await self._resolved(name))
        return tuple(found)

    async def _resolved(self, name: str) -> tuple[str, ...]:
        host, port = split_address(name, "gateway.workers")
        try:
            self._known[name] = tuple(sorted(await self._lookup(host, port)))
        except OSError as error:
            kept = self._known.get(name, ())
            _log.warning("name not resolved", extra={"name_asked": name, "error": str(error), "kept": list(kept)})
        return self._known.get(name, ())


async def resolve(host: str, port: int) -> list[str]:
    """The A and AAAA records of a host.

    Raises:
      OSError: there are none, or no answer came.
    """
    records = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found = {(family, place[0]) for family, _, _, _, place in records}
    return [f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}" for family, address in found]
