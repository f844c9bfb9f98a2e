"""Sampling as a noisy arg-max, reproducible per request whatever shares the batch.

Every (seed, position, token) has its own Gumbel noise from the counter-based generator threefry2x32 (Salmon et al.,
2011). Adding it to the processed scores and taking the arg-max draws from their softmax.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
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


@struct.dataclass
class Counts:
    """What penalties look at, per slot: how often each token was generated, and whether the prompt holds it.

    Leaves are arrays, or abstract arrays of the same shapes: ``generated`` int32 and ``in_prompt`` bool, both ``[slots
    vocabulary]``.
    """

    generated: Any
    in_prompt: Any

    @classmethod
    def empty(cls, slots: int, vocabulary: int) -> Counts:
        """No token anywhere."""
        return cls(jnp.zeros((slots, vocabulary), jnp.int32), jnp.zeros((slots, vocabulary), bool))


@struct.dataclass
class Choices:
    """How one token per row is chosen; leaves are host or device arrays with a leading axis of rows.

    ``slots``, ``positions`` (of the sampled tokens), ``seeds`` ``[rows 2]``, ``temperatures``, ``top_k`` (0 for all),
    ``top_p``, ``min_p``; ``presence``, ``frequency`` and ``repetition`` penalties; ``biased`` ``[rows biases]`` token
    ids with their ``biases``; ``banned`` ``[rows bans]`` token ids that must not come. -1 is no id. ``reported``:
    whether log-probabilities are asked for. ``counted``: whether the slot's counts learn the sampled token; padding
    rows are not counted.
    """

    slots: Any
    positions: Any
    seeds: Any
    temperatures: Any
    top_k: Any
    top_p: Any
    min_p: Any
    presence: Any
    frequency: Any
    repetition: Any
    biased: Any
    biases: Any
    banned: Any
    reported: Any
    counted: Any


@struct.dataclass
class Sampled:
    """What was chosen; leaves are device or host arrays with a leading axis of rows.

    ``tokens``, with ``logprobs`` under the raw scores; ``top_tokens`` and ``top_logprobs`` ``[rows most]``, the
    likeliest. Log-probabilities are zero unless some row of the step asks for them. ``finite``: whether the row's
    scores hold no NaN and no infinity; a row that fails it has no meaning.
    """

    tokens: Any
    logprobs: Any
    top_tokens: Any
    top_logprobs: Any
    finite: Any


def choose(logits: Float[Array, "rows vocabulary"], choices: Choices, counts: Counts, *, most: int) -> Sampled:
    """Process the scores and choose one token per row.

    ``most`` is static: how many of the likeliest tokens are reported. The lowest id wins exact ties.
    """
    scores = filtered(penalised(logits, choices, counts), choices)
    warm = choices.temperatures > 0

    def noisy(scores: Array) -> Array:
        noise = gumbel_noise(choices.seeds, choices.positions, scores.shape[-1])
        return jnp.where(warm[:, None], scores + noise, scores)

    scores = jax.lax.cond(jnp.any(warm), noisy, lambda scores: scores, scores)
    tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    rows = logits.shape[0]
    nothing = (jnp.zeros(rows), jnp.zeros((rows, most), jnp.int32), jnp.zeros((rows, most)))
    logprobs, top_tokens, top_logprobs = jax.lax.cond(
        jnp.any(choices.reported), lambda: report(logits, tokens, most), lambda: nothing
    )
    return Sampled(tokens, logprobs, top_tokens, top_logprobs, jnp.isfinite(logits).all(axis=-1))


def report(
    logits: Float[Array, "rows vocabulary"], tokens: Int[Array, " rows"], most: int
) -> tuple[Float[Array, " rows"], Int[Array, "rows most"], Float[Array, "rows most"]]:
    """Log-probability of one token per row under the raw scores, and the ``most`` likeliest tokens with theirs."""
    raw = jax.nn.log_softmax(logits, axis=-1)
    top_logprobs, top_tokens = jax.lax.top_k(raw, most)
    return jnp.take_along_axis(raw, tokens[:, None], axis=-1)[:, 0], top_tokens.astype(jnp.int32), top_logprobs


def counted(counts: Counts, choices: Choices, tokens: Int[Array, " rows"]) -> Counts:
    """The counts after every row's token."""
    rows = jnp.where(choices.counted, choices.slots, counts.generated.shape[0])
    return dataclasses.replace(counts, generated=counts.generated.at[rows, tokens].add(1, mode="drop"))


def penalised(
    logits: Float[Array, "rows vocabulary"], choices: Choices, counts: Counts
) -> Float[Array, "rows vocabulary"]:
    """Penalties, biases and bans, then the temperature; plain scores at temperature 0."""

    def with_penalties(scores: Array) -> Array:
        generated = counts.generated[choices.slots]
        seen = (generated > 0) | counts.in_prompt[choices.slots]
        factor = choices.repetition[:, None]
        scores = jnp.where(seen, jnp.where(scores > 0, scores / factor, scores * factor), scores)
        scores = scores - choices.presence[:, None] * (generated > 0).astype(jnp.float32)
        return scores - choices.frequency[:, None] * generated.astype(jnp.float32)

    asked = (choices.repetition != 1.0) | (choices.presence != 0.0) | (choices.frequency != 0.0)
    scores = jax.lax.cond(jnp.any(asked), with_penalties, lambda scores: scores, logits)
    vocabulary, rows = scores.shape[-1], jnp.arange(scores.shape[0])[:, None]
    biased, banned = (jnp.where(ids < 0, vocabulary, ids) for ids in (choices.biased, choices.banned))
    scores = scores.at[rows, biased].add(choices.biases, mode="drop").at[rows, banned].set(-jnp.inf, mode="drop")
    return scores / jnp.where(choices.temperatures > 0, choices.temperatures, 1.0)[:, None]


def filtered(scores: Float[Array, "rows vocabulary"], choices: Choices) -> Float[Array, "rows vocabulary"]:
    """Top-k, then top-p, then min-p: what they leave out scores minus infinity. The likeliest token always stays.

    Of equal scores at the edge of top-k or top-p the lower ids stay.
    """
    vocabulary = scores.shape[-1]

    def kept(scores: Array) -> Array:
        order = jnp.argsort(-scores, axis=-1, stable=True)
        ranked = jnp.take_along_axis(scores, order, axis=-1)
        rank = jnp.arange(vocabulary)[None]
        top_k = jnp.where(choices.top_k > 0, choices.top_k, vocabulary)[:, None]
        ranked = jnp.where(rank < top_k, ranked, -jnp.inf)
        chances = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(chances, axis=-1) - chances
        # Rounded sums reach 1 before the end.
        top_p = jnp.where(choices.top_p < 1.0, choices.top_p, jnp.inf)[:, None]
        inside = (before < top_p) & (chances >= choices.min_p[:, None] * chances[:, :1])
        inside = jnp.where(rank == 0, True, inside & (rank < top_k))
        return jnp.zeros_like(inside).at[jnp.arange(scores.shape[0])[:, None], order].set(inside)

    asked = (choices.top_k > 0) | (choices.top_p < 1.0) | (choices.min_p > 0.0)
    keep = jax.lax.cond(jnp.any(asked), kept, lambda scores: jnp.ones(scores.shape, bool), scores)
    return jnp.where(keep | ~asked[:, None], scores, -jnp.inf)


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
