"""Addresses that servers listen on: ``HOST:PORT`` or ``unix:PATH``, and who can reach them."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from pathlib import Path
from typing import Any

from deepinfer_jax.errors import ConfigError

_HOST_PORT = re.compile(r"(\[[^\]]+\]|[^\[\]:/]+):(\d{1,5})")
UNIX = "unix:"
"""How addresses of sockets in the file system begin."""
ACCEPTED = "HOST:PORT, [IPV6]:PORT or unix:PATH"


def split_address(address: str, key: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; brackets of an IPv6 address are gone. Port 0 is any free one.

    ``key``: of the configuration, for errors.

    Raises:
      ConfigError: it is none.
    """
    found = _HOST_PORT.fullmatch(address)
    if found is None or int(found[2]) > 65535:
        raise ConfigError(key, address, "HOST:PORT or [IPV6]:PORT")
    return found[1].strip("[]"), int(found[2])


def check_address(address: str, key: str, *, plaintext: bool) -> None:
    """Check an address to listen on.

    Args:
      address: where a server shall listen.
      key: of the configuration, for errors.
      plaintext: other machines may connect, though nothing is encrypted and nobody is asked who they are.

    Raises:
      ConfigError: it is no address, or one that other machines reach although ``plaintext`` is False.
    """
    if address.startswith(UNIX):
        if not address.removeprefix(UNIX):
            raise ConfigError(key, address, ACCEPTED)
        return
    host, _ = split_address(address, key)
    if not (plaintext or is_loopback(host)):
        accepted = "an address of this machine alone: 127.0.0.1, [::1], localhost or unix:PATH"
        raise ConfigError(key, address, accepted, "give --allow-plaintext where the network itself is trusted")


def bound(address: str, port: int) -> str:
    """An address that is listened on: its port may have been any, and is this one."""
    return address if address.startswith(UNIX) else f"{address.rpartition(':')[0]}:{port}"


def check_free(address: str, key: str) -> None:
    """Check that a server can listen on an address now; another process may still take it before it does.

    Args:
      address: that :func:`check_address` accepts.
      key: of the configuration, for errors.

    Raises:
      ConfigError: it cannot be had.
    """
    if address.startswith(UNIX):
        _check_free_path(address, key)
        return
    host, port = split_address(address, key)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(key, address, "an address of this machine", str(error)) from error
    errors = [_bind_error(family, place) for family, _, _, _, place in places]
    # A name may stand for addresses of which this machine has some; one that others have would take some of the calls.
    taken = [error for error in errors if error is not None and error.errno == errno.EADDRINUSE]
    if taken or None not in errors:
        raise ConfigError(key, address, "an address that is free", str((taken or errors)[0]))


def _check_free_path(address: str, key: str) -> None:
    path = Path(address.removeprefix(UNIX))
    if not path.parent.is_dir():
        raise ConfigError(key, address, "a path in a directory that exists", f"there is no directory {path.parent}")
    if path.exists() and not path.is_socket():
        raise ConfigError(key, address, "an address that is free", f"{path} is no socket")
    # A socket that nobody listens on was left by a process that has ended: gRPC replaces it, and others too.
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.connect(str(path))
        except OSError:
            return
    raise ConfigError(key, address, "an address that is free", "another process listens on it")


def _bind_error(family: int, place: Any) -> OSError | None:
    """Why a place cannot be had; None where it can."""
    try:
        one = socket.socket(family)
    except OSError:
        # gRPC has an answer where the machine lacks a whole family of addresses.
        return None
    with one:
        # As servers do: what a process that has ended left behind is no obstacle.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(place)
        except OSError as error:
            return error
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host's address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_unspecified(address: str) -> bool:
    """Whether an address to listen on stands for all that this machine has."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
