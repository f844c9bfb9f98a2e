"""Connections to the holders of states: several to each, kept for the next state, those to a few holders at a time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from serving.channels import RetryPolicy, client_options

MOST_HOLDERS = 64
"""Holders to which connections are kept that nobody uses."""

# Without pools of their own the channels would share one connection. Delays between attempts to connect are below
# those between streams, so that each of these is a new attempt.
LANE_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class Lanes:
    """The connections of one process. For one event loop."""

    def __init__(
        self, count: int, credentials: grpc.ChannelCredentials | None = None, most_holders: int = MOST_HOLDERS
    ) -> None:
        """Open nothing yet.

        Args:
          count: connections to a holder.
          credentials: None is plain text.
          most_holders: further ones that are not in use are closed, the longest unused first.
        """
        self._count, self._credentials, self._most = count, credentials, most_holders
        # By target, those last used at the end.
        self._channels: dict[str, list[grpc.aio.Channel]] = {}
        self._users: dict[str, int] = {}

    def __len__(self) -> int:
        """Holders to which there are connections."""
        return len(self._channels)

    @contextlib.asynccontextmanager
    async def to(self, target: str) -> AsyncIterator[list[grpc.aio.Channel]]:
        """The connections to a holder, which stay open in this context."""
        channels = self._channels.pop(target, None) or [self._open(target) for _ in range(self._count)]
        self._channels[target] = channels
        self._users[target] = self._users.get(target, 0) + 1
        try:
            yield channels
        finally:
            self._users[target] -= 1
            if not self._users[target]:
                del self._users[target]
            await self._close_unused()

    async def close(self) -> None:
        """Close all of them."""
        closing, self._channels = self._channels, {}
        for channel in (channel for channels in closing.values() for channel in channels):
            await channel.close()

    async def _close_unused(self) -> None:
        unused = [target for target in self._channels if target not in self._users]
        for target in unused[: max(0, len(self._channels) - self._most)]:
            for channel in self._channels.pop(target):
                await channel.close()

    def _open(self, target: str) -> grpc.aio.Channel:
        options: Any = (*client_options(RetryPolicy(attempts=1), bulk=True), *LANE_OPTIONS)
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, options)
        return grpc.aio.secure_channel(target, self._credentials, options)
