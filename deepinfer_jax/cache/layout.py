"""Where compressed entries lie in the page pools.

A *block* covers ``block_tokens`` consecutive tokens of one request. It is one contiguous run of pool rows that holds
the entries of every key/value source layer (*group*) for those tokens: group after group, ``block_tokens / ratio``
rows each.
"""

from __future__ import annotations

import dataclasses

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError

DEFAULT_BLOCK_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """Row arithmetic of the page pools; hashable and static.

    ``ratios``: compression ratio of each group, in layer order.
    """

    block_tokens: int
    ratios: tuple[int, ...]

    @classmethod
    def of(cls, config: ModelConfig, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> PageLayout:
        """The layout of a configuration.

        Raises:
          ConfigError: ``block_tokens`` is not a multiple of twice the candidate block size (of 2 without candidates),
            so that a candidate block or a ratio-2 pair would straddle two blocks.
        """
        multiple = 2 * (config.candidates.block_size if config.candidates else 1)
        if block_tokens <= 0 or block_tokens % multiple:
            raise ConfigError("block_tokens", block_tokens, f"a positive multiple of {multiple}")
        return cls(block_tokens, tuple(config.compress_ratios[layer] for layer in config.kv_source_layer_ids))

    @property
    def rows_per_block(self) -> int:
        """Pool rows of one block over all groups: 320 for 128 tokens of the release."""
        return sum(self.block_tokens // ratio for ratio in self.ratios)

    @property
    def group_offsets(self) -> tuple[int, ...]:
        """First row of each group inside a block."""
        offsets, offset = [], 0
        for ratio in self.ratios:
            offsets.append(offset)
            offset += self.block_tokens // ratio
        return tuple(offsets)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens of one request."""
        return -(-tokens // self.block_tokens)
