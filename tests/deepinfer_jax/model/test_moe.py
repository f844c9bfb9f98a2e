"""The router against golden picks, and the whole feed-forward against a float64 loop over rows and experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.exchange import LocalExchange
from deepinfer_jax.model.moe import MixtureOfExperts, mixture_of_experts, route
from deepinfer_jax.model.params import Stored, initialise, parameters
from deepinfer_jax.numerics import Numerics
from tests.golden import tensors

ROWS = 9
CHOSEN = 3
IMAGE = np.arange(ROWS) % 3 == 0
VALID = np.arange(ROWS) < ROWS - 2

run = jax.jit(mixture_of_experts, static_argnums=(4, 5, 6))
choose = jax.jit(route, static_argnums=(3, 4))


@functools.cache
def config():
    return dataclasses.replace(ModelConfig.preset("mini-40"), swiglu_limit=0.7)


@functools.cache
def layer(experts=8):
    described = MixtureOfExperts.describe(config(), "layers.0.ffn", experts)
    return initialise(described, jax.random.key(0), Numerics.preset("f32"))


def inputs(seed=0, rows=ROWS):
    return np.random.default_rng(seed).standard_normal((rows, config().hidden_size)).astype(np.float32)


def router(weight, text_bias, image_bias):
    """A feed-forward of which only the router matters."""
    return layer().replace(
        router=jnp.asarray(weight), text_bias=jnp.asarray(text_bias), image_bias=jnp.asarray(image_bias)
    )


def silu(values):
    return values / (1 + np.exp(-values))


def expert_output(x, gate_up, down, weight, limit):
    gate, up = np.split(np.asarray(gate_up, np.float64) @ x, 2)
    return np.asarray(down, np.float64) @ (silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit) * weight)


def reference_route(params, x, image, chosen, config):
    """Ids and weights of one row, best first, in float64 (specification, 9.1)."""
    scores = np.sqrt(np.logaddexp(0.0, np.asarray(params.router, np.float64) @ x / config.gate_temperature))
    biased = scores + np.asarray(params.image_bias if image else params.text_bias, np.float64)
    ids = sorted(range(len(biased)), key=lambda expert: (-biased[expert], expert))[:chosen]
    return ids, scores[ids] / (scores[ids].sum() + 1e-20) * config.routed_scaling_factor, biased


def reference(params, x, image, valid, config):
    outputs = []
    for row in range(len(x)):
        exact = x[row].astype(np.float64)
        total = expert_output(exact, params.shared_gate_up, params.shared_down, 1.0, config.swiglu_limit)
        for expert, weight in zip(*reference_route(params, exact, image[row], CHOSEN, config)[:2], strict=True):
            if valid[row]:
                matrices = params.gate_up[expert], params.down[expert]
                total = total + expert_output(exact, *matrices, weight, config.swiglu_limit)
        outputs.append(total)
    return np.array(outputs)


def test_golden_router():
    """Text rows with one bias, image rows with another; the order within a row is not significant."""
    golden = tensors("units/units.safetensors")
    image = golden["router.image_mask"].astype(bool)
    assert 0 < image.sum() < len(image)
    params = router(golden["router.weight"], golden["router.bias"], golden["router.bias_vl"])
    experts, weights, _ = choose(params, golden["router.x"], image, 4, config())
    order, expected = np.argsort(experts, axis=1), np.argsort(golden["router.indices"], axis=1)
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(experts), order, 1), np.take_along_axis(golden["router.indices"], expected, 1)
    )
    np.testing.assert_allclose(
        np.take_along_axis(np.asarray(weights), order, 1),
        np.take_along_axis(golden["router.weights"], expected, 1),
        rtol=2e-6,
    )
    swapped, _, _ = choose(params, golden["router.x"], ~image, 4, config())
    assert (np.sort(swapped, axis=1) != np.sort(experts, axis=1)).any(axis=1).mean() > 0.5


def test_router_follows_the_definition():
    x = inputs(1) * 4
    experts, weights, biased = choose(layer(), x, IMAGE, CHOSEN, config())
    assert experts.dtype == jnp.int32
    assert weights.dtype == biased.dtype == jnp.float32
    for row in range(ROWS):
        ids, expected, expected_biased = reference_route(
            layer(), x[row].astype(np.float64), IMAGE[row], CHOSEN, config()
        )
        assert list(experts[row]) == ids
        np.testing.assert_allclose(weights[row], expected, rtol=1e-5)
        np.testing.assert_allclose(biased[row], expected_biased, rtol=1e-5, atol=1e-6)


def test_the_lower_expert_wins_a_tie():
    zeros = np.zeros((8, config().hidden_size), np.float32)
    bias = np.array([0.0, 1, 0, 1, 0, 1, 0, 1], np.float32)
    params = router(zeros, bias, -bias)
    experts, _, _ = choose(params, inputs(2, 2), np.array([False, True]), 3, config())
    np.testing.assert_array_equal(experts, [[1, 3, 5], [0, 2, 4]])


def test_the_bias_chooses_but_does_not_weigh():
    weight = np.zeros((8, config().hidden_size), np.float32)
    weight[:, 0] = np.linspace(-2, 2, 8)
    x = np.zeros((1, config().hidden_size), np.float32)
    x[0, 0] = 1.0
    bias = np.array([100.0, 50, 0, 0, 0, 0, 0, 0], np.float32)
    experts, weights, _ = choose(router(weight, bias, bias * 0), x, np.array([False]), 2, config())
    np.testing.assert_array_equal(experts, [[0, 1]])
    scores = np.sqrt(np.logaddexp(0.0, weight[:2, 0].astype(np.float64)))
    np.testing.assert_allclose(weights[0], scores / scores.sum() * config().routed_scaling_factor, rtol=1e-6)


def test_large_logits_do_not_overflow():
    """softplus in its stable form: sqrt(softplus(z)) is sqrt(z) above and exp(z / 2) below."""
    weight = np.zeros((8, config().hidden_size), np.float32)
    weight[:, 0] = [300.0, -300.0, 50.0, -50.0, 1e4, 0.0, -20.0, 20.0]
    x = np.zeros((1, config().hidden_size), np.float32)
    x[0, 0] = 1.0
    zeros = np.zeros(8, np.float32)
    _, _, biased = choose(router(weight, zeros, zeros), x, np.array([False]), 2, config())
    expected = np.sqrt(np.logaddexp(0.0, weight[:, 0].astype(np.float64)))
    np.testing.assert_allclose(biased[0], expected, rtol=2e-5, atol=1e-30)
    all_below = router(weight * 0 - np.float32(40), zeros, zeros)
    _, weights, _ = choose(all_below, x, np.array([False]), 4, config())
    np.testing.assert_allclose(weights[0], np.full(4, config().routed_scaling_factor / 4), rtol=1e-5)


def test_the_gate_temperature_divides_the_logits():
    """Scaling the router's weight and the temperature alike changes nothing."""
    x = inputs(3)
    hot = dataclasses.replace(config(), gate_temperature=4.0)
    scaled = layer().replace(router=layer().router * 4.0)
    for left, right in zip(
        choose(scaled, x, IMAGE, CHOSEN, hot), choose(layer(), x, IMAGE, CHOSEN, config()), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=1e-6)


@pytest.mark.parametrize("implementation", [None, "tiled", "dense"])
def test_feed_forward_follows_the_definition(implementation):
    """Routed and shared experts, both clamps, both biases; padding rows keep the shared expert only."""
    x = inputs(4)
    outputs, taps = run(layer(), x, IMAGE, VALID, CHOSEN, config(), LocalExchange(implementation))
    np.testing.assert_allclose(outputs, reference(layer(), x, IMAGE, VALID, config()), rtol=1e-5, atol=2e-5)
    assert taps.keys() == {"router_biased_scores", "router_indices", "router_weights"}


def test_the_shared_expert_is_clamped_and_unweighted():
    x = inputs(5)
    outputs, _ = run(layer(), x, IMAGE, np.zeros(ROWS, bool), CHOSEN, config(), LocalExchange())
    expected = [
        expert_output(row.astype(np.float64), layer().shared_gate_up, layer().shared_down, 1.0, config().swiglu_limit)
        for row in x
    ]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
    loose, _ = run(
        layer(),
        x,
        IMAGE,
        np.zeros(ROWS, bool),
        CHOSEN,
        dataclasses.replace(config(), swiglu_limit=50.0),
        LocalExchange(),
    )
    assert np.abs(np.asarray(loose) - np.asarray(outputs)).max() > 0.1


def test_padding_rows_may_hold_anything():
    x = inputs(6)
    clean, _ = run(layer(), x, IMAGE, VALID, CHOSEN, config(), LocalExchange())
    poisoned = x.copy()
    poisoned[~VALID] = np.nan
    outputs, _ = run(layer(), poisoned, IMAGE, VALID, CHOSEN, config(), LocalExchange())
    np.testing.assert_array_equal(np.asarray(outputs)[VALID], np.asarray(clean)[VALID])


def test_bfloat16_keeps_the_router_in_float32_and_rounds_the_sum_once():
    described = MixtureOfExperts.describe(config(), "layers.0.ffn", 8)
    half = initialise(described, jax.random.key(1), Numerics.preset("bf16"))
    assert half.text_bias.dtype == half.image_bias.dtype == jnp.float32
    x = inputs(7).astype(ml_dtypes.bfloat16)
    outputs, taps = run(half, x, IMAGE, VALID, CHOSEN, config(), LocalExchange())
    assert outputs.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half)
    _, weights, biased = choose(wide, x.astype(np.float32), IMAGE, CHOSEN, config())
    np.testing.assert_allclose(taps["router_biased_scores"], biased, rtol=1e-6)
    np.testing.assert_allclose(taps["router_weights"], weights, rtol=1e-5)
    expected = reference(wide, x.astype(np.float32), IMAGE, VALID, config())
    np.testing.assert_allclose(np.asarray(outputs, np.float32), expected, rtol=2e-2, atol=3e-2)


def test_description():
    """Released names, shapes and storage of a small layer (specification, section 18)."""
    described = MixtureOfExperts.describe(ModelConfig.preset("mini-40"), "mtp.1.ffn", 2)
    hidden, width = 64, 32
    found = {item.released: (item.shape, item.piece_shape, item.stored) for item in parameters(described)}
    prefix = "mtp.1.ffn"
    assert found == {
        ((f"{prefix}.gate.weight",),): ((2, hidden), (2, hidden), Stored.BF16),
        ((f"{prefix}.gate.bias",),): ((2,), (2,), Stored.F32),
        ((f"{prefix}.gate.bias_vl",),): ((2,), (2,), Stored.F32),
        tuple((f"{prefix}.experts.{e}.w1.weight", f"{prefix}.experts.{e}.w3.weight") for e in (0, 1)): (
            (2, 2 * width, hidden),
            (width, hidden),
            Stored.FP4_ROWS,
        ),
        tuple((f"{prefix}.experts.{e}.w2.weight",) for e in (0, 1)): (
            (2, hidden, width),
            (hidden, width),
            Stored.FP4_ROWS,
        ),
        ((f"{prefix}.shared_experts.w1.weight", f"{prefix}.shared_experts.w3.weight"),): (
            (2 * width, hidden),
            (width, hidden),
            Stored.FP8_BLOCKS,
        ),
        ((f"{prefix}.shared_experts.w2.weight",),): ((hidden, width), (hidden, width), Stored.FP8_BLOCKS),
    }
