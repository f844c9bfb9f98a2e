"""A request's state on its way into an engine: a snapshot that was checked, and what the device takes of it."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
from jaxtyping import Int

from deepinfer_jax.books import Books
from deepinfer_jax.cache import records
from deepinfer_jax.cache.records import StateFormat
from deepinfer_jax.cache.snapshot import (
    Rings,
    Snapshot,
    SnapshotMeta,
    open_meta,
    page_name,
    section_names,
    unpack,
    unpack_page,
    unpack_slot,
)
from deepinfer_jax.errors import InputError, SnapshotError
from deepinfer_jax.replay import Restart
from deepinfer_jax.request import Request
from deepinfer_jax.runtime.device import Device
from deepinfer_jax.runtime.host_planes import block_planes, slot_planes
from deepinfer_jax.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A snapshot's content on the host, as planes."""

    meta: SnapshotMeta
    blocks: records.BlockPlanes
    slot: records.SlotPlanes

    def begin(self, sequence: Sequence, block_tokens: int) -> None:
        """Let a new sequence begin where its state ends; blocks of a hit were named where the state comes from."""
        meta = self.meta
        sequence.suspended = self
        sequence.restart = Restart(meta.computed, meta.floor, meta.held, meta.decoder_floor, meta.replays)
        sequence.computed = sequence.confirmed = meta.computed
        sequence.published, sequence.received_tokens = meta.held // block_tokens, meta.paged

    def check(self, request: Request, *, bounded: bool) -> None:
        """Check that this is the state of a request.

        ``bounded``: the engine takes states that descend from bounded replays.

        Raises:
          InputError: other tokens, another prompt length, other images, a state that nothing is left to compute
            behind, or one that an exact engine must not take.
        """
        meta = self.meta
        if request.params.n > 1:
            raise InputError("n", request.params.n, "1 where state comes", "send one request for each branch")
        tokens = (*request.prompt, *request.answer)
        for name, found, wanted in (
            ("tokens", meta.tokens, tokens),
            ("prompt length", meta.prompt_length, len(request.prompt)),
            ("images", meta.images, tuple((span.start, span.stop, span.digest) for span in request.images)),
        ):
            if found != wanted:
                raise InputError(f"{name} of the state", found, f"those of the request, {wanted}", "hand over its own")
        if meta.computed >= len(tokens):
            raise InputError("computed tokens of the state", meta.computed, f"fewer than the {len(tokens)} there are")
        if meta.replays and not bounded:
            remedy = "replay in mode bounded, or prefill in mode exact"
            raise InputError("replays of the state", meta.replays, "none in an exact engine", remedy)


@dataclasses.dataclass(frozen=True)
class Receiver:
    """Opens snapshots for one engine; may be used from any thread.

    Attributes:
        form: how the model's state is cut into records.
        rings: ring lengths of the engine's slots.
        token_map: compressed id of every token id, for a model with Engram.
        fill: value of rows that hold nothing.
    """

    form: StateFormat
    rings: Rings
    token_map: Int[np.ndarray, " vocabulary"] | None
    fill: float = 0.0

    def open(self, snapshot: Snapshot) -> Arrival:
        """Check every section.

        Raises:
          SnapshotError: one is missing, damaged, or of another model.
        """
        return Arrival(*unpack(snapshot, self.rings, self.form, self.token_map, self.fill))

    def opening(self, computed: int) -> Opening:
        """Opens a snapshot of ``computed`` tokens while it arrives."""
        return Opening(self, computed)


class Opening:
    """Opens pages of full blocks as they come, and the rest at the end. For one thread at a time."""

    def __init__(self, receiver: Receiver, computed: int) -> None:
        self._receiver, self._computed = receiver, computed
        form, size = receiver.form, receiver.form.layout.block_tokens
        self._due = {
            page_name(block, group): (block, group)
            for block in range(computed // size)
            for group in range(len(form.layout.ratios))
        }
        self._planes = form.empty_blocks(form.layout.blocks_for(computed), receiver.fill)

    def take(self, sections: Snapshot) -> None:
        """Open those that are pages of full blocks; what is refused is left to :meth:`finish`."""
        for name in sections:
            if name in self._due:
                with contextlib.suppress(SnapshotError):
                    self._read(sections, self._computed, *self._due[name])
                    del self._due[name]

    def finish(self, snapshot: Snapshot) -> Arrival:
        """Check every section that was not taken before. See :meth:`Receiver.open`."""
        receiver, form = self._receiver, self._receiver.form
        meta = open_meta(snapshot, form)
        if meta.paged != self._computed or set(snapshot) != set(section_names(meta, form)):
            # Pages of other tokens than were expected, or an error that is named there.
            return receiver.open(snapshot)
        for block, group in self._due.values():
            self._read(snapshot, meta.paged, block, group)
        for block in range(meta.paged // form.layout.block_tokens, form.layout.blocks_for(meta.paged)):
            for group in range(len(form.layout.ratios)):
                self._read(snapshot, meta.paged, block, group)
        slot = unpack_slot(snapshot, meta, receiver.rings, form, receiver.token_map, receiver.fill)
        return Arrival(meta, self._planes, slot)

    def _read(self, snapshot: Snapshot, paged: int, block: int, group: int) -> None:
        unpack_page(snapshot, paged, block, group, self._receiver.form, self._planes, block)


def insert(sequence: Sequence, arrival: Arrival, device: Device, books: Books) -> None:
    """Write a state into the slot and the blocks that the sequence has now."""
    device.write_slot(books.number(sequence), slot_planes(arrival.slot, device.slot_planes))
    count = books.blocks_for(arrival.meta.paged)
    numbers = books.block_numbers(sequence.shard, sequence.blocks[:count])
    for part, content in block_planes(numbers, arrival.blocks, device.block_planes):
        device.write_blocks(part, content)
