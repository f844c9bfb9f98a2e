"""The trained tokenizer: exact size, control tokens in place, and a text that comes back byte for byte."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.text.tokenizer import Tokenizer
from examples.train_tiny.vocabulary import train_tokenizer
from tests.configurations import raw_preset

CONFIG = ModelConfig.from_dict(raw_preset("mini-40"))
TEXT = "def read(path):\n    with open(path) as file:\n        return file.read()\n" * 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("vocabulary")
    words = " ".join(
        f"{first}{second}{first}word {second}{first}return" for first in "abcdefgh" for second in "klmnopqrs"
    )
    document = train_tokenizer([TEXT, words], CONFIG)
    (directory / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    return Tokenizer.from_directory(directory)


def test_every_id_of_the_model_has_a_token(tokenizer):
    assert tokenizer.vocabulary_size == CONFIG.vocab_size
    assert tokenizer.content_of(CONFIG.bos_token_id) == "<｜begin▁of▁sentence｜>"
    assert tokenizer.content_of(CONFIG.eos_token_id) == "<｜end▁of▁sentence｜>"


def test_words_of_the_text_are_shorter_than_their_letters(tokenizer):
    assert len(tokenizer.encode_text(TEXT)) < len(TEXT) / 3


@given(st.text(max_size=40))
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match="tokens, not the"):
        train_tokenizer(["ab"], CONFIG)
