"""How gRPC's channels and servers are set up: sizes, keep-alive, retries. Both ends must agree, so both are here."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import grpc

from deepinfer_jax.errors import InputError

MESSAGE_BYTES = 8 << 20
"""Most bytes of a message: a prompt of a million tokens takes three million."""

KEEPALIVE_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
# A server ends connections that ping more often than this, so it lies below the clients' interval.
LEAST_PING_INTERVAL_MS = 20_000

Options = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """Repeats of a call that ended with UNAVAILABLE before anything came for it.

    gRPC does them itself, within the call's deadline, and waits as long as a server asks it to. Once a message has come
    a call is never repeated.

    Attributes:
        attempts: with the first one; 1 never repeats, 5 is the most that gRPC does.
        first_delay: most seconds before the second attempt; each following delay is twice as long.
        longest_delay: in seconds.
    """

    attempts: int = 4
    first_delay: float = 0.1
    longest_delay: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.attempts <= 5:
            raise InputError("attempts", self.attempts, "1 to 5")
        for name in ("first_delay", "longest_delay"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(name, getattr(self, name), "seconds above 0")

    def service_config(self) -> str:
        """As gRPC's service config, for the calls of ``Inference``."""
        method: dict[str, Any] = {"name": [{"service": "deepinfer.v1.Inference"}]}
        if self.attempts > 1:
            method["retryPolicy"] = {
                "maxAttempts": self.attempts,
                "initialBackoff": f"{self.first_delay:f}s",
                "maxBackoff": f"{self.longest_delay:f}s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            }
        return json.dumps({"methodConfig": [method]})


def client_options(retries: RetryPolicy, *, bulk: bool = False) -> Options:
    """Options of a channel for tokens, or for bulk data.

    What a reader leaves unread is kept in small windows of 64 KiB a stream, so that its server notices; the ones that
    gRPC chooses by itself take megabytes, which bulk data needs.
    """
    return (
        ("grpc.http2.bdp_probe", int(bulk)),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.service_config", retries.service_config()),
        # A request that does not fit into this buffer would not be repeated.
        ("grpc.per_rpc_retry_buffer_size", 2 * MESSAGE_BYTES),
    )


def server_options() -> Options:
    """Options of a server for tokens."""
    return (
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PING_INTERVAL_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # Two servers on one port would each get some of the calls, and nobody would notice.
        ("grpc.so_reuseport", 0),
    )


def open_channel(target: str, retries: RetryPolicy, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """A channel whose calls block; without credentials in plain text."""
    options = client_options(retries)
    if credentials is None:
        return grpc.insecure_channel(target, options)
    return grpc.secure_channel(target, credentials, options)


def open_async_channel(
    target: str, retries: RetryPolicy, credentials: grpc.ChannelCredentials | None
) -> grpc.aio.Channel:
    """A channel for asyncio; without credentials in plain text."""
    options = client_options(retries)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options)
    return grpc.aio.secure_channel(target, credentials, options)
