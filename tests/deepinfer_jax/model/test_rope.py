"""Rotary embedding against golden frequencies, angles and rotations of the released and a small configuration."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig, YarnConfig
from deepinfer_jax.model.rope import Rotation, inverse_frequencies, rotation, yarn_bounds
from tests.golden import DATA, tensors

CASES = ["window_released", "compressed_released", "tiny_a_compressed"]
every_case = pytest.mark.parametrize("case", CASES)


@functools.cache
def golden():
    return tensors("units/units.safetensors")


def case_config(case):
    return (
        ModelConfig.preset("v4.1-flash") if "released" in case else ModelConfig.from_directory(DATA / "tiny-a" / "bf16")
    )


def case_frequencies(case):
    config = case_config(case)
    if case.startswith("window"):
        return inverse_frequencies(config.rope_theta, config.qk_rope_head_dim, None)
    return inverse_frequencies(config.compress_rope_theta, config.qk_rope_head_dim, config.yarn)


@every_case
def test_golden_frequencies_are_bit_equal(case):
    frequencies = case_frequencies(case)
    assert frequencies.dtype == np.float32
    np.testing.assert_array_equal(frequencies, golden()[f"rope.{case}.inv_freq"])


@every_case
def test_golden_angles(case):
    """Positions up to a million, at which frequencies off by one in the last place already show."""
    positions = golden()["rope.positions"].astype(np.int32)
    compressed = not case.startswith("window")
    turn = rotation(case_config(case), compressed, jnp.asarray(positions))
    assert turn.cosines.dtype == turn.sines.dtype == jnp.float32
    np.testing.assert_allclose(turn.cosines, golden()[f"rope.{case}.cos"], rtol=0, atol=1.2e-7)
    np.testing.assert_allclose(turn.sines, golden()[f"rope.{case}.sin"], rtol=0, atol=1.2e-7)


@pytest.mark.parametrize("case", CASES[1:])
def test_golden_bounds(case):
    config = case_config(case)
    bounds = yarn_bounds(config.compress_rope_theta, config.qk_rope_head_dim, config.yarn)
    assert bounds == tuple(golden()[f"rope.{case}.low_high"])


def golden_rotation():
    return Rotation(jnp.asarray(golden()["rope.apply.cos"]), jnp.asarray(golden()["rope.apply.sin"]))


def test_golden_rotation_with_a_head_axis():
    x, y = golden()["rope.apply.x"], golden()["rope.apply.y"]
    np.testing.assert_allclose(golden_rotation().apply(jnp.asarray(x)), y, rtol=0, atol=5e-7)
    np.testing.assert_allclose(
        golden_rotation().undo(jnp.asarray(y)), golden()["rope.apply.inverse_of_y"], rtol=0, atol=5e-7
    )


def test_golden_rotation_without_a_head_axis():
    x, y = golden()["rope.apply.x"], golden()["rope.apply.y"]
    for head in range(x.shape[1]):
        np.testing.assert_allclose(golden_rotation().apply(jnp.asarray(x[:, head])), y[:, head], rtol=0, atol=5e-7)


@pytest.mark.parametrize("method", ["apply", "undo"])
def test_only_the_last_channels_turn(method):
    """The golden rotation of 16 channels, inside vectors of 24: the first 8 pass untouched, to the bit."""
    x = golden()["rope.apply.x"]
    front = np.random.default_rng(0).standard_normal((*x.shape[:2], 8)).astype(np.float32)
    turned = getattr(golden_rotation(), method)(jnp.concatenate([front, x], axis=-1))
    np.testing.assert_array_equal(turned[..., :8], front)
    np.testing.assert_array_equal(turned[..., 8:], getattr(golden_rotation(), method)(jnp.asarray(x)))


def test_pairs_are_adjacent():
    turn = Rotation(jnp.array([[0.0, 1.0]]), jnp.array([[1.0, 0.0]]))
    np.testing.assert_array_equal(turn.apply(jnp.array([[1.0, 2.0, 3.0, 4.0]])), [[-2.0, 1.0, 3.0, 4.0]])
    np.testing.assert_array_equal(turn.undo(jnp.array([[1.0, 2.0, 3.0, 4.0]])), [[2.0, -1.0, 3.0, 4.0]])


def test_position_zero_and_padding():
    """Position 0 turns nothing; a padding row (position -1) is finite."""
    config = ModelConfig.preset("mini-40")
    x = np.random.default_rng(1).standard_normal((2, 3, config.head_dim)).astype(np.float32)
    turned = rotation(config, True, jnp.array([0, -1])).apply(jnp.asarray(x))
    np.testing.assert_array_equal(turned[0], x[0])
    assert np.isfinite(turned).all()


def test_bfloat16_vectors_turn_in_float32_and_round_once():
    turn = rotation(ModelConfig.preset("mini-40"), False, jnp.arange(64))
    x = np.random.default_rng(2).standard_normal((64, 4, 8)).astype(ml_dtypes.bfloat16)
    result = turn.apply(jnp.asarray(x))
    assert result.dtype == jnp.bfloat16
    wide = np.asarray(turn.apply(jnp.asarray(x.astype(np.float32))))
    np.testing.assert_array_equal(np.asarray(result), wide.astype(ml_dtypes.bfloat16))


def test_undo_inverts_apply_at_large_positions():
    config = ModelConfig.preset("v4.1-flash")
    turn = rotation(config, True, jnp.array([1, 4097, 1_000_000]))
    x = np.random.default_rng(3).standard_normal((3, 2, 512)).astype(np.float32)
    np.testing.assert_allclose(turn.undo(turn.apply(jnp.asarray(x))), x, rtol=0, atol=1e-6)


def test_positions_of_any_shape():
    config = ModelConfig.preset("mini-40")
    flat, shaped = jnp.arange(6), jnp.arange(6).reshape(2, 3)
    for left, right in zip(
        (rotation(config, True, flat).cosines, rotation(config, True, flat).sines),
        (rotation(config, True, shaped).cosines, rotation(config, True, shaped).sines),
        strict=True,
    ):
        np.testing.assert_array_equal(left.reshape(2, 3, -1), right)


def test_compiled_equals_eager():
    config = ModelConfig.preset("v4.1-flash")
    x = np.random.default_rng(4).standard_normal((4, 2, 512)).astype(np.float32)
    positions = jnp.array([0, 7, 65_536, 999_999])

    def turn(positions, x):
        return rotation(config, True, positions).apply(x)

    np.testing.assert_allclose(jax.jit(turn)(positions, x), turn(positions, jnp.asarray(x)), rtol=0, atol=1e-6)


def test_without_yarn_the_compressed_layers_only_change_theta():
    frequencies = inverse_frequencies(160_000.0, 8, None)
    np.testing.assert_allclose(frequencies, [160_000.0 ** (-2 * pair / 8) for pair in range(4)], rtol=1e-6)


def test_yarn_scales_frequencies_between_its_bounds():
    """Below the lower bound unscaled, above the upper one divided by the factor, linear between (specification, 4)."""
    yarn = YarnConfig(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65_536)
    plain, blended = inverse_frequencies(160_000.0, 64, None), inverse_frequencies(160_000.0, 64, yarn)
    ratio = blended / plain
    np.testing.assert_allclose(ratio[:16], np.ones(16), rtol=1e-6)
    np.testing.assert_allclose(ratio[25:], np.full(7, 1 / 16), rtol=1e-6)
    np.testing.assert_allclose(np.diff(ratio[15:26]), np.full(10, -1.5 / 16), rtol=1e-4)


@pytest.mark.parametrize(("original", "bounds"), [(8, (0, 1)), (65_536, (1, 4)), (10**12, (7, 7))])
def test_yarn_bounds_stay_inside_the_channels(original, bounds):
    """Clamped to 0 from below and to the rotated channels - 1 from above (specification, 4)."""
    yarn = YarnConfig(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=original)
    assert yarn_bounds(160_000.0, 8, yarn) == bounds


@pytest.mark.parametrize(("original", "dims"), [(8, 8), (16, 16), (4, 4)])
def test_yarn_of_toy_sizes_is_finite(original, dims):
    """Where both bounds meet, a span of 0.001 keeps the ramp a step."""
    yarn = YarnConfig(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=original)
    low, high = yarn_bounds(160_000.0, dims, yarn)
    assert low == 0
    ratio = inverse_frequencies(160_000.0, dims, yarn) / inverse_frequencies(160_000.0, dims, None)
    assert math.isclose(ratio[0], 1.0)
    np.testing.assert_allclose(ratio[max(high, 1) :], np.full(dims // 2 - max(high, 1), 1 / 16), rtol=1e-6)
