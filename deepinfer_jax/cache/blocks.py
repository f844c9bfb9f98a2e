"""The host's book of page blocks: who uses them, what they hold, and which are given away when space runs out.

Pure bookkeeping without arrays. Every block lies on a *shard* of the pools and keeps its shard-local number; a request
uses blocks of one shard only. A block is in one of three states:

* free: nobody uses it and it holds nothing that could be found;
* used: one or more requests count on its content;
* cached: unused, but its content is in the prefix index; taken for new content when no block is free, the least
  recently released first.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

ChainKey = bytes
# Hit lengths, in tokens, of the bounded replays that a block's content descends from, oldest first; () is exact.
Replays = tuple[int, ...]
EXACT: Replays = ()


def chain_keys(
    root: bytes, tokens: Sequence[int], block_tokens: int, images: Iterable[tuple[int, int, bytes]] = ()
) -> list[ChainKey]:
    """The identity of every full block of a token sequence: it depends on all tokens before the block too.

    Args:
      root: digest of whatever else the content depends on: the state's fingerprint and the user's salt.
      tokens: token ids from the sequence's start.
      block_tokens: tokens of a block.
      images: start, end and content digest of every image span; a block's identity covers the spans that reach into it.
    """
    spans, keys, previous = list(images), [], root
    ids = np.asarray(tokens[: len(tokens) // block_tokens * block_tokens], "<i4")
    for start in range(0, len(ids), block_tokens):
        stop = start + block_tokens
        digest = hashlib.blake2b(previous, digest_size=32)
        digest.update(ids[start:stop].tobytes())
        for begin, end, content in spans:
            if begin < stop and end > start:
                digest.update(f"{begin}:{end}:".encode() + content)
        previous = digest.digest()
        keys.append(previous)
    return keys


@dataclasses.dataclass(frozen=True)
class Hit:
    """Blocks that hold the beginning of a sequence, in token order, and the replays their content descends from."""

    blocks: tuple[int, ...]
    replays: Replays


@dataclasses.dataclass
class _Block:
    """``users``: requests that count on it. ``key``, ``replays``: its content's name, None while it has none."""

    users: int = 0
    key: ChainKey | None = None
    replays: Replays = EXACT


class BlockPool:
    """All blocks of all shards."""

    def __init__(self, blocks: int, n_shards: int = 1) -> None:
        """``blocks`` of every one of ``n_shards`` shards."""
        self.blocks, self.n_shards = blocks, n_shards
        self._blocks = [[_Block() for _ in range(blocks)] for _ in range(n_shards)]
        self._free = [list(range(blocks - 1, -1, -1)) for _ in range(n_shards)]
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(n_shards)]
        self._index: list[dict[ChainKey, dict[Replays, int]]] = [{} for _ in range(n_shards)]

    def available(self, shard: int) -> int:
        """Blocks that :meth:`allocate` could give."""
        return len(self._free[shard]) + len(self._cached[shard])

    def used(self, shard: int) -> int:
        """Blocks that requests count on."""
        return self.blocks - self.available(shard)

    def cached(self, shard: int) -> int:
        """Unused blocks whose content can still be found."""
        return len(self._cached[shard])

    def allocate(self, shard: int, count: int) -> list[int] | None:
        """``count`` blocks for new content, each with one user; None, and no change, where there are not enough."""
        if count > self.available(shard):
            return None
        taken = []
        for _ in range(count):
            if not self._free[shard]:
                oldest, _ = self._cached[shard].popitem(last=False)
                self._forget(shard, oldest)
                self._free[shard].append(oldest)
            number = self._free[shard].pop()
            self._blocks[shard][number].users = 1
            taken.append(number)
        return taken

    def retain(self, shard: int, blocks: Iterable[int]) -> None:
        """One more user for each block, used or cached."""
        for number in blocks:
            block = self._blocks[shard][number]
            if block.users == 0 and block.key is None:
                raise ValueError(f"block {number} of shard {shard} is free")
            self._cached[shard].pop(number, None)
            block.users += 1

    def release(self, shard: int, blocks: Sequence[int]) -> list[int]:
        """One user less for each block of a request, given in token order. Returns those that became free.

        Of the blocks that become cached the last ones of the sequence are the first to be given away.
        """
        freed = []
        for number in reversed(blocks):
            block = self._blocks[shard][number]
            if block.users == 0:
                raise ValueError(f"block {number} of shard {shard} has no user")
            block.users -= 1
            if block.users == 0:
                if block.key is None:
                    self._free[shard].append(number)
                    freed.append(number)
                else:
                    self._cached[shard][number] = None
        return freed

    def publish(self, shard: int, block: int, key: ChainKey, replays: Replays = EXACT) -> int:
        """Name the content of a used block, so that later sequences find it.

        Returns the block that now answers to the name: an earlier one with the same content keeps it.
        """
        held = self._blocks[shard][block]
        if held.users == 0:
            raise ValueError(f"block {block} of shard {shard} has no user")
        if held.key is not None and (held.key, held.replays) != (key, replays):
            raise ValueError(f"block {block} of shard {shard} already has other content")
        known = self._index[shard].setdefault(key, {}).setdefault(replays, block)
        if known == block:
            held.key, held.replays = key, replays
        return known

    def match(self, shard: int, keys: Sequence[ChainKey], block_tokens: int, *, bounded: bool) -> Hit:
        """The longest beginning of a sequence that is held, each of its blocks with one more user.

        Exact requests take exact content only. Bounded ones prefer it. A block descends from the replays of the block
        before, and from one more only where it begins just behind that replay's hit; the hit ends where that fails. So
        the replays of its last block say how every block of the hit was computed.
        """
        blocks: list[int] = []
        replays = EXACT
        for key in keys:
            found = self._index[shard].get(key, {})
            begun_here = (*replays, len(blocks) * block_tokens)
            fitting = [history for history in found if history in (replays, begun_here)]
            if not bounded:
                fitting = [history for history in fitting if history == EXACT]
            if not fitting:
                break
            replays = min(fitting, key=len)
            blocks.append(found[replays])
        self.retain(shard, blocks)
        return Hit(tuple(blocks), replays)

    def forget(self) -> None:
        """Drop all names: used blocks stay with their users, cached ones become free."""
        for shard in range(self.n_shards):
            for number in [*self._cached[shard]]:
                self._free[shard].append(number)
            self._cached[shard].clear()
            for number in range(self.blocks):
                self._forget(shard, number)

    def _forget(self, shard: int, number: int) -> None:
        block = self._blocks[shard][number]
        if block.key is not None:
            names = self._index[shard][block.key]
            del names[block.replays]
            if not names:
                del self._index[shard][block.key]
            block.key, block.replays = None, EXACT
