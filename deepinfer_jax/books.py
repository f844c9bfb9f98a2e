"""The host's books: which slots, blocks and cached prefixes there are, and who has them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from deepinfer_jax.cache.blocks import BlockPool, ChainKey, Hit, Replays, chain_keys
from deepinfer_jax.scheduler import Shard
from deepinfer_jax.sequence import Sequence


class Books:
    """Slots, block tables and the prefix index of all shards. Holds no arrays of the device."""

    def __init__(
        self, *, slots: int, blocks: int, block_tokens: int, tables_width: int, n_shards: int, fingerprint: bytes
    ) -> None:
        self.block_tokens, self.n_shards, self.slots = block_tokens, n_shards, slots
        self.pool = BlockPool(blocks, n_shards)
        self.tables = np.zeros((n_shards * slots, tables_width), np.int32)
        self._fingerprint = fingerprint
        self._free = [list(range(slots - 1, -1, -1)) for _ in range(n_shards)]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def number(self, sequence: Sequence) -> int:
        """A sequence's slot, counted over all shards."""
        assert sequence.slot is not None
        return sequence.shard * self.slots + sequence.slot

    def block_numbers(self, shard: int, blocks: Iterable[int]) -> list[int]:
        """Blocks of a shard, counted over all shards."""
        return [shard * self.pool.blocks + block for block in blocks]

    def shards(self, running: Iterable[Sequence]) -> dict[int, Shard]:
        """What each shard has to spare and what it carries."""
        requests, tokens = [0] * self.n_shards, [0] * self.n_shards
        for sequence in running:
            requests[sequence.shard] += 1
            tokens[sequence.shard] += sequence.length
        return {
            shard: Shard(len(self._free[shard]), self.pool.available(shard), requests[shard], tokens[shard])
            for shard in range(self.n_shards)
        }

    def identify(self, sequence: Sequence) -> list[ChainKey]:
        """The identities of all full blocks of the tokens that the host knows."""
        size = self.block_tokens
        while (len(sequence.keys) + 1) * size <= len(sequence.tokens):
            start = len(sequence.keys) * size
            root = sequence.keys[-1] if sequence.keys else self._fingerprint + sequence.request.salt
            images = [
                (span.start - start, span.stop - start, span.digest)
                for span in sequence.request.images
                if span.stop > start
            ]
            sequence.keys += chain_keys(root, sequence.tokens[start : start + size], size, images)
        return sequence.keys

    def find(self, sequence: Sequence, shard: int, *, bounded: bool) -> Hit:
        """The cached beginning of a sequence, retained; the last token that is run here is always computed."""
        full = (sequence.stop - 1) // self.block_tokens
        return self.pool.match(shard, self.identify(sequence)[:full], self.block_tokens, bounded=bounded)

    def seat(self, sequence: Sequence, shard: int, held: list[int], blocks: int) -> bool:
        """Give a sequence a slot, blocks it holds already, and fresh ones up to ``blocks``; False changes nothing."""
        fresh = self.pool.allocate(shard, blocks - len(held)) if self._free[shard] else None
        if fresh is None:
            return False
        sequence.shard, sequence.slot = shard, self._free[shard].pop()
        sequence.blocks = []
        self._extend(sequence, [*held, *fresh])
        return True

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for so many tokens; False, and no change, where there is none left."""
        missing = self.blocks_for(tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        fresh = self.pool.allocate(sequence.shard, missing)
        if fresh is None:
            return False
        self._extend(sequence, fresh)
        return True

    def publish(self, sequence: Sequence) -> list[tuple[int, ChainKey, Replays]]:
        """Name the blocks that are full of confirmed tokens. Returns block, key and replays of the new ones."""
        keys = self.identify(sequence)
        full = min(sequence.confirmed // self.block_tokens, len(keys))
        named = []
        while sequence.published < full:
            at = sequence.published
            block, key, replays = sequence.blocks[at], keys[at], sequence.restart.replays
            if self.pool.publish(sequence.shard, block, key, replays) == block:
                named.append((block, key, replays))
            sequence.published += 1
        return named

    def unseat(self, sequence: Sequence) -> tuple[int, list[int]]:
        """Take slot and blocks back. Returns the slot and the blocks that nothing counts on, over all shards."""
        slot = self.number(sequence)
        freed = self.pool.release(sequence.shard, sequence.blocks)
        assert sequence.slot is not None
        self._free[sequence.shard].append(sequence.slot)
        self.tables[slot] = 0
        sequence.slot, sequence.blocks = None, []
        return slot, self.block_numbers(sequence.shard, freed)

    @property
    def used_slots(self) -> int:
        """Slots in use."""
        return self.n_shards * self.slots - sum(len(free) for free in self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences count on."""
        return sum(self.pool.used(shard) for shard in range(self.n_shards))

    def _extend(self, sequence: Sequence, blocks: list[int]) -> None:
        begin = len(sequence.blocks)
        sequence.blocks += blocks
        self.tables[self.number(sequence), begin : len(sequence.blocks)] = blocks
