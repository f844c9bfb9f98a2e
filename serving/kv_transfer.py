"""The bulk plane of a worker: sections of held states, sent while later ones are computed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import grpc

from deepinfer_jax.cache.fingerprint import SCHEMA_VERSION
from deepinfer_jax.cache.records import Record, StateFormat
from deepinfer_jax.cache.sections import HEADER_BYTES
from serving.errors import bad_field
from serving.held_state import HeldState, expired
from serving.kv_chunks import ChunkPacker, chunk_bytes_of
from serving.leases import Leases
from serving.offers import Offers
from serving.proto.deepinfer.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from serving.request_messages import check_fingerprint, check_id
from serving.served_call import ServedCall
from serving.server import Service

NAME = "deepinfer.v1.KvTransfer"


@dataclasses.dataclass
class TransferCounts:
    """Pulls that began, those that run, and bytes of messages that were sent."""

    pulls: int = 0
    running: int = 0
    sent_bytes: int = 0


class KvTransferService(kv_transfer_pb2_grpc.KvTransferServicer):
    """``deepinfer.v1.KvTransfer`` over a table of held states. Handlers run behind a ``CallGuard``."""

    def __init__(
        self,
        form: StateFormat,
        source_layers: Sequence[int],
        leases: Leases[HeldState],
        offers: Offers | None = None,
    ) -> None:
        """Serve a table.

        Args:
          form: how the states are cut into records.
          source_layers: the layer that writes each cache group.
          leases: the states, which others put there.
          offers: to transfer engines; None makes none.
        """
        self._form, self._source_layers, self._leases = form, source_layers, leases
        self._fingerprint, self._offers = form.fingerprint.hex(), offers
        self.counts = TransferCounts()

    def service(self) -> Service:
        """As a part of a server."""
        return Service(NAME, self, _add)

    async def Describe(self, request: kv_transfer_pb2.KvDescribeRequest, call: ServedCall) -> kv_transfer_pb2.KvLayout:
        """See the protocol."""
        form = self._form
        layout = kv_transfer_pb2.KvLayout(
            fingerprint=self._fingerprint,
            schema_version=SCHEMA_VERSION,
            page_tokens=form.layout.block_tokens,
            groups=[
                kv_transfer_pb2.KvGroup(
                    layer=layer,
                    ratio=ratio,
                    entry_bytes=form.page_record,
                    entry_format=_format(form.main),
                    index_format=_format(form.index),
                )
                for layer, ratio in zip(self._source_layers, form.layout.ratios, strict=True)
            ],
            layers=form.layers,
            encoder_layers=form.encoder_layers,
            window=form.sliding_window,
            window_key_bytes=form.window.size,
            header_bytes=HEADER_BYTES,
        )
        if request.HasField("kv_id"):
            check_id("kv_id", request.kv_id)
            state = self._find(request.kv_id)
            layout.progress.computed_tokens = state.computed_tokens
            layout.progress.complete_pages = state.complete_pages
            layout.progress.done = state.complete
        return layout

    async def Pull(self, request: kv_transfer_pb2.KvPullRequest, call: ServedCall) -> None:
        """See the protocol."""
        state = self._find_alike(request.kv_id, request.fingerprint)
        sections = state.plan.select(request, self._form)
        packer = ChunkPacker(chunk_bytes_of(request), sums=request.sums, computed_at=state.computed_at)
        offset = request.resume.offset
        self.counts.pulls += 1
        self.counts.running += 1
        try:
            for section in sections:
                while (content := state.section(section.name)) is None:
                    for message in packer.flush():
                        await self._send(message, request.kv_id, call)
                    # A section may have come while the message was written.
                    if state.section(section.name) is None:
                        await state.changed()
                if offset > len(content):
                    raise bad_field("resume.offset", offset, f"at most the {len(content)} bytes of {section.name}")
                for message in packer.add(section.name, content, offset):
                    await self._send(message, request.kv_id, call)
                offset = 0
            await self._send(packer.finish(), request.kv_id, call)
        finally:
            self.counts.running -= 1

    async def Offer(self, request: kv_transfer_pb2.KvOfferRequest, call: ServedCall) -> kv_transfer_pb2.KvOffered:
        """See the protocol."""
        if self._offers is None:
            raise bad_field("kv_id", request.kv_id, "a Pull, as no transfer engine runs here", "NOT_SUPPORTED")
        self._offers.taken(request.taken)
        state = self._find_alike(request.kv_id, request.fingerprint)
        offered, at = await self._offers.offer(state, request.first), state.computed_at()
        if at is not None:
            offered.computed_ago, offered.computed_at = time.monotonic() - at, at
        self.counts.sent_bytes += sum(offered.section_bytes)
        return offered

    def _find_alike(self, kv_id: str, fingerprint: str) -> HeldState:
        """A state that a caller can read."""
        check_id("kv_id", kv_id)
        check_fingerprint("fingerprint", fingerprint)
        if fingerprint != self._fingerprint:
            accepted = f"{self._fingerprint}; weights, configuration, numerics and page size of both ends must agree"
            raise bad_field("fingerprint", fingerprint, accepted, "KV_LAYOUT_MISMATCH")
        return self._find(kv_id)

    def _find(self, kv_id: str) -> HeldState:
        state = self._leases.find(kv_id)
        if state is None:
            raise expired("it was released, has expired, or never was")
        return state

    async def _send(self, message: bytes, kv_id: str, call: ServedCall) -> None:
        await call.write(message)
        self.counts.sent_bytes += len(message)
        self._leases.renew(kv_id)


def _format(record: Record) -> str:
    return record.form or record.dtype.name


def _add(service: Any, server: grpc.aio.Server) -> None:
    """Like the generated function, for a ``Pull`` that writes serialised messages."""
    handlers = {
        "Describe": grpc.unary_unary_rpc_method_handler(
            service.Describe,
            kv_transfer_pb2.KvDescribeRequest.FromString,
            kv_transfer_pb2.KvLayout.SerializeToString,
        ),
        "Offer": grpc.unary_unary_rpc_method_handler(
            service.Offer,
            kv_transfer_pb2.KvOfferRequest.FromString,
            kv_transfer_pb2.KvOffered.SerializeToString,
        ),
        "Pull": grpc.unary_stream_rpc_method_handler(service.Pull, kv_transfer_pb2.KvPullRequest.FromString, None),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
