"""States pulled by JAX's transfer engine from device to device, batch by batch, as their sections are sealed.

What travels are the sealed sections that other transports carry too, so that a receiver checks the same checksums:
they are made on the sender's host and go through its device. Pages straight from the pools of one device into those
of another would save both ways over the host, but then nothing is sealed and nothing can be checked; that is not done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import Executor

import grpc

from deepinfer_jax.cache.snapshot import Snapshot
from serving.grpc_transport import GrpcTransport
from serving.kv_sections import PlannedSection, StatePlan
from serving.kv_transport import TransferProgress, TransportError
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvEndpoint, KvHandle, KvOffered, KvOfferRequest
from serving.status import error_from
from serving.transfer_engine import SCHEME, TransferEngine, TransferEngineError

_log = logging.getLogger("serving.kv")

PATIENCE_SECONDS = 5.0
_AVOIDED_SECONDS = 60.0


class JaxTransport:
    """Pulls what holders offer to it by ``KvTransfer.Offer``. For one event loop.

    An address from which a pull failed is left to other transports for a minute: every pull that is never answered
    keeps the memory that it was to fill.
    """

    name = "jax"

    def __init__(
        self, control: GrpcTransport, engine: TransferEngine, reader: Executor, patience: float = PATIENCE_SECONDS
    ) -> None:
        """Make a transport.

        Args:
          control: reaches the holders of the states.
          engine: pulls.
          reader: copies to the host.
          patience: seconds that a holder's answer, and a batch, may take.
        """
        self._control, self._engine, self._reader, self._patience = control, engine, reader, patience
        self._avoided: dict[str, float] = {}

    def reaches(self, endpoint: KvEndpoint) -> bool:
        address = endpoint.uri.removeprefix(SCHEME)
        if not (endpoint.uri.startswith(SCHEME) and self._engine.reaches(address)):
            return False
        return self._avoided.get(address, 0.0) <= asyncio.get_running_loop().time()

    async def fetch(
        self, handle: KvHandle, endpoint: KvEndpoint, plan: StatePlan, *, deadline: float, progress: TransferProgress
    ) -> Snapshot:
        call = next((other for other in handle.endpoints if self._control.reaches(other)), None)
        if call is None:
            raise TransportError("KV_EXPIRED", "the holder of the state cannot be called")
        address, sections = endpoint.uri.removeprefix(SCHEME), dict[str, bytes | memoryview]()
        taken: list[int] = []
        # The next batch goes to the sender's device while this one travels.
        asking = asyncio.create_task(self._ask(call, handle, 0))
        try:
            while len(sections) < len(plan.sections):
                offered = await asking
                if offered.HasField("computed_ago"):
                    progress.computed(offered.computed_ago, offered.computed_at)
                due = _due(plan.sections[len(sections) :], offered)
                behind = len(sections) + len(due)
                if behind < len(plan.sections):
                    asking, taken = asyncio.create_task(self._ask(call, handle, behind, taken)), []
                if not due:
                    continue
                content = await self._pull(address, offered)
                taken.append(offered.number)
                arrived, size = dict[str, bytes | memoryview](), len(content)
                for planned, own in zip(due, offered.section_bytes, strict=True):
                    arrived[planned.name], content = content[:own], content[own:]
                progress.add(size, arrived)
                sections |= arrived
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        # Everything is here, whatever becomes of the holder.
        with contextlib.suppress(TransportError):
            await self._ask(call, handle, len(sections), taken)
        return sections

    async def close(self) -> None:
        """Nothing: control transport and engine are closed by whoever made them."""

    async def _ask(self, call: KvEndpoint, handle: KvHandle, first: int, taken: Sequence[int] = ()) -> KvOffered:
        request = KvOfferRequest(kv_id=handle.kv_id, fingerprint=handle.fingerprint, first=first, taken=taken)
        try:
            return await self._control.offered(call, request, self._patience)
        except grpc.RpcError as error:
            # Where the state is gone, the next transport finds that too.
            raise TransportError("KV_EXPIRED", f"the holder offers nothing: {error_from(error).message}") from error

    async def _pull(self, address: str, offered: KvOffered) -> memoryview:
        loop, size = asyncio.get_running_loop(), sum(offered.section_bytes)
        try:
            async with asyncio.timeout(self._patience):
                content = await self._engine.pull(address, offered.number, size)
            return await loop.run_in_executor(self._reader, self._engine.read, content)
        except (TransferEngineError, TimeoutError) as error:
            self._engine.forget(address)
            self._avoided[address] = loop.time() + _AVOIDED_SECONDS
            reason = str(error) or f"no answer in {self._patience:g} s"
            _log.warning("a pull by the transfer engine failed: %s", reason, extra={"address": address})
            raise TransportError("KV_EXPIRED", f"a pull by the transfer engine failed: {reason}") from error


def _due(due: Sequence[PlannedSection], offered: KvOffered) -> Sequence[PlannedSection]:
    """The sections that an offer says it has, of those that come next; none where nothing is offered.

    Raises:
      TransportError: they cannot be of these sizes.
    """
    sizes = offered.section_bytes
    if len(sizes) > len(due) or bool(sizes) != bool(offered.number):
        raise TransportError("KV_DAMAGED", f"{len(sizes)} sections are offered where {len(due)} are due")
    for planned, size in zip(due, sizes, strict=False):
        if not planned.least <= size <= planned.most:
            raise TransportError("KV_DAMAGED", f"{planned.name} cannot have {size} bytes")
    return due[: len(sizes)]
