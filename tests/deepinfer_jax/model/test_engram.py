"""Engram: golden constants and row ids to the last bit, 64-bit arithmetic in Python integers, the gate in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.config import EngramConfig, ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.engram import (
    IMAGE_TOKEN,
    Engram,
    compressed_ids,
    hash_constants,
    hash_rows,
    read_memory,
    table_rows,
)
from deepinfer_jax.model.params import Stored, initialise, parameters
from deepinfer_jax.model.rows import Rows, sequence_rows
from deepinfer_jax.model.source import SequenceSource
from deepinfer_jax.numerics import Numerics
from tests.golden import document, tensors

SEQUENCES = 25
TILE_ROWS = 16
every_configuration = pytest.mark.parametrize("name", ["released", "tiny"])


@functools.cache
def golden():
    return tensors("engram/engram_hash.npz")


def engram_config(name):
    meta = document("engram/meta.json")[name]
    raw = meta["config"]
    return EngramConfig(
        layer_ids=tuple(raw["engram_layer_ids"]),
        num_embeddings=tuple(meta["rows_per_layer"]),
        max_ngram_size=raw["engram_max_ngram_size"],
        vocab_size=raw["engram_vocab_size"],
        n_heads=raw["engram_n_heads"],
        head_dim=raw["engram_head_dim"],
        pad_token_id=raw["engram_pad_id"],
        compressed_vocab_size=raw["engram_compressed_vocab_size"],
    )


def lengths():
    return [len(golden()[f"seq.{number}"]) for number in range(SEQUENCES)]


def image_mask(number):
    """True for image-type tokens; the golden masks say where text is."""
    mask = golden().get(f"mask.{number}")
    return np.zeros(lengths()[number], bool) if mask is None else mask == 0


@functools.partial(jax.jit, static_argnums=2)
def rows_of(rows, token_map, engram):
    source = SequenceSource.empty(rows.tokens.shape[0], 512, 1, 1, jnp.dtype(jnp.float32))
    return table_rows(compressed_ids(token_map, rows), rows, source, token_map, engram)


def look_back(number, size):
    """Compressed ids of one golden sequence, newest first, with everything behind a boundary replaced; in NumPy."""
    token_map, tokens, image = golden()["compressed_token_map"], golden()[f"seq.{number}"], image_mask(number)
    ids = np.full((len(tokens), size), token_map[2], np.int32)
    for place in range(len(tokens)):
        for back in range(size):
            if place - back < 0 or image[place - back]:
                break
            ids[place, back] = token_map[tokens[place - back]]
    return ids


@every_configuration
def test_golden_constants(name):
    constants = hash_constants(engram_config(name))
    np.testing.assert_array_equal(constants.multipliers, golden()[f"{name}.multipliers"])
    np.testing.assert_array_equal(constants.primes, golden()[f"{name}.primes"])
    np.testing.assert_array_equal(constants.offsets.reshape(len(constants.primes), -1), golden()[f"{name}.offsets"])


def test_released_constants_of_the_specification():
    """Model specification 10.2, copied by hand: the first and last primes and the multipliers of both layers."""
    constants = hash_constants(ModelConfig.preset("v4.1-flash").engram)
    assert constants.multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
    assert constants.primes[0, 0, 0] == 16000057
    assert constants.primes[1, 2].tolist() == [
        16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889,
    ]  # fmt: skip


@every_configuration
def test_golden_totals(name):
    rows = document("engram/meta.json")[name]["rows_per_layer"]
    assert hash_constants(engram_config(name)).primes.sum(axis=(1, 2)).tolist() == rows


def test_released_totals_are_those_of_the_release():
    released = ModelConfig.preset("v4.1-flash").engram
    assert released.num_embeddings == engram_config("released").num_embeddings == (384006168, 384016682)


def test_miniature_totals():
    engram = ModelConfig.preset("mini-40").engram
    assert tuple(hash_constants(engram).primes.sum(axis=(1, 2))) == engram.num_embeddings


@every_configuration
def test_other_totals_are_refused(name):
    engram = engram_config(name)
    wrong = (engram.num_embeddings[0] + 1, *engram.num_embeddings[1:])
    with pytest.raises(ConfigError) as refused:
        hash_constants(dataclasses.replace(engram, num_embeddings=wrong))
    assert refused.value.key == "text_config.engram_num_embeddings"
    assert refused.value.value == wrong
    assert str(engram.num_embeddings) in refused.value.accepted


def test_moduli_must_stay_below_2_to_the_24():
    """The search starts below the limit and ends above it: the last primes would overflow uint32."""
    engram = dataclasses.replace(engram_config("tiny"), vocab_size=(1 << 24) - 100)
    with pytest.raises(ConfigError) as refused:
        hash_constants(engram)
    assert refused.value.key == "text_config.engram_vocab_size"
    assert refused.value.value == (1 << 24) - 100


@every_configuration
def test_golden_row_ids_of_look_backs(name):
    """Every golden sequence, the look-back built here."""
    engram = engram_config(name)
    ids = np.concatenate([look_back(number, engram.max_ngram_size) for number in range(SEQUENCES)])
    expected = np.concatenate([golden()[f"{name}.hash_ids.{number}"] for number in range(SEQUENCES)])
    result = jax.jit(hash_rows, static_argnums=1)(ids, engram)
    assert result.dtype == jnp.int32
    np.testing.assert_array_equal(result, expected)


@every_configuration
def test_golden_row_ids_of_sequences(name):
    """Every golden sequence as a request of its own, text and image, behind each other in one step.

    Shorter sequences continue with other tokens, which nothing before them may see.
    """
    longest = max(lengths())
    tokens = np.random.default_rng(0).integers(0, 129280, (SEQUENCES, longest)).astype(np.int32)
    image = np.zeros((SEQUENCES, longest), bool)
    for number, length in enumerate(lengths()):
        tokens[number, :length] = golden()[f"seq.{number}"]
        image[number, :length] = image_mask(number)
    assert image.any()
    rows = sequence_rows(jnp.asarray(tokens), TILE_ROWS)
    padded = rows.tokens.shape[0] // SEQUENCES
    assert padded > longest
    rows = rows.replace(image=jnp.asarray(np.pad(image, ((0, 0), (0, padded - longest))).reshape(-1)))
    result = np.asarray(rows_of(rows, golden()["compressed_token_map"], engram_config(name)))
    result = result.reshape(SEQUENCES, padded, *result.shape[1:])
    for number, length in enumerate(lengths()):
        np.testing.assert_array_equal(result[number, :length], golden()[f"{name}.hash_ids.{number}"], str(number))


def test_golden_row_ids_of_ragged_rows():
    """Sequences of their own lengths, each in tiles with padding rows, as a prefill step holds them."""
    parts = []
    for number, length in enumerate(lengths()):
        pad = -length % TILE_ROWS
        parts.append(
            (
                np.pad(golden()[f"seq.{number}"], (0, pad), constant_values=7),
                np.full(length + pad, number),
                np.pad(np.arange(length), (0, pad), constant_values=-1),
                np.pad(image_mask(number), (0, pad)),
                np.arange(length + pad) < length,
            )
        )
    tokens, slots, positions, image, used = (np.concatenate(column) for column in zip(*parts, strict=True))
    rows = Rows.of(
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(slots, jnp.int32),
        jnp.asarray(positions, jnp.int32),
        ((len(tokens) // TILE_ROWS, TILE_ROWS),),
        image=jnp.asarray(image),
    )
    result = np.asarray(rows_of(rows, golden()["compressed_token_map"], engram_config("released")))
    expected = np.concatenate([golden()[f"released.hash_ids.{number}"] for number in range(SEQUENCES)])
    np.testing.assert_array_equal(result[used], expected)


def test_padding_is_the_compressed_id_of_the_pad_token():
    """In every golden map the pad token keeps its number, so a map that moves it tells the two apart."""
    engram = engram_config("tiny")
    token_map = np.arange(16, dtype=np.int32)[::-1].copy()
    assert token_map[engram.pad_token_id] == 13
    rows = sequence_rows(jnp.asarray([[4, 5]]), 2)
    result = np.asarray(rows_of(rows, token_map, engram))
    expected = np.asarray(hash_rows(jnp.asarray([[11, 13, 13], [10, 11, 13]], jnp.int32), engram))
    np.testing.assert_array_equal(result, expected)


def test_compressed_ids_mark_image_tokens():
    rows = sequence_rows(jnp.array([[3, 0, 2, 1]]), 4)
    rows = rows.replace(image=jnp.array([False, True, False, True]))
    ids = compressed_ids(jnp.array([10, 11, 12, 13]), rows)
    np.testing.assert_array_equal(ids, [13, IMAGE_TOKEN, 12, IMAGE_TOKEN])


@given(ids=st.lists(st.lists(st.integers(0, 99_091), min_size=4, max_size=4), min_size=8, max_size=8))
def test_hash_in_python_integers(ids):
    """Products of up to 63 bits, exclusive or, and the remainder, against Python's integers."""
    engram = engram_config("released")
    result = np.asarray(jax.jit(hash_rows, static_argnums=1)(np.array(ids, np.int32), engram))
    multipliers, primes = (golden()[f"released.{item}"].tolist() for item in ("multipliers", "primes"))
    for row, newest_first in enumerate(ids):
        for memory in range(2):
            mixed, offset, expected = newest_first[0] * multipliers[memory][0], 0, []
            for ngram in range(1, 4):
                mixed ^= newest_first[ngram] * multipliers[memory][ngram]
                for prime in primes[memory][ngram - 1]:
                    expected.append(mixed % prime + offset)
                    offset += prime
            assert result[row, memory].tolist() == expected


def test_every_row_id_lies_in_the_part_of_its_column():
    engram = engram_config("released")
    constants = hash_constants(engram)
    ids = np.random.default_rng(1).integers(0, 99_092, (500, 4)).astype(np.int32)
    rows = np.asarray(hash_rows(jnp.asarray(ids), engram)).astype(np.int64)
    offsets, primes = constants.offsets.reshape(2, -1), constants.primes.reshape(2, -1)
    assert (rows >= offsets).all()
    assert (rows < offsets + primes).all()


@functools.cache
def config():
    return ModelConfig.preset("mini-40")


@functools.cache
def memory():
    described = Engram.describe(config(), 0)
    return initialise(described, jax.random.key(0), Numerics.preset("f32"))


def memory_case(seed=0, rows=6, size=1.0):
    random = np.random.default_rng(seed)
    streams = random.standard_normal((rows, config().hc_mult, config().hidden_size)) * size
    columns = random.integers(0, config().engram.num_embeddings[0], (rows, config().engram.columns))
    return streams.astype(np.float32), columns.astype(np.int32), np.arange(rows) % 3 == 1


read = jax.jit(read_memory, static_argnums=4)


def reference_memory(params, streams, columns, config):
    """Model specification 10.3 in float64: updated streams and gates, row by row and stream by stream."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    rows, count, hidden = streams.shape
    updated, gates = np.zeros(streams.shape), np.zeros((rows, count))
    for row, stream in np.ndindex(rows, count):
        projected = params.key_value @ params.table[columns[row]].reshape(-1)
        key, value = projected[stream * hidden : (stream + 1) * hidden], projected[count * hidden :]
        x = streams[row, stream].astype(np.float64)
        norm = np.sqrt((x**2).mean() + config.rms_norm_eps) * np.sqrt((key**2).mean() + config.rms_norm_eps)
        dot = (x * params.query_weight[stream] * params.key_weight[stream] * key).sum() / norm / hidden**0.5
        gates[row, stream] = 1 / (1 + np.exp(-np.copysign(np.sqrt(max(abs(dot), 1e-6)), dot)))
        updated[row, stream] = x + gates[row, stream] * value
    return updated, gates


def test_reading_follows_the_definition():
    streams, columns, image = memory_case()
    updated, gates = read(memory(), streams, columns, image, config())
    expected, expected_gates = reference_memory(memory(), streams, columns, config())
    np.testing.assert_allclose(gates, expected_gates, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(updated)[~image], expected[~image], rtol=1e-5, atol=1e-5)
    assert (expected_gates < 0.45).any()
    assert (expected_gates > 0.55).any()


def test_image_rows_pass_unchanged():
    """To the bit, even where the table row holds NaN."""
    streams, columns, image = memory_case(1)
    params = memory().replace(table=memory().table.at[jnp.asarray(columns[image]).reshape(-1)].set(jnp.nan))
    updated, _ = read(params, streams, columns, image, config())
    np.testing.assert_array_equal(np.asarray(updated)[image], streams[image])


def test_the_gate_does_not_depend_on_the_size_of_the_streams():
    streams, columns, image = memory_case(2)
    _, gates = read(memory(), streams, columns, image, config())
    _, larger = read(memory(), streams * np.float32(1024), columns, image, config())
    np.testing.assert_allclose(larger, gates, rtol=1e-6)


def test_the_gate_has_a_floor_and_keeps_the_sign():
    """|dot| below 1e-6 counts as 1e-6, so that the root is 1e-3 on the side of the sign."""
    streams, columns, image = memory_case(3)
    _, gates = read(memory(), streams, columns, image, config())
    faint = memory().replace(query_weight=memory().query_weight * 1e-12)
    _, floored = read(faint, streams, columns, image, config())
    side = np.where(np.asarray(gates) > 0.5, 1.0, -1.0)
    assert {-1.0, 1.0} == set(side.ravel())
    np.testing.assert_allclose(np.asarray(floored) - 0.5, side * 1e-3 / 4, rtol=1e-3)


def test_bfloat16_streams_are_updated_in_float32_and_rounded_once():
    streams, columns, image = memory_case(4)
    half = streams.astype(ml_dtypes.bfloat16)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), memory())
    updated, gates = read(params, half, columns, image, config())
    assert updated.dtype == jnp.bfloat16
    assert gates.dtype == jnp.float32
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    expected, expected_gates = reference_memory(wide, half.astype(np.float32), columns, config())
    np.testing.assert_allclose(gates, expected_gates, rtol=0, atol=2e-2)
    error = np.abs(np.asarray(updated, np.float32) - expected)[~image]
    assert error.max() < 0.05
    np.testing.assert_array_equal(np.asarray(updated)[image], half[image])


def test_description_of_the_release():
    """Released names, shapes and storage (specification, section 18)."""
    released = ModelConfig.preset("v4.1-flash")
    for number, (layer, rows) in enumerate([(1, 384006168), (14, 384016682)]):
        prefix = f"layers.{layer}.engram"
        described = Engram.describe(released, number)
        assert {item.released[0][0]: (item.shape, item.stored) for item in parameters(described)} == {
            f"{prefix}.embed.weight": ((rows, 256), Stored.FP8_ROWS),
            f"{prefix}.wkv.weight": ((25600, 6144), Stored.FP8_BLOCKS),
            f"{prefix}.q_weight": ((4, 5120), Stored.BF16),
            f"{prefix}.k_weight": ((4, 5120), Stored.BF16),
        }
        assert [name for item in parameters(described) for name in item.tensor_names() if "scale" in name] == [
            f"{prefix}.embed.scale",
            f"{prefix}.wkv.scale",
        ]
