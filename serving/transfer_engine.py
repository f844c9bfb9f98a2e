"""A process's end of JAX's transfer engine: bytes from a device of one process to a device of another.

The engine (``jax.experimental.transfer``) keeps what is offered until it is pulled, which may be never; it looks at
time limits only when something else is offered. What is known of it, on JAX 0.10 and 0.12:

- offering something else under the same number drops what was offered, and fails a pull that waits for it;
- a receiver that dies in the middle of a pull lets go of what it pulled, and a sender that dies fails the pulls;
- a pull from somebody who does not answer waits without end, and is only ever given up by forgetting it;
- a message that is none ends the whole process, as does a sender that dies while a receiver connects to it.

The last one cannot be cured here: who can reach its port must be trusted, and nobody has to use the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import secrets
import socket
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding
from jaxtyping import UInt8

SCHEME = "jax://"

_SHORT_PAUSE, _LONG_PAUSE = 0.0002, 0.005
# A pull that comes late fails as long as this, and would wait without end afterwards.
_WITHDRAWN_SECONDS = 60.0
# Numbers are drawn, so that who is not told cannot ask. The engine's are 64 bits, signed in places.
_NUMBER_BITS = 63


class TransferEngineError(Exception):
    """The engine could not do it; says why."""


class TransferEngine:
    """One end. Pulls and offers are for one event loop; :meth:`put` and :meth:`read` are for threads.

    Attributes:
        address: ``HOST:PORT`` where others pull.
    """

    def __init__(self, host: str) -> None:
        """Listen.

        Args:
          host: name or address of this machine. Every other end must be able to reach it, and all must be of one kind:
            addresses of this machine alone, or ones that other machines reach.

        Raises:
          TransferEngineError: the host is not this one's, or JAX has no such engine for its device.
        """
        self._device = jax.local_devices()[0]
        self._sharding = SingleDeviceSharding(self._device)
        try:
            place = numeric_address(host)
            # The engine binds names that it does not resolve to all addresses. Data comes over a socket of its own, of
            # which both ends must have equally many.
            self._server = transfer.start_transfer_server(self._device.client, place, [place])
            self.address: str = self._server.address()
        except (OSError, RuntimeError, ValueError) as error:
            raise TransferEngineError(f"JAX's transfer engine does not start at {host}: {_line(error)}") from error
        self._connections: dict[str, Any] = {}

    @property
    def uri(self) -> str:
        """Of the endpoint where others pull."""
        return f"{SCHEME}{self.address}"

    def reaches(self, address: str) -> bool:
        """Whether data can come from an address; connecting in vain would end the process."""
        own, other = _host(self.address), _host(address)
        if own is None or other is None or own.version != other.version:
            return False
        return own.is_unspecified or own.is_loopback == other.is_loopback

    def put(self, content: bytes) -> jax.Array:
        """Content on the device, as ``uint8[bytes]``."""
        return jax.device_put(np.frombuffer(content, np.uint8), self._device)

    def offer(self, content: UInt8[jax.Array, " bytes"], seconds: float) -> int:
        """Let one pull have something. Returns its number.

        ``seconds``: until it may be dropped; it is, when something else is offered later.
        """
        number = 1 + secrets.randbits(_NUMBER_BITS)
        self._offer(number, content, seconds)
        return number

    def withdraw(self, number: int) -> None:
        """Drop what was offered and not pulled; a pull of it fails. A pull that has begun goes on."""
        self._offer(number, self.put(b"\0"), _WITHDRAWN_SECONDS)

    async def pull(self, address: str, number: int, size: int) -> jax.Array:
        """What was offered under a number, as ``uint8[size]``; what has another size is an error.

        Waits without end for a sender that does not answer. Cancelling it forgets the pull.

        Raises:
          TransferEngineError: it failed, and the connection is not used again.
        """
        assert self.reaches(address)
        if address not in self._connections:
            self._connections[address] = self._server.connect(address)
        spec = jax.ShapeDtypeStruct((size,), np.uint8, sharding=self._sharding)
        try:
            (content,) = self._connections[address].pull(number, [spec])
            pause = _SHORT_PAUSE
            while not content.is_ready():
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONG_PAUSE)
            content.block_until_ready()
        except RuntimeError as error:
            self.forget(address)
            raise TransferEngineError(_line(error)) from error
        return content

    def forget(self, address: str) -> None:
        """Connect anew next time."""
        self._connections.pop(address, None)

    @staticmethod
    def read(content: UInt8[jax.Array, " bytes"]) -> memoryview:
        """Content of a device on the host."""
        return memoryview(np.asarray(content))

    def close(self) -> None:
        """Listen no more."""
        self._connections = {}
        with contextlib.suppress(AttributeError):
            del self._server

    def _offer(self, number: int, content: UInt8[jax.Array, " bytes"], seconds: float) -> None:
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
        self._server.await_pull(number, [content], timeout=end)


def numeric_address(host: str) -> str:
    """``HOST:0`` with a numeric host, in brackets if it is one of IPv6.

    Raises:
      OSError: the name has no address.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    return f"[{found}]:0" if ":" in str(found) else f"{found}:0"


def _host(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The host of a numeric ``HOST:PORT``; None if it is none."""
    host, colon, port = address.rpartition(":")
    try:
        return ipaddress.ip_address(host.strip("[]")) if colon and 0 < int(port) < 1 << 16 else None
    except ValueError:
        return None


def _line(error: Exception) -> str:
    """An error in one line; the engine's have many, with their own source."""
    return str(error).partition("\n")[0]
