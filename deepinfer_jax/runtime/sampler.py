"""Sampling as a noisy arg-max, reproducible per request whatever shares the batch.

Every (seed, position, token) has its own Gumbel noise from the counter-based generator threefry2x32 (Salmon et al.,
2011). Adding it to the processed scores and taking the arg-max draws from their softmax.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, UInt32

from deepinfer_jax.errors import InputError

_SEED_LIMIT = 1 << 64


def seed_words(seed: int) -> np.ndarray:
    """A 64-bit request seed as two uint32 words, high word first.

    Raises:
      InputError: the seed is negative or has more than 64 bits.
    """
    if not 0 <= seed < _SEED_LIMIT:
        raise InputError("seed", seed, "0 to 2^64 - 1")
    return np.asarray([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def gumbel_noise(
    seeds: UInt32[Array, "rows 2"], positions: Int[Array, " rows"], vocabulary: int
) -> Float[Array, "rows vocabulary"]:
    """Standard Gumbel noise of every token at the absolute position that is being sampled.

    Bits are the first output word of threefry2x32 with the seed as key and (position, token id) as counter; the uniform
    is ``((bits >> 8) + 0.5) * 2^-24``, never 0 or 1.
    """

    def bits(seed: Array, position: Array) -> Array:
        counter = jnp.concatenate(
            [jnp.full((vocabulary,), position.astype(jnp.uint32)), jnp.arange(vocabulary, dtype=jnp.uint32)]
        )
        return threefry_2x32(seed, counter)[:vocabulary]

    words = jax.vmap(bits)(seeds, positions) >> jnp.uint32(8)
    # Float32 holds the uniform exactly below one half, and above it the uniform's distance to 1: rounding the uniform
    # itself would reach 1 and make the noise infinite.
    upper = words >= jnp.uint32(1 << 23)
    distance = jnp.where(upper, jnp.uint32((1 << 24) - 1) - words, words)
    exact = (distance.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-24)
    return -jnp.log(-jnp.where(upper, jnp.log1p(-exact), jnp.log(exact)))


def sample(
    logits: Float[Array, "rows vocabulary"],
    temperatures: Float[Array, " rows"],
    seeds: UInt32[Array, "rows 2"],
    positions: Int[Array, " rows"],
) -> Int[Array, " rows"]:
    """One token per row: plain arg-max at temperature 0, noisy arg-max of ``logits / temperature`` above.

    ``positions`` are those of the sampled tokens. The lowest id wins exact ties.
    """

    def noisy(scores: Float[Array, "rows vocabulary"]) -> Float[Array, "rows vocabulary"]:
        warm = temperatures[:, None] > 0
        scaled = scores / jnp.where(warm, temperatures[:, None], 1.0)
        return jnp.where(warm, scaled + gumbel_noise(seeds, positions, scores.shape[-1]), scores)

    scores = jax.lax.cond(jnp.any(temperatures > 0), noisy, lambda scores: scores, logits)
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)
