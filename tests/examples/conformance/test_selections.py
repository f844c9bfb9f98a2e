"""Scores and picks of layers as a kit has them, on made-up taps, and how clear a selection is."""

import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.topology import topology
from examples.conformance.selections import layer_selections, selection_gaps, spreads
from tests.golden import DATA

LENGTH = 7


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    """Candidate source is layer 6, with six blocks of four; layer 8 selects inside them; layer 5 has ratio 2."""
    return ModelConfig.from_directory(DATA / "tiny-a" / "bf16")


def layer_taps(layer: int) -> dict[str, np.ndarray]:
    """A score tells its row and entry; there are more entries than a sequence of seven tokens has."""
    scores = np.arange(LENGTH, dtype=np.float32)[:, None] + np.arange(16, dtype=np.float32)[None] / 128
    named = {
        "index_score": scores,
        "topk_compressed": np.full((LENGTH, 8), -1, np.int32),
        "router_biased_scores": scores[:, :8],
        "router_indices": np.zeros((LENGTH, 2), np.int32),
        "candidate_blocks": np.asarray([[0, -1]] * (LENGTH - 1) + [[1, -1]], np.int32),
    }
    return {f"layers.{layer}.{name}": value for name, value in named.items()}


def test_every_layer_has_its_router_and_a_selecting_one_its_entries(config):
    plans = topology(config).layers
    assert set(layer_selections(layer_taps(0), plans[0], config)) == {"router_biased_scores", "router_indices"}
    found = layer_selections(layer_taps(5), plans[5], config)
    assert set(found) == {"router_biased_scores", "router_indices", "index_score", "topk_compressed"}
    assert found["index_score"].shape == (LENGTH, 3)
    np.testing.assert_array_equal(np.isfinite(found["index_score"]).sum(axis=1), [0, 1, 1, 2, 2, 3, 3])
    assert found["index_score"][5, 2] == 5 + 2 / 128


def test_a_block_has_its_best_visible_score_and_the_newest_is_the_best(config):
    found = layer_selections(layer_taps(6), topology(config).layers[6], config)
    blocks = found["candidate_score"]
    assert blocks.shape == (LENGTH, 2)
    np.testing.assert_array_equal(blocks[:4], [[np.inf, -np.inf]] * 4)
    np.testing.assert_array_equal(blocks[4:], [[row + 3 / 128, np.inf] for row in (4, 5, 6)])
    np.testing.assert_array_equal(found["candidate_blocks"], layer_taps(6)["layers.6.candidate_blocks"])


def test_entries_outside_the_candidate_blocks_cannot_be_chosen(config):
    found = layer_selections(layer_taps(6) | layer_taps(8), topology(config).layers[8], config)
    finite = np.isfinite(found["index_score"])
    np.testing.assert_array_equal(finite.sum(axis=1), [1, 2, 3, 4, 4, 4, 3])
    np.testing.assert_array_equal(finite[-1], [False] * 4 + [True] * 3)


def gaps(scores: list[list[float]], chosen: int) -> list[float]:
    arrays = {
        "layers.0.index_score": np.asarray(scores, np.float32),
        "layers.0.topk_compressed": np.zeros((len(scores), chosen), np.int32),
        "logits": np.zeros((len(scores), 1)),
    }
    return selection_gaps(arrays).tolist()


def test_a_gap_is_the_lead_of_the_last_choice_in_standard_deviations():
    row = [1.0, 4.0, 2.0, 8.0]
    assert gaps([row], 2) == pytest.approx([2.0 / np.std(row)])
    assert gaps([[*row, -np.inf]], 3) == pytest.approx([1.0 / np.std(row)])


def test_nothing_left_out_is_clear_and_so_are_products_that_are_all_rectified():
    assert gaps([[1.0, 2.0, -np.inf], [3.0, 0.0, 0.0], [3.0, 1.0, 1.0]], 2) == [np.inf, np.inf, 0.0]
    assert gaps([[1.0, 2.0]], 2) == [np.inf]
    assert gaps([[np.inf, 2.0, 1.0, 1.0]], 3) == [0.0]


def test_the_least_clear_selection_of_any_layer_counts():
    arrays = {"logits": np.zeros((2, 1))}
    for layer, lead in enumerate([(4.0, 2.0), (1.0, 3.0)]):
        arrays[f"layers.{layer}.router_biased_scores"] = np.asarray([[lead[row], 0.0] for row in range(2)])
        arrays[f"layers.{layer}.router_indices"] = np.zeros((2, 1), np.int32)
        arrays[f"layers.{layer}.index_score"] = np.asarray([[float(layer), 0.0, -1.0]] * 2)
        arrays[f"layers.{layer}.topk_compressed"] = np.zeros((2, 3), np.int32)
    assert selection_gaps(arrays).tolist() == [2.0, 2.0]
    arrays["layers.1.topk_compressed"] = np.zeros((2, 2), np.int32)
    assert selection_gaps(arrays).tolist() == pytest.approx([1 / np.std([1, 0, -1])] * 2)


def test_spreads_leave_out_what_is_infinite():
    scores = np.asarray([[1.0, 3.0, -np.inf, np.inf], [-np.inf] * 4])
    assert spreads(scores).tolist() == [1.0, 0.0]
