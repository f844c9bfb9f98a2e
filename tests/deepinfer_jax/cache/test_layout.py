"""Page layout: a block is one run of rows, group after group, each with one row per entry."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.cache.layout import DEFAULT_BLOCK_TOKENS, PageLayout
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from tests.configurations import raw_preset


def released():
    return ModelConfig.preset("v4.1-flash")


def without(config, feature):
    return dataclasses.replace(config, **{feature: None})


def test_released_block():
    """Design section 4: 3 x 64 + 128 = 320 rows for 128 tokens."""
    layout = PageLayout.of(released())
    assert layout.block_tokens == DEFAULT_BLOCK_TOKENS == 128
    assert layout.ratios == (2, 2, 2, 1)
    assert layout.group_offsets == (0, 64, 128, 192)
    assert layout.rows_per_block == 320


def test_other_block_lengths():
    layout = PageLayout.of(released(), 16)
    assert (layout.group_offsets, layout.rows_per_block) == ((0, 8, 16, 24), 40)


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2), (256, 2), (1_048_576, 8192)]
)
def test_blocks_for(tokens, blocks):
    assert PageLayout.of(released()).blocks_for(tokens) == blocks


@given(ratios=st.lists(st.sampled_from([1, 2]), max_size=6), half=st.integers(1, 70))
def test_groups_tile_the_block(ratios, half):
    """Every (group, entry) of a block has one row of its own, and no row is left over."""
    layout = PageLayout(2 * half, tuple(ratios))
    rows = [
        offset + entry
        for offset, ratio in zip(layout.group_offsets, layout.ratios, strict=True)
        for entry in range(layout.block_tokens // ratio)
    ]
    assert rows == list(range(layout.rows_per_block))


@pytest.mark.parametrize("block_tokens", [-16, 0, 1, 8, 24, 127])
def test_a_block_must_hold_whole_candidate_blocks_of_every_group(block_tokens):
    """Twice the candidate block size of 8, so that ratio-2 groups hold whole blocks too."""
    with pytest.raises(ConfigError) as refused:
        PageLayout.of(released(), block_tokens)
    expected = f"configuration key 'block_tokens' is {block_tokens}; accepted: a positive multiple of 16"
    assert str(refused.value) == expected


@pytest.mark.parametrize(("block_tokens", "accepted"), [(2, True), (6, True), (3, False), (0, False), (-2, False)])
def test_without_candidates_only_pairs_must_fit(block_tokens, accepted):
    config = without(released(), "candidates")
    if accepted:
        assert PageLayout.of(config, block_tokens).rows_per_block == 3 * block_tokens // 2 + block_tokens
    else:
        with pytest.raises(ConfigError, match="a positive multiple of 2$"):
            PageLayout.of(config, block_tokens)


def test_a_model_of_window_layers_only_has_no_rows():
    raw = raw_preset("peer-50m")
    raw["text_config"] |= {
        "compress_ratios": [0] * 6,
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "candidate_source_layer_id": None,
    }
    layout = PageLayout.of(ModelConfig.from_dict(raw))
    assert (layout.ratios, layout.group_offsets, layout.rows_per_block) == ((), (), 0)
