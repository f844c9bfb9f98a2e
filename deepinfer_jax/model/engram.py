"""Engram: a hashed n-gram memory read into the residual streams before some layers.

Model specification, section 10. The last few token ids, reduced to a compressed vocabulary, are hashed to table rows on
the device, exactly and without 64-bit integers.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from deepinfer_jax.config import EngramConfig, ModelConfig
from deepinfer_jax.config_checks import ENGRAM_VOCABULARY_LIMIT
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.exchange import LOCAL, Exchange
from deepinfer_jax.model.linear import linear
from deepinfer_jax.model.params import Leaf, Stored, matrix, single
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.source import KeySource
from pallas_kernels import expand

IMAGE_TOKEN = -1  # compressed id of image-type tokens: blocks the look-back
_SEED_STRIDE = 10007
_BYTES = 8


@struct.dataclass
class Engram:
    """The memory read before one layer."""

    table: Leaf
    key_value: Leaf
    query_weight: Leaf
    key_weight: Leaf

    @classmethod
    def describe(cls, config: ModelConfig, memory: int) -> Engram:
        """The parameters of Engram number ``memory``."""
        engram = config.engram
        assert engram is not None
        prefix = f"layers.{engram.layer_ids[memory]}.engram"
        hidden, streams = config.hidden_size, config.hc_mult
        return cls(
            table=single(
                f"{prefix}.embed.weight",
                (engram.num_embeddings[memory], engram.head_dim),
                ("engram_rows", None),
                Stored.FP8_ROWS,
                "unit",
            ),
            key_value=matrix(
                f"{prefix}.wkv.weight",
                ((streams + 1) * hidden, engram.columns * engram.head_dim),
                (None, None),
                Stored.FP8_BLOCKS,
            ),
            query_weight=single(f"{prefix}.q_weight", (streams, hidden), (None, None), init="unit"),
            key_weight=single(f"{prefix}.k_weight", (streams, hidden), (None, None), init="unit"),
        )


@dataclasses.dataclass(frozen=True)
class HashConstants:
    """Host constants of the hash, per Engram layer.

    ``multipliers`` int64 ``[memories look_back]``; ``primes`` and ``offsets`` int64 ``[memories ngrams heads]``,
    n-grams from length 2 up.
    """

    multipliers: np.ndarray
    primes: np.ndarray
    offsets: np.ndarray


@functools.lru_cache
def hash_constants(engram: EngramConfig) -> HashConstants:
    """Multipliers, moduli and row offsets of a configuration (model specification, 10.2).

    Raises:
      ConfigError: ``engram_num_embeddings`` is not the sum of the derived moduli, or a modulus is too large for uint32.
    """
    bound = np.iinfo(np.int64).max // engram.compressed_vocab_size // 2
    multipliers = [
        2 * np.random.default_rng(_SEED_STRIDE * layer).integers(0, bound, size=engram.max_ngram_size, dtype=np.int64)
        + 1
        for layer in engram.layer_ids
    ]
    primes = _primes(engram)
    if primes.max() >= ENGRAM_VOCABULARY_LIMIT:
        accepted = f"followed by {primes.size} primes below {ENGRAM_VOCABULARY_LIMIT}, for hashing in uint32"
        raise ConfigError("text_config.engram_vocab_size", engram.vocab_size, accepted)
    flat = primes.reshape(len(engram.layer_ids), -1)
    totals = table_sizes(engram)
    if totals != engram.num_embeddings:
        raise ConfigError(
            "text_config.engram_num_embeddings", engram.num_embeddings, f"the sums of hash moduli, {totals}"
        )
    offsets = np.cumsum(flat, axis=1) - flat
    return HashConstants(np.stack(multipliers), primes, offsets.reshape(primes.shape))


def table_sizes(engram: EngramConfig) -> tuple[int, ...]:
    """Rows of each memory's table: the sums of its moduli, which ``engram_num_embeddings`` repeats."""
    return tuple(int(total) for total in _primes(engram).sum(axis=(1, 2)))


def _primes(engram: EngramConfig) -> np.ndarray:
    """Distinct primes in (layer, n-gram, head) order; every (layer, n-gram) searches from the vocabulary size up."""
    used: set[int] = set()
    found = []
    for _ in range(len(engram.layer_ids) * (engram.max_ngram_size - 1)):
        candidate = engram.vocab_size
        for _ in range(engram.n_heads):
            while candidate in used or not _is_prime(candidate):
                candidate += 1
            used.add(candidate)
            found.append(candidate)
    shape = (len(engram.layer_ids), engram.max_ngram_size - 1, engram.n_heads)
    return np.asarray(found, np.int64).reshape(shape)


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    divisors = np.arange(2, int(number**0.5) + 1)
    return bool((number % divisors != 0).all())


def compressed_ids(token_map: Int[Array, " vocabulary"], rows: Rows) -> Int[Array, " rows"]:
    """The compressed id of every row's token; :data:`IMAGE_TOKEN` for image-type tokens."""
    return jnp.where(rows.image, IMAGE_TOKEN, jnp.take(token_map, rows.tokens, mode="clip"))


def table_rows(
    ids: Int[Array, " rows"], rows: Rows, source: KeySource, token_map: Int[Array, " vocabulary"], engram: EngramConfig
) -> Int[Array, "rows memories columns"]:
    """The table rows every token reads from each memory.

    Look-back stops at the sequence's start and at image-type tokens; what lies behind counts as padding.
    """
    earlier = source.previous_ids(ids, rows, engram.max_ngram_size - 1)
    look_back = jnp.concatenate([ids[:, None], earlier], axis=1)
    blocked = jax.lax.cummax((look_back < 0).astype(jnp.int32), axis=1) > 0
    return hash_rows(jnp.where(blocked, token_map[engram.pad_token_id], look_back), engram)


def hash_rows(look_back: Int[Array, "rows look_back"], engram: EngramConfig) -> Int[Array, "rows memories columns"]:
    """Table rows of compressed ids, newest first: ``(id_0 m_0 xor .. xor id_n m_n) mod prime + offset``.

    The 63-bit products live as eight bytes each in uint32, and ``mod`` runs byte by byte, which stays below 2^32
    because every prime is below 2^24.
    """
    constants = hash_constants(engram)
    products = _product_bytes(look_back.astype(jnp.uint32)[:, None, :], constants.multipliers)
    mixed = products[:, :, 0]
    primes = jnp.asarray(constants.primes, jnp.uint32)
    columns = []
    for ngram in range(1, engram.max_ngram_size):
        mixed = mixed ^ products[:, :, ngram]
        modulus = primes[None, :, ngram - 1]
        remainder = jnp.zeros((look_back.shape[0], *modulus.shape[1:]), jnp.uint32)
        for byte in reversed(range(_BYTES)):
            remainder = (remainder * jnp.uint32(256) + mixed[:, :, byte][..., None]) % modulus
        columns.append(remainder.astype(jnp.int32) + jnp.asarray(constants.offsets[None, :, ngram - 1], jnp.int32))
    return jnp.concatenate(columns, axis=-1)


def _product_bytes(ids: Array, multipliers: np.ndarray) -> Array:
    """Product bytes, lowest first, ``[rows memories look_back 8]``; ids come as ``[rows 1 look_back]``."""
    id_bytes = [(ids >> jnp.uint32(8 * byte)) & jnp.uint32(255) for byte in range(3)]
    factor = [jnp.asarray((multipliers >> (8 * byte)) & 255, jnp.uint32)[None] for byte in range(_BYTES)]
    carry = jnp.zeros(jnp.broadcast_shapes(ids.shape, factor[0].shape), jnp.uint32)
    product = []
    for place in range(_BYTES):
        for low in range(min(place, 2) + 1):
            carry = carry + id_bytes[low] * factor[place - low]
        product.append(carry & jnp.uint32(255))
        carry = carry >> jnp.uint32(8)
    return jnp.stack(product, axis=-1)


def read_memory(
    params: Engram,
    streams: Float[Array, "rows streams hidden"],
    columns: Int[Array, "rows columns"],
    image: Bool[Array, " rows"],
    config: ModelConfig,
    exchange: Exchange = LOCAL,
) -> tuple[Float[Array, "rows streams hidden"], Float[Array, "rows streams"]]:
    """Add the gated memory value to every stream; image-type tokens pass unchanged. ``exchange`` reaches the table.

    Returns the streams and the gates, float32.
    """
    rows, count, hidden = streams.shape
    embedding = expand(exchange.lookup(params.table, columns), streams.dtype).reshape(rows, -1)
    projected = linear(embedding, params.key_value).astype(jnp.float32)
    keys, value = projected[:, : count * hidden].reshape(rows, count, hidden), projected[:, count * hidden :]
    exact = streams.astype(jnp.float32)
    weight = params.query_weight.astype(jnp.float32) * params.key_weight.astype(jnp.float32)
    factor = _inverse_rms(exact, config) * _inverse_rms(keys, config) * hidden**-0.5
    dots = (exact * weight[None] * keys).sum(axis=-1) * factor
    gates = jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(dots), 1e-6)), dots))
    updated = (exact + gates[..., None] * value[:, None, :]).astype(streams.dtype)
    return jnp.where(image[:, None, None], streams, updated), gates


def _inverse_rms(values: Float[Array, "rows streams hidden"], config: ModelConfig) -> Float[Array, "rows streams"]:
    return jax.lax.rsqrt(jnp.mean(jnp.square(values), axis=-1) + config.rms_norm_eps)
