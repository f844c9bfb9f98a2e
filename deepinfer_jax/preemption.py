"""Taking a running sequence's state off the device: by a snapshot, or by nothing, where its tokens run again."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from deepinfer_jax.books import Books
from deepinfer_jax.cache.records import BlockPlanes, StateFormat, map_rows
from deepinfer_jax.cache.snapshot import ImageSpan, Snapshot, SnapshotMeta, pack, pack_blocks, unpack_blocks
from deepinfer_jax.replay import Replay
from deepinfer_jax.runtime.device import Device
from deepinfer_jax.runtime.inflight import InFlight
from deepinfer_jax.runtime.transfer import batches
from deepinfer_jax.sequence import Sequence

# Below so many tokens a computation is not worth the traffic, whatever the rates.
_FEW_TOKENS = 32


@dataclasses.dataclass
class Leaving:
    """State of a sequence that gave way, on its way to the host: the slot's rings and all its blocks."""

    slot: InFlight
    blocks: list[InFlight]

    def pack(self, sequence: Sequence, form: StateFormat) -> Snapshot:
        """Wait until everything is on the host, so that the device's copies can go."""
        planes = [part.read() for part in self.blocks]
        joined = BlockPlanes(
            map_rows(_joined, *(part.main for part in planes)), map_rows(_joined, *(part.index for part in planes))
        )
        return pack(describe(sequence, form.fingerprint), joined, self.slot.read(), form)


def describe(sequence: Sequence, fingerprint: bytes) -> SnapshotMeta:
    """What the state of a sequence is of; all its tokens are known."""
    begin = sequence.restart
    return SnapshotMeta(
        fingerprint=fingerprint,
        tokens=tuple(sequence.tokens),
        prompt_length=sequence.prompt_length,
        computed=sequence.computed,
        floor=begin.floor,
        decoder_floor=begin.decoder_floor,
        held=begin.held,
        replays=begin.replays,
        images=tuple(ImageSpan(span.start, span.stop, span.digest) for span in sequence.request.images),
    )


def recomputes(sequence: Sequence, replay: Replay, way: str, seconds_per_row: float, rate: float) -> bool:
    """Whether a sequence shall come back by running its tokens again, rather than by a snapshot.

    Running again gives the same only where nothing of it descends from a bounded replay.

    Args:
        sequence: that gives way.
        replay: the engine's.
        way: what the settings ask for.
        seconds_per_row: of prefill.
        rate: seconds that a block's way to the host and back takes.
    """
    if replay.mode == "bounded" and (sequence.restart.replays or sequence.restart.start):
        return False
    if way != "auto":
        return way == "recompute"
    tokens = sequence.computed
    return tokens <= _FEW_TOKENS or tokens * seconds_per_row < len(sequence.blocks) * rate


def suspend(sequence: Sequence, device: Device, books: Books) -> Leaving:
    """Begin to read a sequence's state, as it is behind everything dispatched so far."""
    numbers = books.block_numbers(sequence.shard, sequence.blocks)
    return Leaving(device.read_slot(books.number(sequence)), [device.read_blocks(part) for part in batches(numbers)])


def packing_seconds(form: StateFormat) -> float:
    """Seconds that one block takes to become sections, and to be read from them again."""
    tokens = form.layout.block_tokens
    meta = SnapshotMeta(form.fingerprint, (0,) * tokens, tokens, tokens)
    blocks = form.empty_blocks(1)
    begin = time.perf_counter()
    unpack_blocks(pack_blocks(tokens, 0, blocks, form), meta, 0, 1, form)
    return time.perf_counter() - begin


def _joined(*planes: Any) -> Any:
    return planes[0] if len(planes) == 1 else np.concatenate(planes)
