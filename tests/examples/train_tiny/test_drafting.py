"""Drafts along windows: the same as the running model's, and trained towards the frozen backbone. Numerics f32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import initial_state
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.draft import chain_drafts, context_keys, context_windows, draft_block, greedy
from deepinfer_jax.model.params import initialise
from deepinfer_jax.model.source import PagedSource
from deepinfer_jax.model.transformer import Model, forward
from deepinfer_jax.numerics import F32
from deepinfer_jax.runtime.batch import Chunk, StepShape, pack
from examples.train_tiny.batches import Windows
from examples.train_tiny.drafting import (
    AGREEMENT,
    DISTRIBUTION,
    draft_losses,
    drafts_behind,
    last_anchor,
    target_logits,
    train_draft_head,
)
from examples.train_tiny.losses import run_windows
from examples.train_tiny.optimisation import CURVE_FILE, Schedule
from examples.train_tiny.own_text import CONTEXT, NEW_TOKENS, NOTHING, DraftWindows
from tests.engines import tiny_drafting_configuration
from tests.examples.train_tiny.test_backbone import curve

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CONFIG = ModelConfig.from_dict(tiny_drafting_configuration())
LENGTH = 48


@pytest.fixture(autouse=True, scope="module")
def promotion_of_the_optimiser():
    """Optax mixes integers and floats, and arrays of different rank."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def params():
    return initialise(Model.describe(CONFIG), jax.random.key(0), F32)


def windows(count):
    return jnp.asarray(np.random.default_rng(1).integers(4, CONFIG.vocab_size, (count, LENGTH + 1), np.int32))


def test_drafts_along_a_window_are_those_of_the_running_model(params):
    """Over paged state, a request that has run as far as the place drafts the same."""
    window, place = windows(1), 21

    @jax.jit
    def along_window(params, window):
        output, rows = run_windows(params, window[:, :-1], CONFIG)
        return drafts_behind(params.draft, params, output, rows, window, jnp.asarray([[place]]), CONFIG, greedy)

    along = along_window(params, window)
    layout = PageLayout.of(CONFIG)
    blocks = layout.blocks_for(LENGTH)
    state = initial_state(CONFIG, F32, slots=1, blocks=blocks, layout=layout)
    batch, *_ = pack([Chunk(0, 0, window[0, : place + 1].tolist())], StepShape(0, 1, place + 1))

    @jax.jit
    def running(params, state, batch, anchor):
        rows, source = batch.to_rows(), PagedSource(state, jnp.arange(blocks, dtype=jnp.int32)[None])
        output = forward(params, rows, source, CONFIG, F32)
        keys = context_keys(params.draft, output.draft_taps, rows, CONFIG, F32)
        at = jnp.asarray([place])
        contexts = context_windows(keys, rows, output.source, jnp.zeros_like(at), at, CONFIG)
        block = draft_block(params.draft, params.embedding, params.head, anchor, at, contexts, CONFIG, F32)
        return chain_drafts(params.draft, block, anchor)

    drafts = running(params, state, batch, window[0, place + 1 : place + 2])
    np.testing.assert_array_equal(along.tokens, drafts.tokens)
    np.testing.assert_allclose(along.logits, drafts.logits, atol=1e-4)
    np.testing.assert_allclose(along.confidence, drafts.confidence, atol=1e-4)


def test_targets_are_what_the_backbone_says_behind_the_anchor(params):
    window = windows(2)

    @jax.jit
    def run(params):
        output, _ = run_windows(params, window[:, :-1], CONFIG)
        return output, target_logits(params, output, window, jnp.asarray([[3], [10]]), CONFIG)

    output, target = run(params)
    hidden = output.hidden.reshape(2, LENGTH, -1)
    for number, place in enumerate((3, 10)):
        expected = hidden[number, place + 1 : place + 4] @ params.head.T
        np.testing.assert_allclose(target[number], expected, atol=1e-4)


def test_the_last_anchor_leaves_a_token_for_every_draft():
    block = CONFIG.draft.block_size
    assert last_anchor(windows(1), CONFIG) + 1 + block == LENGTH


def test_a_confidence_learns_only_where_the_drafts_before_it_were_agreed_with():
    likeliest = jax.nn.one_hot(jnp.asarray([[1, 2, 3]]), 5) * 9.0
    drafts = dataclasses.make_dataclass("Drafts", ["logits", "confidence"])

    def doubt(confidence):
        wrong_second = jax.nn.one_hot(jnp.asarray([[1, 4, 3]]), 5)
        return draft_losses(drafts(wrong_second, confidence), likeliest, DISTRIBUTION)[1]["confidence_loss"]

    slopes = jax.grad(doubt)(jnp.zeros((1, 3)))[0]
    assert slopes[0] < 0 < slopes[1]
    assert slopes[2] == 0


def own_windows(pattern):
    """As if a backbone had said the pattern behind prompts of it."""
    return np.stack(
        [np.resize(np.roll(pattern, shift), CONTEXT + NEW_TOKENS + 1).astype(np.int32) for shift in range(3)]
    )


@pytest.mark.slow
def test_the_head_learns_and_the_backbone_stays(params, tmp_path):
    pattern = np.random.default_rng(0).integers(4, CONFIG.vocab_size, 7)
    stream = Windows.of([np.tile(pattern, 60).astype(np.int32)], LENGTH, seed=1)
    before = jax.tree.map(np.asarray, params)
    schedule = Schedule(steps=30, batch=2, decay=10, stored_steps=5, warm_up=3, save_every=15)
    head = train_draft_head(params, CONFIG, DraftWindows(stream, NOTHING), schedule, tmp_path)
    lines = curve(tmp_path)
    assert (tmp_path / CURVE_FILE).exists()
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert lines[-1]["emitted"] > lines[0]["emitted"] + 0.5
    jax.tree.map(np.testing.assert_array_equal, params, before)

    batches = DraftWindows(stream, own_windows(pattern))
    begin = jax.tree.map(jnp.array, head)
    train_draft_head(params, CONFIG, batches, schedule, tmp_path / "own", emphasis=AGREEMENT, begin=begin)
    again = curve(tmp_path / "own")
    assert again[0]["emitted"] > lines[0]["emitted"] + 0.5
    assert again[-1]["loss"] < again[0]["loss"]
