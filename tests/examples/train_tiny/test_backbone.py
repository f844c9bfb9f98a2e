"""Training a tiny backbone: what each loss moves, and a run that goes on where it was killed. Numerics f32."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.params import initialise
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import F32
from examples.train_tiny.backbone import _balanced, train_backbone
from examples.train_tiny.batches import Windows
from examples.train_tiny.losses import answers, index_losses, next_token_losses, run_windows, with_memory
from examples.train_tiny.optimisation import CURVE_FILE, Schedule
from tests.engines import tiny_configuration, tiny_drafting_configuration

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CONFIG = ModelConfig.from_dict(tiny_configuration())
LENGTH = 48
SCHEDULE = Schedule(steps=6, batch=2, decay=2, stored_steps=2, warm_up=2, save_every=2)


class KilledError(Exception):
    """Stands for the end of a process in the middle of a run."""


@pytest.fixture(autouse=True, scope="module")
def promotion_of_the_optimiser():
    """Optax mixes integers and floats, and arrays of different rank."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def windows():
    """A stream that repeats itself, so that there is something to learn."""
    pattern = np.random.default_rng(0).integers(4, CONFIG.vocab_size, 7)
    return Windows.of([np.tile(pattern, 60).astype(np.int32)], LENGTH, seed=1)


def curve(directory):
    return [json.loads(line) for line in (directory / CURVE_FILE).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return train_backbone(CONFIG, None, windows(), SCHEDULE, directory), curve(directory)


def test_a_killed_run_goes_on_to_the_same_losses_and_parameters(whole_run, tmp_path):
    params, lines = whole_run

    def kill(line):
        if line["step"] == 5:
            raise KilledError

    with pytest.raises(KilledError):
        train_backbone(CONFIG, None, windows(), SCHEDULE, tmp_path, kill)
    resumed = train_backbone(CONFIG, None, windows(), SCHEDULE, tmp_path)
    assert curve(tmp_path) == lines
    assert [line["step"] for line in lines] == list(range(1, 7))
    jax.tree.map(np.testing.assert_array_equal, resumed, params)


def test_a_finished_run_has_nothing_left_to_do(whole_run, tmp_path):
    params, _ = whole_run
    train_backbone(CONFIG, None, windows(), SCHEDULE, tmp_path)
    before = curve(tmp_path)
    again = train_backbone(CONFIG, None, windows(), SCHEDULE, tmp_path)
    assert curve(tmp_path) == before
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.slow
def test_losses_fall(tmp_path):
    schedule = dataclasses.replace(SCHEDULE, steps=40, stored_steps=10, save_every=40, peak_rate=1e-2)
    train_backbone(CONFIG, None, windows(), schedule, tmp_path)
    lines = curve(tmp_path)
    assert lines[-1]["loss"] < 0.6 * lines[0]["loss"]
    assert lines[-1]["index_loss"] < lines[0]["index_loss"]


def gradients(loss):
    params = initialise(Model.describe(CONFIG), jax.random.key(0), F32)
    batch = jnp.asarray(windows().batch(0, 2))

    def of_params(params):
        output, rows = run_windows(params, batch[:, :-1], CONFIG)
        if loss == "index":
            return index_losses(params, output.taps, rows, LENGTH, 4, CONFIG).sum()
        return next_token_losses(params, output, batch[:, 1:]).mean()

    flat, _ = jax.tree_util.tree_flatten_with_path(jax.jit(jax.grad(of_params))(params))
    return {jax.tree_util.keystr(path): np.abs(np.asarray(leaf)).max() for path, leaf in flat}


def is_index_weight(name):
    return "indexer" in name or "index_key" in name


def test_each_loss_moves_its_own_weights():
    """Index losses move what makes index scores, the loss of the next token everything else."""
    index, language = gradients("index"), gradients("language")
    for name in index:
        if is_index_weight(name):
            assert index[name] > 0, name
            assert language[name] == 0, name
        else:
            assert index[name] == 0, name
            assert language[name] > 0 or "_bias" in name, name
    assert sum(map(is_index_weight, index)) >= 4


def test_balancing_lowers_the_bias_of_experts_that_were_chosen_too_often():
    params = initialise(Model.describe(CONFIG), jax.random.key(0), F32)
    loads = jnp.tile(jnp.asarray([[0.4, 0.3, 0.2, 0.1]]), (3, 1))
    for before, after in zip(params.layers.layers, _balanced(params, loads, 0.01).layers.layers, strict=True):
        moved = after.feed_forward.text_bias - before.feed_forward.text_bias
        np.testing.assert_allclose(moved, [-0.01, -0.01, 0.01, 0.01], atol=1e-6)
        np.testing.assert_array_equal(after.feed_forward.image_bias, after.feed_forward.text_bias)


def test_only_answers_count_in_windows_with_chats():
    mark, end = 8, 1
    chats = jnp.asarray([[0, 5, 8, 6, 7, 1, 5, 8, 4, 1, 5], [0, 5, 5, 6, 7, 1, 5, 5, 4, 1, 5]])
    counted = answers(chats, mark, end)
    assert counted[0].tolist() == [False] * 3 + [True] * 3 + [False] * 2 + [True] * 2 + [False]
    assert counted[1].all()
    assert answers(chats, None, end).all()


def test_without_memory_engram_adds_nothing():
    config = ModelConfig.from_dict(tiny_drafting_configuration())
    params = initialise(Model.describe(config), jax.random.key(0), F32)
    batch = jnp.asarray(windows().batch(0, 2))

    @jax.jit
    def hidden(params):
        return run_windows(params, batch[:, :-1], config)[0].hidden

    forgetting = hidden(with_memory(params, jnp.zeros(()), config))
    bare = dataclasses.replace(config, engram=None)
    never = jax.jit(lambda params: run_windows(params, batch[:, :-1], bare)[0].hidden)
    np.testing.assert_array_equal(forgetting, never(dataclasses.replace(params, engrams=(), token_map=None)))
    np.testing.assert_array_equal(hidden(with_memory(params, jnp.ones(()), config)), hidden(params))
    assert not np.array_equal(forgetting, hidden(params))
