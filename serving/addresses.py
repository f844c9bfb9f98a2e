"""Addresses that servers listen on: ``HOST:PORT`` or ``unix:PATH``, and who can reach them."""

from __future__ import annotations

import ipaddress
import re

from deepinfer_jax.errors import ConfigError

_HOST_PORT = re.compile(r"(\[[^\]]+\]|[^\[\]:/]+):(\d{1,5})")
_UNIX = "unix:"
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
    if address.startswith(_UNIX):
        if not address.removeprefix(_UNIX):
            raise ConfigError(key, address, ACCEPTED)
        return
    host, _ = split_address(address, key)
    if not (plaintext or is_loopback(host)):
        accepted = "an address of this machine alone: 127.0.0.1, [::1], localhost or unix:PATH"
        raise ConfigError(key, address, accepted, "give --allow-plaintext where the network itself is trusted")


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
