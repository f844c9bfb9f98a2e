"""Collapse, expand and the single-pass order of a sub-layer, against golden values and float64."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.hyper_connections import SubLayer, collapse, expand, initial_streams, run_sub_layer
from deepinfer_jax.model.params import Stored, initialise
from deepinfer_jax.numerics import Numerics
from pallas_kernels import Mix
from tests.golden import tensors

ROWS = 5


@pytest.fixture(scope="module")
def config():
    return ModelConfig.preset("mini-40")


@pytest.fixture(scope="module")
def sub_layer(config):
    described = SubLayer.describe(config, "layers.3", "attn")
    return initialise(described, jax.random.key(0), Numerics.preset("f32"))


@pytest.fixture(scope="module")
def golden():
    return tensors("units/units.safetensors")


def golden_mix(golden):
    return Mix(*(jnp.asarray(golden[f"mhc.apply.{part}"]) for part in ("pre", "post", "comb")))


def test_golden_collapse(golden):
    collapsed = jax.jit(collapse)(golden["mhc.apply.streams"], golden["mhc.apply.pre"])
    np.testing.assert_allclose(collapsed, golden["mhc.apply.collapsed"], rtol=1e-6, atol=1e-6)


def test_golden_expand(golden):
    """The golden mix is far from symmetric, so summing over the other index of comb would show."""
    arguments = golden["mhc.apply.sublayer_out"], golden["mhc.apply.streams"]
    expanded = jax.jit(expand)(*arguments, golden_mix(golden))
    np.testing.assert_allclose(expanded, golden["mhc.apply.expanded"], rtol=1e-6, atol=2e-6)
    transposed = golden_mix(golden)._replace(comb=golden_mix(golden).comb.transpose(0, 2, 1))
    assert np.abs(expand(*map(jnp.asarray, arguments), transposed) - golden["mhc.apply.expanded"]).max() > 0.1


def test_initial_streams():
    """Copies of the embedding, collapsed by stream 0 alone: the first sub-layer reads the plain embedding."""
    embeddings = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    streams, pre = initial_streams(jnp.asarray(embeddings), 4)
    np.testing.assert_array_equal(streams, np.repeat(embeddings[:, None], 4, axis=1))
    np.testing.assert_array_equal(pre, [[1.0, 0.0, 0.0, 0.0]] * 3)
    np.testing.assert_array_equal(collapse(streams, pre), embeddings)


def test_collapse_weights_are_not_normalised():
    streams = jnp.ones((1, 2, 3))
    np.testing.assert_array_equal(collapse(streams, jnp.array([[2.0, 3.0]])), np.full((1, 3), 5.0))


def test_bfloat16_rounds_once(golden):
    half = golden["mhc.apply.streams"].astype(ml_dtypes.bfloat16)
    output = golden["mhc.apply.sublayer_out"].astype(ml_dtypes.bfloat16)
    mix = golden_mix(golden)
    for result, wide in (
        (collapse(jnp.asarray(half), mix.pre), collapse(jnp.asarray(half, jnp.float32), mix.pre)),
        (
            expand(jnp.asarray(output), jnp.asarray(half), mix),
            expand(jnp.asarray(output, jnp.float32), jnp.asarray(half, jnp.float32), mix),
        ),
    ):
        assert result.dtype == jnp.bfloat16
        np.testing.assert_array_equal(result, np.asarray(wide).astype(ml_dtypes.bfloat16))


def sub_layer_case(config, seed=1):
    random = np.random.default_rng(seed)
    return (
        random.standard_normal((ROWS, config.hc_mult, config.hidden_size)).astype(np.float32),
        random.random((ROWS, config.hc_mult), np.float32),
    )


def test_a_sub_layer_reads_the_previous_weights_and_returns_its_own(config, sub_layer):
    """Single-pass form (specification, 3.4): collapse with the incoming weights, expand with the new mix."""
    streams, pre = sub_layer_case(config)
    received = []

    def function(inputs):
        received.append(inputs)
        return 2.0 * inputs + 1.0, "extra"

    new_streams, new_pre, extra, taps = run_sub_layer(
        sub_layer, jnp.asarray(streams), jnp.asarray(pre), function, config
    )
    mix = sub_layer.mix(jnp.asarray(streams), config)
    collapsed = (streams.astype(np.float64) * pre[:, :, None]).sum(axis=1)
    normed = collapsed / np.sqrt((collapsed**2).mean(axis=1, keepdims=True) + config.rms_norm_eps)
    normed = normed * np.asarray(sub_layer.norm)
    output = 2 * normed + 1
    mixed = np.einsum("rjk,rjc->rkc", np.asarray(mix.comb, np.float64), streams)
    expected = np.asarray(mix.post, np.float64)[:, :, None] * output[:, None] + mixed
    np.testing.assert_allclose(received[0], normed, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(new_streams, expected, rtol=1e-5, atol=2e-5)
    np.testing.assert_array_equal(new_pre, mix.pre)
    assert np.abs(np.asarray(new_pre) - pre).max() > 0.1
    assert extra == "extra"
    assert taps.keys() == {"in", "out", "pre", "post", "comb"}
    np.testing.assert_array_equal(taps["in"], received[0])
    np.testing.assert_array_equal(taps["comb"], mix.comb)


def test_the_configuration_reaches_the_mix(config, sub_layer):
    streams = jnp.asarray(sub_layer_case(config)[0])
    mix = sub_layer.mix(streams, config)
    one_step = sub_layer.mix(streams, dataclasses.replace(config, hc_sinkhorn_iters=1))
    assert np.abs(one_step.comb - mix.comb).max() > 1e-2
    shifted = sub_layer.mix(streams, dataclasses.replace(config, hc_eps=config.hc_eps + 0.25))
    np.testing.assert_allclose(shifted.pre - mix.pre, np.full(mix.pre.shape, 0.25), rtol=1e-5)
    damped = sub_layer.mix(streams * 1e-2, dataclasses.replace(config, rms_norm_eps=1.0))
    assert np.abs(damped.pre - mix.pre).max() > 1e-2


@pytest.mark.parametrize("short", ["attn", "ffn"])
def test_description(short):
    """Released names, shapes and storage (specification, section 18)."""
    described = SubLayer.describe(ModelConfig.preset("v4.1-flash"), "layers.7", short)
    leaves = [getattr(described, field.name) for field in dataclasses.fields(described)]
    found = {leaf.released[0][0]: (leaf.shape, leaf.stored) for leaf in leaves}
    assert found == {
        f"layers.7.hc_{short}_fn": ((24, 20480), Stored.F32),
        f"layers.7.hc_{short}_base": ((24,), Stored.F32),
        f"layers.7.hc_{short}_scale": ((3,), Stored.F32),
        f"layers.7.{short}_norm.weight": ((5120,), Stored.BF16),
    }


def test_gradients_are_those_of_the_written_out_sums():
    """Collapse and expand have gradients of their own, checked against automatic ones of the same formulas."""
    keys = jax.random.split(jax.random.key(0), 6)
    streams = jax.random.normal(keys[0], (5, 3, 8))
    output, pre, post = (
        jax.random.normal(key, shape) for key, shape in zip(keys[1:4], ((5, 8), (5, 3), (5, 3)), strict=True)
    )
    comb = jax.random.normal(keys[4], (5, 3, 3))
    weights = jax.random.normal(keys[5], (5, 3, 8))

    def own(streams, output, pre, post, comb):
        spread = expand(output, streams, Mix(pre, post, comb))
        return (collapse(spread, pre) * output).sum() + (spread * weights).sum()

    def plain(streams, output, pre, post, comb):
        spread = post[:, :, None] * output[:, None] + jnp.einsum("rsd,rsh->rdh", comb, streams)
        return (jnp.einsum("rsh,rs->rh", spread, pre) * output).sum() + (spread * weights).sum()

    arguments = streams, output, pre, post, comb
    for found, expected in zip(
        jax.grad(own, argnums=range(5))(*arguments), jax.grad(plain, argnums=range(5))(*arguments), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-4)
