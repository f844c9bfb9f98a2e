"""Windows held on the device: at block boundaries for later exact hits, and at the end of prompts for branches."""

from __future__ import annotations

import collections
import dataclasses

from deepinfer_jax.cache.blocks import ChainKey, Replays
from deepinfer_jax.runtime.inflight import InFlight


class Checkpoints:
    """Windows of a few block boundaries, found by the identity of the block before; the least recently used goes."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: collections.OrderedDict[tuple[ChainKey, Replays], InFlight] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, key: ChainKey, replays: Replays, windows: InFlight) -> None:
        """Hold the windows behind a block."""
        self._held[key, replays] = windows
        self._held.move_to_end((key, replays))
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)

    def find(self, key: ChainKey, replays: Replays) -> InFlight | None:
        """The windows behind a block whose content descends from just these replays."""
        windows = self._held.get((key, replays))
        if windows is not None:
            self._held.move_to_end((key, replays))
        return windows

    def forget(self) -> None:
        """Drop everything."""
        self._held.clear()


@dataclasses.dataclass
class Fork:
    """The end of a prompt, from which its other branches go on.

    Attributes:
        shard, blocks: full blocks of the prompt, retained until no branch waits.
        windows: the slot's rings at the prompt's end.
        last: content of the block that holds the prompt's last token.
        waiting: branches that have not begun.
    """

    shard: int
    blocks: list[int]
    windows: InFlight
    last: InFlight
    waiting: int
