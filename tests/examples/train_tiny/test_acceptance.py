"""Acceptance along continuations: what a step-by-step verification would find. Numerics f32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.params import initialise
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import F32
from examples.train_tiny import acceptance
from examples.train_tiny.acceptance import Verified, calibrate, calibration_error, verify_along, walk
from examples.train_tiny.continuations import continue_prompts, draw_prompts, is_loop
from examples.train_tiny.losses import next_token_losses, run_windows
from tests.engines import tiny_drafting_configuration

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CONFIG = ModelConfig.from_dict(tiny_drafting_configuration())
DRAFTS = CONFIG.draft.block_size
LENGTH = 48


@pytest.fixture(scope="module")
def params():
    return initialise(Model.describe(CONFIG), jax.random.key(0), F32)


@pytest.fixture(scope="module")
def continued(params):
    prompts = list(np.random.default_rng(2).integers(4, CONFIG.vocab_size, (3, 20), np.int32))
    return prompts, continue_prompts(params, CONFIG, F32, prompts, LENGTH + 1 - 20, 0.0)


def test_a_greedy_continuation_is_the_likeliest_token_each_time(params, continued):
    prompts, written = continued
    assert written.shape == (3, LENGTH + 1)
    np.testing.assert_array_equal(written[:, :20], np.stack(prompts))

    @jax.jit
    def likeliest(params, tokens):
        output, _ = run_windows(params, tokens[:, :-1], CONFIG)
        every = [next_token_losses(params, output, jnp.full_like(tokens[:, 1:], token)) for token in range(96)]
        return jnp.stack(every).argmin(axis=0)

    np.testing.assert_array_equal(likeliest(params, jnp.asarray(written))[:, 19:], written[:, 20:])


def test_sampled_continuations_follow_from_the_seed(params, continued):
    prompts, greedy = continued
    sampled, again = (continue_prompts(params, CONFIG, F32, prompts, 8, 1.0, seed=4) for _ in range(2))
    np.testing.assert_array_equal(sampled, again)
    assert not np.array_equal(sampled, greedy[:, :28])


def test_prompts_lie_inside_one_document_with_room_behind():
    documents = [np.arange(100, dtype=np.int32), np.arange(1000, 1130, dtype=np.int32)]
    prompts = draw_prompts(documents, 30, 50, 40, seed=0)
    assert len({int(prompt[0]) for prompt in prompts}) == 30
    assert all(np.array_equal(prompt, np.arange(prompt[0], prompt[0] + 50)) for prompt in prompts)
    assert all(int(prompt[-1]) + 40 in (range(100) if prompt[0] < 100 else range(1130)) for prompt in prompts)


def test_drafts_of_the_backbone_itself_all_survive(params, continued, monkeypatch):
    """With the backbone's own distributions as drafts nothing is refused, at any temperature."""
    _, written = continued
    places = jnp.tile(jnp.arange(19, LENGTH - DRAFTS, dtype=jnp.int32)[None], (3, 1))
    real = acceptance.drafts_behind

    def perfect(head, backbone, output, rows, windows, places, config, choose):
        drafts = real(head, backbone, output, rows, windows, places, config, choose)
        target = acceptance.target_logits(backbone, output, windows, places, config)
        return type(drafts)(target.argmax(axis=-1).astype(jnp.int32), target, drafts.confidence)

    monkeypatch.setattr(acceptance, "drafts_behind", perfect)
    for temperature in (0.0, 0.7):
        jax.clear_caches()
        survival, _ = verify_along(params, jnp.asarray(written), places, config=CONFIG, temperature=temperature)
        np.testing.assert_allclose(survival, 1.0, atol=1e-4)
    jax.clear_caches()


def test_survival_at_temperature_0_is_agreement_with_the_continuation(params, continued):
    _, written = continued
    places = jnp.tile(jnp.arange(19, LENGTH - DRAFTS, dtype=jnp.int32)[None], (3, 1))
    survival, confidence = verify_along(params, jnp.asarray(written), places, config=CONFIG, temperature=0.0)
    assert survival.shape == confidence.shape == (places.size, DRAFTS)
    assert set(np.unique(survival)) <= {0.0, 1.0}
    assert np.all(np.diff(survival, axis=1) <= 0)
    sampled, _ = verify_along(params, jnp.asarray(written), places, config=CONFIG, temperature=0.7)
    assert np.all((np.asarray(sampled) >= 0) & (np.asarray(sampled) <= 1))
    assert 0 < np.mean(sampled) < 1


def test_a_step_begins_where_the_last_one_ended():
    survival = np.asarray([[1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]], float)
    assert walk(survival).tolist() == [True, False, False, True, True, False, False]
    verified = Verified(survival[walk(survival)], np.zeros((3, 3)))
    assert verified.emitted() == pytest.approx((3 + 1 + 4) / 3)
    assert verified.conditional() == pytest.approx([2 / 3, 1.0, 0.5])


def test_sixteen_tokens_said_twice_are_a_loop():
    assert is_loop([*range(16), 99, *range(16)])
    assert not is_loop([*range(15), 99, *range(15)])
    assert is_loop([5] * 17)
    assert not is_loop([5] * 16)


def test_calibration_finds_the_temperature_that_the_outcomes_were_drawn_with():
    random = np.random.default_rng(0)
    logits = random.normal(0.5, 2.0, (40000, 2))
    true = np.asarray([0.5, 2.0])
    accepted = random.random(logits.shape) < 1.0 / (1.0 + np.exp(-logits / true))
    verified = Verified(np.cumprod(accepted, axis=1).astype(float), logits)
    found = calibrate(verified)
    np.testing.assert_allclose(found, true, rtol=0.08)
    assert calibration_error(verified, found) < 0.01
    assert calibration_error(verified, np.asarray([2.0, 0.5])) > 0.03
