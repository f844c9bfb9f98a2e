"""Outcomes on made-up kits: tolerances of both numerics, near ties, and chains."""

import numpy as np
import pytest

from examples.conformance.comparison import Outcome, Verdict, compare
from examples.conformance.kit import Chain, Kit, Results

ROWS = 4
SCORES = np.asarray([[4.0, 3.0, 2.0, 1.0, -np.inf]] * ROWS, np.float32)
SPREAD = float(np.asarray([4.0, 3.0, 2.0, 1.0]).std())
PICKS = np.asarray([[0, 1, -1]] * ROWS, np.int32)


def kit(arrays: dict[str, np.ndarray], numerics: str = "f32", chains: dict[str, Chain] | None = None) -> Kit:
    named = {f"p.{name}": array for name, array in ({"positions": np.arange(ROWS, dtype=np.int32)} | arrays).items()}
    return Kit(None, {"p": (1, 2, 3)}, chains or {}, {numerics: named})


def outcomes(want: Kit, changed: dict[str, np.ndarray | None]) -> dict[str, Outcome]:
    """Outcomes by array for results that equal the kit but for some arrays; None removes one."""
    ((numerics, arrays),) = want.taps.items()
    got = arrays | {f"p.{name}": array for name, array in changed.items()}
    got = {name: array for name, array in got.items() if array is not None}
    found = compare(want, Results({}, {numerics: got}, {}))
    return {outcome.name.removeprefix(f"{numerics} p "): outcome for outcome in found}


def values(*numbers: float) -> np.ndarray:
    return np.asarray([numbers] * ROWS, np.float32)


@pytest.mark.parametrize(
    ("kind", "numerics", "want", "got", "verdict"),
    [
        ("ffn_in", "f32", (1.0, -20.0), (1.00009, -20.0018), Verdict.PASS),
        ("ffn_in", "f32", (1.0, -20.0), (1.00011, -20.0), Verdict.FAIL),
        ("ffn_in", "f32", (1.0, -20.0), (1.0, -20.0022), Verdict.FAIL),
        ("logits", "f32", (1.0, 0.5), (1.0, 0.50019), Verdict.PASS),
        ("ffn_in", "released", (3.0, 4.0), (3.0, 4.049), Verdict.PASS),
        ("ffn_in", "released", (3.0, 4.0), (3.0, 4.051), Verdict.FAIL),
        ("ffn_out", "released", (3.0, 4.0), (3.0, 4.24), Verdict.PASS),
        ("ffn_out", "released", (3.0, 4.0), (3.0, 4.26), Verdict.FAIL),
        ("ffn_out", "released", (0.0, 0.0), (0.0, 0.1), Verdict.FAIL),
        ("index_score", "f32", (1.0, -np.inf), (1.0, -np.inf), Verdict.PASS),
        ("index_score", "f32", (1.0, -np.inf), (1.0, -1e30), Verdict.FAIL),
        ("index_score", "released", (1.0, -np.inf), (1.0, 0.0), Verdict.FAIL),
        ("candidate_score", "released", (1.0, np.inf), (1.0, -np.inf), Verdict.FAIL),
        ("ffn_in", "f32", (1.0, 2.0), (1.0, np.nan), Verdict.FAIL),
        ("ffn_in", "released", (1.0, 2.0), (1.0, np.nan), Verdict.FAIL),
    ],
)
def test_values_pass_within_the_tolerance_of_their_numerics(kind, numerics, want, got, verdict):
    outcome = outcomes(kit({f"layers.0.{kind}": values(*want)}, numerics), {f"layers.0.{kind}": values(*got)})
    assert outcome[f"layers.0.{kind}"].verdict is verdict
    assert outcome["positions"].verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("array", "remark"),
    [
        (values(1.0), "shape [4, 1] instead of [4, 2]"),
        (values(1.0, 2.0).astype(np.int32), "dtype int32 instead of floating"),
    ],
)
def test_an_array_of_another_form_fails(array, remark):
    outcome = outcomes(kit({"logits": values(1.0, 2.0)}), {"logits": array})["logits"]
    assert (outcome.verdict, outcome.remark, outcome.difference) == (Verdict.FAIL, remark, None)


def test_other_positions_fail():
    found = outcomes(kit({}), {"positions": np.asarray([0, 1, 2, 4])})
    assert found["positions"].verdict is Verdict.FAIL


def selecting(numerics: str, scores: np.ndarray) -> Kit:
    arrays = {"ffn_out": values(1.0, 2.0), "attn_in": values(1.0, 2.0), "index_score": scores, "topk_compressed": PICKS}
    return kit({f"layers.0.{name}": array for name, array in arrays.items()} | {"logits": values(1.0)}, numerics)


def picks(*first_row: int) -> np.ndarray:
    return np.concatenate([np.asarray([first_row], np.int32), PICKS[1:]])


@pytest.mark.parametrize(
    ("chosen", "offset"),
    [
        ((1, 0, -1), 0.0),
        ((0, 2, -1), 1 / SPREAD),
        ((0, 3, -1), 2 / SPREAD),
        ((1, 2, -1), 1 / SPREAD),
        ((0, 4, -1), np.inf),
        ((0, 5, -1), np.inf),
        ((0, 0, -1), np.inf),
        ((0, -1, -1), np.inf),
        ((0, 1, 2), np.inf),
        ((0, -7, -1), np.inf),
    ],
)
def test_differing_picks_are_measured_from_the_last_chosen_score(chosen, offset):
    found = outcomes(selecting("released", SCORES), {"layers.0.topk_compressed": picks(*chosen)})
    outcome = found["layers.0.topk_compressed"]
    assert outcome.difference == pytest.approx(offset)
    assert outcome.verdict is (Verdict.PASS if offset == 0 else Verdict.FAIL)


@pytest.mark.parametrize(
    ("numerics", "gap", "verdict"),
    [
        ("f32", 1e-5, Verdict.PASS),
        ("f32", 3e-5, Verdict.FAIL),
        ("released", 0.2, Verdict.PASS),
        ("released", 0.3, Verdict.FAIL),
    ],
)
def test_a_near_tie_passes(numerics, gap, verdict):
    scores = SCORES.astype(np.float64)
    for _ in range(50):
        scores[:, 2] = scores[:, 1] - gap * scores[0, :4].std()
    found = outcomes(selecting(numerics, scores), {"layers.0.topk_compressed": picks(0, 2, -1)})
    outcome = found["layers.0.topk_compressed"]
    assert outcome.difference == pytest.approx(gap, rel=1e-3)
    assert (outcome.verdict, outcome.remark) == (verdict, "1 of 4 rows differ")


def test_equal_scores_are_a_tie_whatever_is_chosen():
    found = outcomes(selecting("f32", np.ones_like(SCORES)), {"layers.0.topk_compressed": picks(3, 4, -1)})
    assert found["layers.0.topk_compressed"].verdict is Verdict.PASS


def test_a_row_with_a_near_tie_is_left_out_of_what_is_computed_later_only():
    scores = SCORES.copy()
    scores[:, 2] = scores[:, 1] - 1e-6
    disturbed = values(1.0, 2.0)
    disturbed[0] = 9.0
    changed = {"layers.0.topk_compressed": picks(0, 2, -1), "layers.0.ffn_out": disturbed}
    found = outcomes(selecting("f32", scores), changed)
    assert found["layers.0.ffn_out"].verdict is Verdict.PASS
    assert found["layers.0.ffn_out"].remark == "without 1 of 4 rows"
    assert found["layers.0.attn_in"].remark == ""
    found = outcomes(selecting("f32", scores), changed | {"layers.0.attn_in": disturbed})
    assert found["layers.0.attn_in"].verdict is Verdict.FAIL
    assert list(found) == ["positions", *(f"layers.0.{name}" for name in ORDER), "logits"]


ORDER = ("attn_in", "index_score", "topk_compressed", "ffn_out")


def test_where_every_row_differed_nothing_passes_any_more():
    found = outcomes(
        selecting("f32", np.ones_like(SCORES)),
        {"layers.0.topk_compressed": np.asarray([[3, 4, -1]] * ROWS, np.int32)},
    )
    assert found["layers.0.topk_compressed"].verdict is Verdict.PASS
    assert found["logits"].verdict is Verdict.FAIL
    assert found["logits"].remark == "no row is left: all differed in near ties before"


@pytest.mark.parametrize(
    ("margins", "gap", "got", "verdict", "difference"),
    [
        ((1.0, 1.0), 1.0, (5, 6), Verdict.PASS, 0.0),
        ((1.0, 1.0), None, (5, 7), Verdict.FAIL, 1.0),
        ((1.0, 9e-4), None, (5, 7), Verdict.PASS, 9e-4),
        ((9e-4, 1.0), 3e-5, (4, 7), Verdict.PASS, 9e-4),
        ((2e-3, 1.0), 3e-5, (4, 7), Verdict.FAIL, 2e-3),
        ((2e-3, 1.0), 1e-5, (4, 7), Verdict.PASS, 2e-3),
        ((0.2, 1.0), 1e-5, (4, 7), Verdict.FAIL, 0.2),
        ((-1e-6, 1.0), 1.0, (4, 7), Verdict.PASS, 0.0),
        ((1.0, 1.0), 1.0, (5,), Verdict.FAIL, None),
        ((1.0, 1.0), 1.0, (5, 6, 7), Verdict.FAIL, None),
    ],
)
def test_a_chain_is_compared_up_to_its_first_other_token(margins, gap, got, verdict, difference):
    want = kit({}, chains={"p": Chain((5, 6), margins, gap)})
    outcome, *_ = compare(want, Results({"p": got}, {}, {}))
    assert (outcome.name, outcome.verdict, outcome.difference) == ("chain p", verdict, difference)


def test_chains_and_arrays_that_the_kit_lacks_are_unknown():
    results = Results({"q": (1,)}, {"f32": {"p.logit": values(1.0)}}, {"chains.json r": "damaged"})
    found = {outcome.name: outcome.verdict for outcome in compare(kit({}), results)}
    assert found == {
        "f32 p positions": Verdict.MISSING,
        "chains.json q": Verdict.UNKNOWN,
        "chains.json r": Verdict.FAIL,
        "taps_f32.safetensors p.logit": Verdict.UNKNOWN,
    }
