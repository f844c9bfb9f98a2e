"""Taking a running sequence's state off the device, and bringing it back."""

from __future__ import annotations

import dataclasses

import jax

from deepinfer_jax.books import Books
from deepinfer_jax.replay import Replay
from deepinfer_jax.runtime.device import Device
from deepinfer_jax.runtime.inflight import InFlight
from deepinfer_jax.runtime.transfer import batches
from deepinfer_jax.sequence import Sequence

# Below so many tokens a computation is not worth the traffic, whatever the rates.
_FEW_TOKENS = 32


@dataclasses.dataclass
class Suspended:
    """State of a sequence that gave way: the slot's rings and all its blocks, on their way to the host, or there."""

    slot: InFlight
    blocks: list[InFlight]

    def settle(self) -> None:
        """Wait until everything is on the host, so that the device's copies can go."""
        self.slot = Held(self.slot.read())
        self.blocks = [Held(planes.read()) for planes in self.blocks]


class Held(InFlight):
    """Planes that are on the host already."""

    __slots__ = ()

    def __init__(self, planes: object) -> None:
        self._arrays = planes


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


def suspend(sequence: Sequence, device: Device, books: Books) -> Suspended:
    """Begin to read a sequence's state, as it is behind everything dispatched so far."""
    numbers = books.block_numbers(sequence.shard, sequence.blocks)
    return Suspended(device.read_slot(books.number(sequence)), [device.read_blocks(part) for part in batches(numbers)])


def resume(sequence: Sequence, suspended: Suspended, device: Device, books: Books) -> None:
    """Write a suspended state into the slot and the blocks that the sequence has now."""
    device.write_slot(books.number(sequence), _copied(suspended.slot))
    numbers = books.block_numbers(sequence.shard, sequence.blocks)
    for part, planes in zip(batches(numbers), suspended.blocks, strict=True):
        device.write_blocks(part, _copied(planes))


def _copied(planes: InFlight) -> object:
    # A device may alias host arrays, and these may be written again.
    return jax.tree.map(lambda leaf: leaf.copy(), planes.on_device)
