"""Made-up tokenizers: any size of vocabulary loads, encodes what it can, and can chat where the tokens fit."""

import dataclasses
import json

import pytest

from deepinfer_jax.checkpoint.synthetic_tokenizer import tokenizer_configuration, tokenizer_document
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.text.chat import RELEASED_CONTROL_TOKENS, ChatEncoder
from deepinfer_jax.text.compressed_vocabulary import compressed_token_map
from deepinfer_jax.text.tokenizer import Tokenizer

TEXT = "The lighthouse, 1887: naïve façade ☂ 日本語 \t\n end"


def configuration(vocab_size, preset="mini-40", **changes):
    config = ModelConfig.preset(preset)
    return dataclasses.replace(config, vocab_size=vocab_size, **{"image_token_id": vocab_size - 1, **changes})


def tokenizer(config, directory):
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_document(config)), encoding="utf-8")
    return Tokenizer.from_directory(directory, vocab_size=config.vocab_size)


@pytest.mark.parametrize("vocab_size", [8, 100, 258, 259, 260, 264, 268, 269, 300, 512, 8192, 30_000])
def test_a_vocabulary_has_exactly_its_size(vocab_size, tmp_path):
    config = configuration(vocab_size)
    made = tokenizer(config, tmp_path)
    assert made.vocabulary_size == vocab_size
    assert made.control_spellings[config.bos_token_id] == "<｜begin▁of▁sentence｜>"
    assert made.control_spellings[config.eos_token_id] == "<｜end▁of▁sentence｜>"
    assert made.control_spellings[config.image_token_id] == "<｜image｜>"
    if vocab_size >= 260:
        assert made.decode(made.encode_text(TEXT)) == TEXT


def test_words_become_fewer_tokens_than_bytes(tmp_path):
    made = tokenizer(configuration(8192), tmp_path)
    assert len(made.encode_text("the lighthouse")) < len("the lighthouse")
    assert made.spelling_of(made.encode_text(" ab")[0]) == "Ġab"


@pytest.mark.parametrize("vocab_size", [512, 8192])
def test_it_can_chat_where_the_control_tokens_fit(vocab_size, tmp_path):
    config = configuration(vocab_size)
    encoder = ChatEncoder.from_tokenizer(
        tokenizer(config, tmp_path),
        vocab_size=vocab_size,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        image_token_id=config.image_token_id,
    )
    chat = encoder.encode([{"role": "user", "content": "hello"}], thinking=True)
    assert chat.token_ids[0] == config.bos_token_id
    assert encoder.tokenizer.decode(chat.token_ids).endswith("<｜User｜>hello<｜Assistant｜><think>")


def test_the_released_vocabulary_has_its_released_control_tokens(tmp_path):
    """And its released number of classes: 99,092 of 129,280 tokens."""
    config = ModelConfig.preset("v4.1-flash")
    made = tokenizer(config, tmp_path)
    assert {spelling: made.control_tokens[spelling] for spelling in RELEASED_CONTROL_TOKENS} == RELEASED_CONTROL_TOKENS
    assert made.control_tokens["<｜image｜>"] == 129264
    token_map = compressed_token_map(made, 129280, 2, 99092)
    assert token_map.max() == 99091


@pytest.mark.parametrize(("vocab_size", "classes"), [(512, 420), (512, 400), (512, 470), (2000, 1500), (2000, 1700)])
def test_the_number_of_classes_can_be_chosen(vocab_size, classes, tmp_path):
    config = configuration(vocab_size)
    config = dataclasses.replace(config, engram=dataclasses.replace(config.engram, compressed_vocab_size=classes))
    compressed_token_map(tokenizer(config, tmp_path), vocab_size, config.engram.pad_token_id, classes)


def test_roles_may_share_an_id(tmp_path):
    """A pad that is the end of sequence, as some configurations have it."""
    config = configuration(300, eos_token_id=1, pad_token_id=1)
    made = tokenizer(config, tmp_path)
    assert made.control_spellings[1] == "<｜end▁of▁sentence｜>"
    assert made.vocabulary_size == 300
    assert tokenizer_configuration(config)["pad_token"] == "<｜end▁of▁sentence｜>"


def test_the_configuration_of_other_loaders_names_the_tokens():
    document = tokenizer_configuration(configuration(512))
    assert document["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (document["bos_token"], document["pad_token"]) == ("<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>")
    assert document["model_max_length"] == 1024
