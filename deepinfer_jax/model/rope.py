"""Rotary position embedding: adjacent channel pairs of the last channels, plain or with frequency-only YaRN.

Model specification, section 4. Frequencies are float32 constants computed on the host in the reference's order of
roundings; angles, cosines and sines are computed per row from the absolute position.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from deepinfer_jax.config import ModelConfig, YarnConfig


@dataclasses.dataclass(frozen=True)
class Rotation:
    """Cosines and sines of rows' positions, float32 ``[rows pairs]``, ready to rotate vectors of those rows."""

    cosines: Float[Array, "*batch pairs"]
    sines: Float[Array, "*batch pairs"]

    def apply(self, vectors: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Rotate the last ``2 * pairs`` channels. A head axis may stand between the batch and the channels.

        The rotated channels are computed in float32 and rounded once to the vectors' dtype.
        """
        return self._rotate(vectors, self.sines)

    def undo(self, vectors: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Rotate back: the rotation by minus the position."""
        return self._rotate(vectors, -self.sines)

    def _rotate(self, vectors: Array, sines: Array) -> Array:
        pairs = sines.shape[-1]
        width = vectors.shape[-1]
        shape = (*sines.shape[:-1], *(1,) * (vectors.ndim - sines.ndim), 2 * pairs)
        plain = vectors[..., width - 2 * pairs :].astype(jnp.float32)
        # A product with a signed permutation is exact, and unlike strided slices it suits every back end.
        crossed = jnp.einsum("...c,cd->...d", plain, _quarter_turn(pairs), precision="highest")
        cosine = jnp.broadcast_to(jnp.repeat(self.cosines, 2, axis=-1).reshape(shape), plain.shape)
        sine = jnp.broadcast_to(jnp.repeat(sines, 2, axis=-1).reshape(shape), plain.shape)
        turned = (plain * cosine + crossed * sine).astype(vectors.dtype)
        return jnp.concatenate([vectors[..., : width - 2 * pairs], turned], axis=-1)


def _quarter_turn(pairs: int) -> np.ndarray:
    """The matrix that maps every pair of channels (even, odd) to (-odd, even)."""
    return np.kron(np.eye(pairs, dtype=np.float32), np.asarray([[0, 1], [-1, 0]], np.float32))


def rotation(config: ModelConfig, compressed: bool, positions: Int[Array, "*batch"]) -> Rotation:
    """The rotation of layers with a compressed cache (YaRN) or of window-only layers (plain) at given positions."""
    if compressed:
        frequencies = inverse_frequencies(config.compress_rope_theta, config.qk_rope_head_dim, config.yarn)
    else:
        frequencies = inverse_frequencies(config.rope_theta, config.qk_rope_head_dim, None)
    shape = (1,) * positions.ndim + frequencies.shape
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies).reshape(shape)
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def inverse_frequencies(theta: float, dims: int, yarn: YarnConfig | None) -> np.ndarray:
    """float32 ``[dims / 2]`` radians per token: ``theta^(-2i/dims)``, blended towards ``1/factor`` under YaRN."""
    powers = np.power(np.float64(theta), np.arange(0, dims, 2, dtype=np.float64) / dims).astype(np.float32)
    frequencies = np.float32(1.0) / powers
    if yarn is None:
        return frequencies
    low, high = yarn_bounds(theta, dims, yarn)
    span = np.float32(high - low) if high != low else np.float32(0.001)
    ramp = np.clip((np.arange(dims // 2, dtype=np.float32) - np.float32(low)) / span, 0, 1).astype(np.float32)
    return frequencies / np.float32(yarn.factor) * ramp + frequencies * (np.float32(1.0) - ramp)


def yarn_bounds(theta: float, dims: int, yarn: YarnConfig) -> tuple[int, int]:
    """Channel-pair indices between which YaRN blends from unscaled to scaled frequencies."""

    def correction(rotations: float) -> float:
        wavelength = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dims * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), dims - 1)
    return low, high
