"""A request's state on its way into an engine: a snapshot that was checked, and what the device takes of it."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int

from deepinfer_jax.books import Books
from deepinfer_jax.cache import records
from deepinfer_jax.cache.records import StateFormat
from deepinfer_jax.cache.snapshot import Rings, Snapshot, SnapshotMeta, unpack
from deepinfer_jax.errors import InputError
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


def insert(sequence: Sequence, arrival: Arrival, device: Device, books: Books) -> None:
    """Write a state into the slot and the blocks that the sequence has now."""
    device.write_slot(books.number(sequence), slot_planes(arrival.slot, device.slot_planes))
    count = books.blocks_for(arrival.meta.paged)
    numbers = books.block_numbers(sequence.shard, sequence.blocks[:count])
    for part, content in block_planes(numbers, arrival.blocks, device.block_planes):
        device.write_blocks(part, content)
