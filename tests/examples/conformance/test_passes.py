"""The arrays of a kit against intermediates of an independent implementation. Numerics f32, one full pass."""

import numpy as np
import pytest

from deepinfer_jax.topology import Mode, topology
from examples.conformance.kit import LAYER_ARRAYS
from examples.conformance.passes import TracedModel
from examples.conformance.selections import SCORES_OF, selection_gaps, spreads
from tests.golden import DATA, document, tensors

pytestmark = pytest.mark.usefixtures("quickly_compiled")

TOKENS = document("tiny-a/prompts.json")["p3w_plus1"]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> TracedModel:
    return TracedModel.load(DATA / "tiny-a" / "quant", "f32", len(TOKENS))


@pytest.fixture(scope="module")
def arrays(model) -> dict[str, np.ndarray]:
    return model.arrays(TOKENS)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return tensors("tiny-a/taps_f32_p3w_plus1.safetensors")


def assert_close(got: np.ndarray, want: np.ndarray, name: str) -> None:
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), finite, err_msg=name)
    error = np.abs(got[finite] - want[finite]) / np.maximum(1, np.abs(want[finite]))
    assert error.max(initial=0) <= TOLERANCE, name


def test_arrays_have_a_row_for_every_token_and_stand_where_a_layer_has_them(model, arrays):
    assert model.rows == 128
    assert {len(array) for array in arrays.values()} == {len(TOKENS)}
    for plan in topology(model.config).layers:
        found = {name.split(".")[2] for name in arrays if name.startswith(f"layers.{plan.layer}.")}
        assert found <= set(LAYER_ARRAYS)
        assert ("compress_kv" in found) == ("index_k" in found) == (plan.kind.mode is Mode.FULL)
        assert ("topk_compressed" in found) == ("index_score" in found) == plan.kind.selects
        assert ("candidate_blocks" in found) == plan.kind.publishes_candidates
        assert len(found) >= 7


def test_values_are_those_of_the_independent_implementation(model, arrays, golden):
    for plan in topology(model.config).layers:
        prefix = f"layers.{plan.layer}."
        for name in ("attn_in", "window_kv", "attn_out", "router_biased_scores", "ffn_out"):
            assert_close(arrays[prefix + name], golden[prefix + name], prefix + name)
        if plan.kind.mode is Mode.FULL:
            for name in ("compress_kv", "index_k"):
                completed = arrays[prefix + name][plan.kind.ratio - 1 :: plan.kind.ratio]
                assert_close(completed, golden[prefix + name], prefix + name)
    assert_close(arrays["logits"], tensors("tiny-a/logits_f32.safetensors")["p3w_plus1"], "logits")


def test_selections_are_those_of_the_independent_implementation(model, arrays, golden):
    for plan in topology(model.config).layers:
        prefix = f"layers.{plan.layer}."
        chosen = (np.sort(found[prefix + "router_indices"], axis=1) for found in (arrays, golden))
        np.testing.assert_array_equal(*chosen)
        if plan.kind.selects:
            scores = golden.get(prefix + "index_score_masked", golden[prefix + "index_score"])
            assert_close(arrays[prefix + "index_score"], scores, prefix)
            np.testing.assert_array_equal(arrays[prefix + "topk_compressed"], golden[prefix + "topk_compressed"])
        if plan.kind.publishes_candidates:
            size = model.config.candidates.block_size
            kept = [sorted({entry // size for entry in np.flatnonzero(row)}) for row in golden[prefix + "candidates"]]
            assert [
                [block for block in row if block >= 0] for row in arrays[prefix + "candidate_blocks"].tolist()
            ] == kept


def test_gaps_are_those_of_the_independent_implementation(arrays):
    """Recorded ones are absolute: the least lead in any row."""
    names = {"router_gap": "router_indices", "topk_gap": "topk_compressed", "cand_gap": "candidate_blocks"}
    recorded = document("tiny-a/selection_gaps.json")["f32"]["p3w_plus1"]
    for place, want in recorded.items():
        prefix, _, kind = place.rpartition(".")
        picks, scores = (f"{prefix}.{name}" for name in (names[kind], SCORES_OF[names[kind]]))
        gaps = selection_gaps({name: arrays[name] for name in (picks, scores, "logits")})
        limited = np.isfinite(gaps)
        leads = gaps[limited] * spreads(arrays[scores])[limited]
        assert leads.min() == pytest.approx(want, rel=1e-2, abs=1e-5), place
    assert len(recorded) == 18
