"""States fetched by ``KvTransfer.Pull`` over connections of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import grpc

from deepinfer_jax.cache.records import StateFormat
from deepinfer_jax.cache.snapshot import Snapshot
from serving.kv_sections import StatePlan
from serving.kv_transport import TransferProgress
from serving.lanes import Lanes
from serving.proto.deepinfer.v1.kv_transfer_pb2 import (
    KV_PART_PAGES,
    KvEndpoint,
    KvHandle,
    KvOffered,
    KvOfferRequest,
    KvRange,
)
from serving.proto.deepinfer.v1.kv_transfer_pb2_grpc import KvTransferStub
from serving.proto.deepinfer.v1.prefill_pb2 import ReleaseKvRequest
from serving.proto.deepinfer.v1.prefill_pb2_grpc import PrefillStub
from serving.state_pulls import PullSettings, StatePulls

_log = logging.getLogger("serving.kv")
_RELEASE_SECONDS = 5.0

_SCHEMES = {"grpc://": "", "grpc+unix://": "unix:"}


class GrpcTransport:
    """Pulls states; channels stay open for the next one. For one event loop."""

    name = "grpc"

    def __init__(
        self,
        form: StateFormat,
        settings: PullSettings | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """Make a transport.

        Args:
          form: how states are cut into records here.
          settings: how they are pulled.
          credentials: None is plain text.
        """
        self._form, self._settings = form, settings or PullSettings()
        self._lanes = Lanes(self._settings.lanes, credentials)

    def reaches(self, endpoint: KvEndpoint) -> bool:
        return _find_target(endpoint) is not None

    async def fetch(
        self, handle: KvHandle, endpoint: KvEndpoint, plan: StatePlan, *, deadline: float, progress: TransferProgress
    ) -> Snapshot:
        pulls = StatePulls(self._form, self._settings, handle, plan, deadline, progress)
        ranges = self._ranges(plan)
        async with self._lanes.to(_target(endpoint)) as channels:
            await _together([pulls.rest(channels[0]), *(pulls.pages(channel, ranges) for channel in channels)])
        return pulls.snapshot()

    async def watch(
        self, handle: KvHandle, endpoint: KvEndpoint, plan: StatePlan, *, deadline: float, progress: TransferProgress
    ) -> None:
        """Wait until a state is complete, its lease renewed; arguments and errors are those of :meth:`fetch`."""
        async with self._lanes.to(_target(endpoint)) as channels:
            await StatePulls(self._form, self._settings, handle, plan, deadline, progress).meta(channels[0])

    async def offered(self, endpoint: KvEndpoint, request: KvOfferRequest, seconds: float) -> KvOffered:
        """Have sections offered by a holder, at an endpoint that is reached.

        Raises:
          grpc.RpcError: nothing is offered.
        """
        async with self._lanes.to(_target(endpoint)) as channels:
            return await KvTransferStub(channels[0]).Offer(request, timeout=seconds)

    async def release(self, handle: KvHandle) -> None:
        """Give a state back where it is held. A holder that is gone, or cannot be reached, ends it by its lease."""
        for endpoint in [endpoint for endpoint in handle.endpoints if self.reaches(endpoint)][:1]:
            async with self._lanes.to(_target(endpoint)) as channels:
                request = ReleaseKvRequest(kv_id=handle.kv_id)
                try:
                    await PrefillStub(channels[0]).ReleaseKv(request, timeout=_RELEASE_SECONDS)
                except grpc.RpcError as error:
                    _log.info("a state was not given back: %s", error.code().name, extra={"kv_id": handle.kv_id})

    async def close(self) -> None:
        await self._lanes.close()

    def _ranges(self, plan: StatePlan) -> Iterator[KvRange]:
        """The request's blocks in ranges of about equal size, in order."""
        blocks = self._form.layout.blocks_for(plan.computed)
        size = sum(section.most for section in plan.sections if section.part == KV_PART_PAGES)
        count = max(1, blocks * self._settings.range_bytes // max(1, size))
        for first in range(0, blocks, count):
            yield KvRange(first=first, stop=min(blocks, first + count))


def _find_target(endpoint: KvEndpoint) -> str | None:
    """What gRPC calls an endpoint; None for those of other transports."""
    for scheme, prefix in _SCHEMES.items():
        if endpoint.uri.startswith(scheme):
            return prefix + endpoint.uri.removeprefix(scheme)
    return None


def _target(endpoint: KvEndpoint) -> str:
    """What gRPC calls an endpoint that is reached."""
    target = _find_target(endpoint)
    assert target is not None
    return target


async def _together(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; the first failure ends the others and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
