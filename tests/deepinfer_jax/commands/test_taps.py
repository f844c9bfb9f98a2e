"""The golden form of taps, on made-up numbers; real ones are compared through the `logits` command."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.taps import golden_taps
from tests.golden import DATA

ROWS, LENGTH = 8, 7


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_directory(DATA / "tiny-a" / "bf16")


def padded_taps() -> dict[str, jax.Array]:
    """Taps of layers 5 (ratio 2), 6 (candidate source) and 8 (inside candidates); a value tells its row and column."""
    table = jnp.arange(ROWS, dtype=jnp.float32)[:, None] + jnp.arange(64, dtype=jnp.float32)[None] / 128
    picks = jnp.tile(jnp.asarray([[0, 1, -1, -1, -1, -1, -1, -1]], jnp.int32), (ROWS, 1))
    taps = {"embed_out": table.astype(jnp.bfloat16), "collapsed": table}
    for layer, ratio in ((5, 2), (6, 1), (8, 1)):
        taps[f"layers.{layer}.index_score"] = table[:, : ROWS // ratio]
        taps[f"layers.{layer}.topk_compressed"] = picks
        taps[f"layers.{layer}.ffn_in"] = table
    for layer in (5, 6):
        taps |= {f"layers.{layer}.compress_kv": table, f"layers.{layer}.index_k": table[:, :32]}
    # Blocks of four entries; the last row keeps the second block, the others the first.
    blocks = jnp.full((ROWS, 6), -1, jnp.int32).at[:, 0].set(0).at[LENGTH - 1, 0].set(1)
    return taps | {"layers.6.candidate_blocks": blocks}


@pytest.fixture
def golden(config) -> dict[str, np.ndarray]:
    return golden_taps(padded_taps(), config, LENGTH)


def test_only_golden_names_come_out(golden):
    selection = {"index_score", "topk_compressed", "topk_score"}
    entries = {"compress_kv", "index_k"}
    layers = {5: selection | entries, 6: selection | entries | {"candidates"}, 8: selection | {"index_score_masked"}}
    expected = {f"layers.{layer}.{name}" for layer, names in layers.items() for name in names}
    assert set(golden) == expected | {"embed_out", "collapsed"}


def test_padding_rows_are_cut_and_bfloat16_is_widened(golden):
    table = np.asarray(padded_taps()["collapsed"])[:LENGTH]
    np.testing.assert_array_equal(golden["collapsed"], table)
    assert golden["embed_out"].dtype == np.float32
    np.testing.assert_array_equal(golden["embed_out"], np.asarray(jnp.asarray(table, jnp.bfloat16), np.float32))


def test_entries_stand_in_entry_order_and_an_incomplete_one_is_left_out(golden):
    np.testing.assert_array_equal(golden["layers.5.compress_kv"][:, 0], [1, 3, 5])
    np.testing.assert_array_equal(golden["layers.5.index_k"].shape, (3, 32))
    np.testing.assert_array_equal(golden["layers.6.compress_kv"][:, 0], range(LENGTH))


def test_scores_of_entries_that_a_row_does_not_see_are_infinitely_low(golden):
    seen = np.isfinite(golden["layers.5.index_score"])
    np.testing.assert_array_equal(seen.sum(axis=1), [0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(np.isfinite(golden["layers.6.index_score"]), np.tri(LENGTH, dtype=bool))
    assert golden["layers.5.index_score"][5, 2] == 5 + 2 / 128


def test_candidates_cover_whole_blocks_and_mask_later_scores(golden):
    kept = np.repeat([[1, 1, 1, 1, 0, 0, 0]], LENGTH, axis=0)
    kept[-1] = [0, 0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(golden["layers.6.candidates"], kept)
    assert golden["layers.6.candidates"].dtype == np.uint8
    masked = np.isfinite(golden["layers.8.index_score_masked"])
    np.testing.assert_array_equal(masked, np.tri(LENGTH, dtype=bool) & (kept == 1))
    np.testing.assert_array_equal(np.isfinite(golden["layers.8.index_score"]), np.tri(LENGTH, dtype=bool))


def test_a_pick_has_its_score_and_an_unused_place_none(golden):
    np.testing.assert_array_equal(golden["layers.5.topk_score"][5], [5, 5 + 1 / 128, *[-np.inf] * 6])
    # The last row of layer 8 sees neither picked entry inside its candidate block.
    assert not np.isfinite(golden["layers.8.topk_score"][-1]).any()


def test_a_sequence_shorter_than_an_entry_has_none(config):
    taps = padded_taps()
    nothing = {name: jnp.full_like(taps[name], -1) for name in taps if name.endswith("topk_compressed")}
    golden = golden_taps(taps | nothing, config, 1)
    assert golden["layers.5.compress_kv"].shape == (0, 64)
    assert golden["layers.5.index_score"].shape == (1, 0)
    assert not np.isfinite(golden["layers.5.topk_score"]).any()


def test_a_pass_without_taps_has_none(config):
    assert golden_taps({}, config, 3) == {}
