"""The compressed vocabulary against maps and hashed rows computed by other implementations."""

import hashlib

import numpy as np
import pytest

from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.text.compressed_vocabulary import class_key, compressed_token_map, normalised
from tests.golden import document, tensors

PAD = 2


def _rows(token_ids, token_map, classes, *, layer_ids, ngrams, heads, vocab_size):
    """Engram table rows of every position, shape (tokens, layers, (ngrams - 1) * heads), in int64.

    Written from the model specification, section 10.2, independently of the device implementation.
    """
    bound = (2**63 - 1) // classes // 2
    look_back = np.stack([np.r_[[token_map[PAD]] * j, token_map[token_ids]][: len(token_ids)] for j in range(ngrams)])
    used: set[int] = set()
    layers = []
    for layer in layer_ids:
        multipliers = 2 * np.random.default_rng(10007 * layer).integers(0, bound, size=ngrams, dtype=np.int64) + 1
        products = look_back.astype(np.int64) * multipliers[:, None]
        columns, offset = [], 0
        for n in range(1, ngrams):
            mixed = np.bitwise_xor.reduce(products[: n + 1], axis=0)
            for _ in range(heads):
                prime = next(p for p in range(vocab_size, 2 * vocab_size) if p not in used and _is_prime(p))
                used.add(prime)
                columns.append(mixed % prime + offset)
                offset += prime
        layers.append(np.stack(columns, axis=-1))
    return np.stack(layers, axis=1)


def _is_prime(number):
    return all(number % divisor for divisor in range(2, int(number**0.5) + 1))


@pytest.fixture(scope="module")
def public_map(public_tokenizer):
    return compressed_token_map(public_tokenizer, 129280, PAD, 99092)


def test_map_of_the_public_tokenizer_is_the_golden_map(public_map):
    golden = document("engram/meta.json")["compressed_token_map"]
    assert public_map.dtype == np.int32
    np.testing.assert_array_equal(public_map, tensors("engram/engram_hash.npz")["compressed_token_map"])
    assert hashlib.sha256(public_map.astype("<i4").tobytes()).hexdigest() == golden["sha256_of_int32_le"]
    assert public_map.max() + 1 == golden["distinct"] == 99092
    assert public_map[PAD] == document("engram/meta.json")["released"]["pad_compressed_id"]


def test_respelled_system_token_keeps_the_map(public_map, released_tokenizer):
    np.testing.assert_array_equal(compressed_token_map(released_tokenizer, 129280, PAD, 99092), public_map)


def test_miniature_map_leads_to_the_golden_rows(tiny_tokenizer):
    golden = document("text/tiny_a/engram_rows.json")
    token_map = compressed_token_map(tiny_tokenizer, 512, PAD, 420)
    rows = _rows(golden["token_ids"], token_map, 420, layer_ids=(1, 5), ngrams=4, heads=2, vocab_size=60)
    np.testing.assert_array_equal(rows, golden["engram_hash_ids"])


def test_released_map_leads_to_the_golden_rows(public_map):
    golden = tensors("engram/engram_hash.npz")
    for index in (4, 10, 19, 22):
        rows = _rows(golden[f"seq.{index}"], public_map, 99092, layer_ids=(0, 3, 7), ngrams=3, heads=4, vocab_size=1000)
        np.testing.assert_array_equal(rows, golden[f"tiny.hash_ids.{index}"])


def test_padding_rows_of_the_embedding_take_the_class_of_the_pad_token(tiny_tokenizer):
    exact = compressed_token_map(tiny_tokenizer, 512, PAD, 420)
    padded = compressed_token_map(tiny_tokenizer, 520, PAD, 420)
    np.testing.assert_array_equal(padded[:512], exact)
    np.testing.assert_array_equal(padded[512:], exact[PAD])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (" The", "the"),
        ("CAFÉ", "cafe"),
        ("ﬁ", "fi"),
        ("Ⅳ", "iv"),
        ("ｆｕｌｌ", "full"),
        (" ", " "),
        ("\n\n", " "),
        ("\u3000", " "),
        (" \t a  b\r\n", "a b"),
        ("\u2028", ""),  # white space that is neither removed by NFKC nor a space run
        ("\u0301", ""),  # Mn
        ("\u0903", ""),  # Mc
        ("\u20dd", ""),  # Me
        ("\x1c", "\x1c"),  # a control character, no white space in Unicode
        ("ΣΑΣ", "σασ"),  # no final sigma
        ("İ", "i"),
    ],
)
def test_normal_form(content, expected):
    assert normalised(content) == expected


def test_class_key_falls_back_to_text_and_to_spelling():
    assert class_key("The", "The") == "the"
    assert class_key("\u0301", "Ìģ") == "\u0301"
    assert class_key("\ufffd", "Ìģ") == "Ìģ"


def test_another_number_of_classes_is_refused(tiny_tokenizer):
    with pytest.raises(CheckpointError, match="420 compressed classes.*engram_compressed_vocab_size 421"):
        compressed_token_map(tiny_tokenizer, 512, PAD, 421)
    assert compressed_token_map(tiny_tokenizer, 512, PAD).max() == 419


def test_a_tokenizer_larger_than_the_model_is_refused(tiny_tokenizer):
    with pytest.raises(CheckpointError, match="512 token ids.*vocab_size 500"):
        compressed_token_map(tiny_tokenizer, 500, PAD)


def test_a_pad_id_without_token_is_refused(tiny_tokenizer):
    with pytest.raises(CheckpointError, match="engram_pad_token_id"):
        compressed_token_map(tiny_tokenizer, 520, 515)
