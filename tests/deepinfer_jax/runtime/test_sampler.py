"""Sampling: the generator against published vectors, the noise in float64, and frequencies against the softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from deepinfer_jax.errors import InputError
from deepinfer_jax.runtime.sampler import gumbel_noise, sample, seed_words

noise_of = jax.jit(gumbel_noise, static_argnums=2)
choose = jax.jit(sample)

# Known answers of threefry2x32 with 20 rounds, from the Random123 distribution (`kat_vectors`): counter, key, result.
VECTORS = {
    "zeros": ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    "ones": ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    "pi": ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
}
every_vector = pytest.mark.parametrize(("counter", "key", "expected"), VECTORS.values(), ids=VECTORS)


def threefry(key, counter):
    """threefry2x32-20 of Salmon et al. (2011), in Python integers: both words of the result."""
    mask, parity = 0xFFFFFFFF, 0x1BD11BDA
    keys = (*key, key[0] ^ key[1] ^ parity)
    left, right = (counter[0] + keys[0]) & mask, (counter[1] + keys[1]) & mask
    for block in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            left = (left + right) & mask
            right = ((right << turn | right >> (32 - turn)) & mask) ^ left
        left = (left + keys[(block + 1) % 3]) & mask
        right = (right + keys[(block + 2) % 3] + block + 1) & mask
    return left, right


def expected_noise(seed, position, token):
    """The definition of the noise in float64: u = ((bits >> 8) + 0.5) 2^-24."""
    bits, _ = threefry((seed >> 32, seed & 0xFFFFFFFF), (position, token))
    return -np.log(-np.log(((bits >> 8) + 0.5) * 2.0**-24))


def seeds_of(*seeds):
    return np.stack([seed_words(seed) for seed in seeds])


def positions_of(*positions):
    return np.asarray(positions, np.int32)


@every_vector
def test_published_vectors(counter, key, expected):
    """Of the generator that JAX provides and of the one that this file compares with."""
    words = threefry_2x32(jnp.asarray(key, jnp.uint32), jnp.asarray(counter, jnp.uint32))
    assert tuple(words.tolist()) == expected
    assert threefry(key, counter) == expected


def test_noise_of_the_first_vector():
    """Seed, position and token 0 give the counter and key of the first vector, and its first word counts."""
    uniform = ((0x6B200159 >> 8) + 0.5) * 2.0**-24
    np.testing.assert_allclose(noise_of(seeds_of(0), positions_of(0), 1), [[-np.log(-np.log(uniform))]], rtol=1e-6)


def test_noise_follows_the_definition():
    """Seeds that differ in either word, positions up to a million, every token of a small vocabulary."""
    seeds, positions = (0, 1, 1 << 32, (1 << 64) - 1, 0x13198A2E03707344), (0, 1, 77, 4096, 1_048_575)
    got = noise_of(seeds_of(*seeds), positions_of(*positions), 40)
    want = [
        [expected_noise(seed, position, token) for token in range(40)]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# Seed, position and token whose word begins with 24 ones: the uniform next to 1.
LARGEST = ((2, 8, 73021), (29, 2, 59895))


@pytest.mark.parametrize(("seed", "position", "token"), LARGEST)
def test_the_largest_noise_is_finite(seed, position, token):
    """24 bits and a half do not fit float32; rounded to 1, the uniform makes this token win whatever its score."""
    want = expected_noise(seed, position, token)
    assert want == pytest.approx(-np.log(2.0**-25), rel=1e-6)
    got = np.asarray(noise_of(seeds_of(seed), positions_of(position), token + 1))[0]
    np.testing.assert_allclose(got[token], want, rtol=1e-5)


def test_noise_depends_on_its_own_row_alone():
    """Bit for bit: alone, beside others, at another place in the batch."""
    seeds, positions = seeds_of(5, 6, 5, 7), positions_of(3, 3, 4, 900)
    together = np.asarray(noise_of(seeds, positions, 64))
    order = [2, 0, 3, 1]
    np.testing.assert_array_equal(noise_of(seeds[order], positions[order], 64), together[order])
    for row in range(4):
        np.testing.assert_array_equal(noise_of(seeds[row : row + 1], positions[row : row + 1], 64)[0], together[row])


def test_noise_of_a_token_does_not_depend_on_the_vocabulary():
    seeds, positions = seeds_of(8), positions_of(21)
    np.testing.assert_array_equal(noise_of(seeds, positions, 200)[:, :64], noise_of(seeds, positions, 64))


def test_seeds_and_positions_give_different_streams():
    """Correlations of 4,096 values beyond 5 standard deviations would show a shared stream."""
    rows = noise_of(seeds_of(1, 2, 1 << 32, 1), positions_of(9, 9, 9, 10), 4096)
    assert np.abs(np.corrcoef(rows) - np.eye(4)).max() < 5 / 4096**0.5


def test_seed_words_are_high_word_first():
    np.testing.assert_array_equal(seed_words(0x0123456789ABCDEF), [0x01234567, 0x89ABCDEF])
    np.testing.assert_array_equal(seed_words((1 << 64) - 1), [0xFFFFFFFF, 0xFFFFFFFF])
    assert seed_words(0).dtype == np.uint32


@pytest.mark.parametrize("seed", [-1, 1 << 64, -(1 << 63)])
def test_seeds_beyond_64_bits_are_refused(seed):
    with pytest.raises(InputError) as refused:
        seed_words(seed)
    assert str(refused.value) == f"input 'seed' is {seed}; accepted: 0 to 2^64 - 1"


def test_temperature_zero_is_the_first_largest_logit():
    """Ties take the lowest id, whatever the noise says; -inf is never chosen beside anything finite."""
    logits = np.array([[0, 3, 3, -1], [2, 2, 2, 2], [-np.inf, -5, -np.inf, -5], [-1, 0, 1, 5]], np.float32)
    for seed in range(20):
        got = choose(logits, np.zeros(4, np.float32), seeds_of(*[seed] * 4), positions_of(0, 1, 2, 3))
        np.testing.assert_array_equal(got, [1, 0, 1, 3])
    assert got.dtype == jnp.int32


def test_warm_and_greedy_rows_share_a_batch():
    """Every row by its own temperature, seed and position."""
    random = np.random.default_rng(0)
    logits = random.standard_normal((6, 50)).astype(np.float32) * 2
    temperatures = np.array([0, 0.5, 1, 0, 3, 100], np.float32)
    seeds, positions = (3, 3, 4, 5, 1 << 40, 7), (1, 1, 2, 900, 33, 0)
    got = choose(logits, temperatures, seeds_of(*seeds), positions_of(*positions))
    for row, temperature in enumerate(temperatures):
        noise = np.array([expected_noise(seeds[row], positions[row], token) for token in range(50)])
        scores = logits[row] if temperature == 0 else logits[row].astype(np.float64) / temperature + noise
        assert got[row] == scores.argmax(), row


def test_masked_tokens_are_never_sampled():
    logits = np.full((500, 8), -np.inf, np.float32)
    logits[:, [2, 5]] = 0.0
    got = choose(logits, np.ones(500, np.float32), seeds_of(*range(500)), np.zeros(500, np.int32))
    assert set(got.tolist()) == {2, 5}


@functools.cache
def counts(temperature, vary):
    """How often each of twelve tokens comes up in 60,000 draws that differ in their seed or in their position."""
    draws = 60_000
    steps = np.arange(draws)
    seeds = steps if vary == "seed" else np.full(draws, 123)
    words = np.stack([seeds >> 32, seeds & 0xFFFFFFFF], axis=1).astype(np.uint32)
    positions = (steps if vary == "position" else np.full(draws, 17)).astype(np.int32)
    tokens = choose(np.tile(LOGITS, (draws, 1)), np.full(draws, temperature, np.float32), words, positions)
    return np.bincount(tokens, minlength=LOGITS.size)


LOGITS = np.random.default_rng(4).standard_normal(12).astype(np.float32) * 1.5
# The 1 - 1e-6 quantile of chi-square with 11 degrees of freedom.
CHI_SQUARE = 49.9


def chi_square(observed, logits):
    weights = np.exp(logits - logits.max())
    expected = weights / weights.sum() * observed.sum()
    return ((observed - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.5])
def test_frequencies_follow_the_tempered_softmax(temperature, vary):
    assert chi_square(counts(temperature, vary), LOGITS.astype(np.float64) / temperature) < CHI_SQUARE


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_the_frequencies_tell_temperatures_apart(vary):
    """The same counts refute a temperature that is off by a tenth."""
    assert chi_square(counts(1.0, vary), LOGITS.astype(np.float64) / 1.1) > 2 * CHI_SQUARE
