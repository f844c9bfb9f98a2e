"""The kit in the repository against the model in the repository. Numerics f32 and released."""

from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.checkpoint.digest import weights_id
from deepinfer_jax.config import ModelConfig
from examples.conformance.__main__ import KIT, report
from examples.conformance.comparison import Verdict, compare
from examples.conformance.kit import CHAIN_TOKENS, CHECKPOINT, PROMPTS_FILE, Kit, Results
from examples.conformance.recording import run_kit
from tests.golden import DATA

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SHIPPED = DATA.parent.parent / "deepinfer_jax" / "default_model"
LARGEST = 3 << 20  # bytes, without the checkpoint


@pytest.fixture(scope="module")
def kit() -> Kit:
    assert (KIT / PROMPTS_FILE).exists(), "record the kit of the shipped model: python -m examples.conformance build"
    return Kit.read(KIT)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_directory(SHIPPED)


def test_its_checkpoint_is_the_shipped_model_and_it_was_recorded_with_it(kit):
    assert (KIT / CHECKPOINT).is_symlink()
    assert not Path.readlink(KIT / CHECKPOINT).is_absolute()
    assert (KIT / CHECKPOINT).resolve() == SHIPPED
    assert kit.weights_id == weights_id(SHIPPED).value, "record the kit again: python -m examples.conformance build"


def test_it_is_small():
    files = [path for path in KIT.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= LARGEST


def test_its_prompts_reach_beyond_every_limit(kit, config):
    lengths = {name: len(tokens) for name, tokens in kit.prompts.items()}
    assert lengths["single"] == 1
    assert lengths["window"] > config.sliding_window
    assert lengths["top_k"] > max(config.compress_ratios) * config.index_topk
    assert lengths["candidates"] > config.candidates.topk_blocks * config.candidates.block_size
    assert 600 <= lengths["long"] <= 700
    assert {len(chain.tokens) for chain in kit.chains.values()} == {CHAIN_TOKENS}


def test_its_arrays_show_every_limit_at_work(kit, config):
    """Rows that leave out entries at either ratio, and rows that leave out candidate blocks."""
    exact, source = kit.taps["f32"], config.candidates.source_layer_id
    for layer in config.index_source_layer_ids:
        left_out = np.isfinite(exact[f"candidates.layers.{layer}.index_score"]).sum(axis=1) > config.index_topk
        assert left_out.any(), layer
    for arrays in (exact, kit.taps["released"]):
        blocks = np.isfinite(arrays[f"candidates.layers.{source}.candidate_score"]).sum(axis=1) + 1
        assert (blocks > config.candidates.topk_blocks).any()
    assert {name.split(".")[0] for name in exact} == {"chat", "candidates", "long"}


def test_the_shipped_model_computes_what_the_kit_holds(kit, tmp_path):
    run_kit(kit, SHIPPED, tmp_path, lambda line: None)
    outcomes = compare(kit, Results.read(tmp_path))
    others = [outcome for outcome in outcomes if outcome.verdict is not Verdict.PASS]
    assert others == [], report(others)
    assert len(outcomes) > 200
