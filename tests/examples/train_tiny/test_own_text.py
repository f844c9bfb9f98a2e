"""Own text: greedy continuations of training text without loops, and when drafts train on them. Numerics f32."""

import jax
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.params import initialise
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import F32
from examples.train_tiny import own_text as module
from examples.train_tiny.batches import Windows
from examples.train_tiny.continuations import continue_prompts, is_loop
from examples.train_tiny.own_text import CONTEXT, NEW_TOKENS, NOTHING, DraftWindows, own_text
from tests.engines import tiny_drafting_configuration

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CONFIG = ModelConfig.from_dict(tiny_drafting_configuration())
TEXT = [np.random.default_rng(2).integers(4, CONFIG.vocab_size, 900, np.int32)]
LENGTH = CONTEXT + NEW_TOKENS + 1


@pytest.fixture(scope="module")
def backbone():
    return initialise(Model.describe(CONFIG), jax.random.key(0), F32)


def test_own_text_is_the_backbones_and_holds_no_loops(backbone, tmp_path):
    told = []
    windows = own_text(backbone, CONFIG, TEXT, 20, tmp_path, 3, told.append)
    assert told == [20]
    assert windows.shape[1] == LENGTH
    assert len(windows) > 0
    again = continue_prompts(backbone, CONFIG, F32, [window[:CONTEXT] for window in windows], NEW_TOKENS + 1, 0.0)
    np.testing.assert_array_equal(again, windows)
    assert not any(is_loop(window[CONTEXT:].tolist()) for window in windows)


def test_own_text_is_written_once(backbone, tmp_path, monkeypatch):
    first = own_text(backbone, CONFIG, TEXT, 20, tmp_path, 3)
    monkeypatch.setattr(module, "continue_prompts", None)
    np.testing.assert_array_equal(own_text(backbone, CONFIG, TEXT, 20, tmp_path, 3), first)


def test_every_second_step_is_own_text():
    stream = Windows.of([np.arange(2000, dtype=np.int32)], 384, seed=1)
    own = -np.tile(np.arange(1, 8, dtype=np.int32)[:, None], (1, LENGTH))
    batches = DraftWindows(stream, own, seed=0)
    seen = []
    for step in range(14):
        windows, first = batches.batch(step, 2)
        if step % 2:
            np.testing.assert_array_equal(windows, stream.batch(step, 2))
            assert first == 0
        else:
            assert (windows.shape, first) == ((3, LENGTH), CONTEXT - 2)
            seen += windows[:, 0].tolist()
    assert sorted(seen[:7]) == sorted(seen[7:14]) == list(range(-7, 0))
    assert seen[:7] != seen[7:14]


def test_without_own_text_all_steps_are_text():
    stream = Windows.of([np.arange(2000, dtype=np.int32)], 384, seed=1)
    np.testing.assert_array_equal(DraftWindows(stream, NOTHING).batch(4, 2)[0], stream.batch(4, 2))
