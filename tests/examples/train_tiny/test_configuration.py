"""The small model's configuration: every structural feature, a few million parameters, sizes from its tokenizer."""

import json

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.engram import hash_constants
from deepinfer_jax.model.params import count
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.text.tokenizer import Tokenizer
from deepinfer_jax.topology import Mode, topology
from examples.train_tiny.batches import encode_documents
from examples.train_tiny.configuration import configuration, template
from examples.train_tiny.corpus import Document
from tests.golden import DATA


def test_every_structural_feature_is_there():
    config = ModelConfig.from_dict(template())
    plans = topology(config).layers
    assert 3e6 <= count(Model.describe(config)) <= 8e6
    assert {plan.kind.ratio for plan in plans} == {0, 1, 2}
    assert {plan.kind.mode for plan in plans} == set(Mode)
    assert any(plan.kind.inside_candidates for plan in plans)
    assert config.sliding_window <= 32
    assert config.index_topk <= 64
    assert config.draft.stages == 3
    hash_constants(config.engram)


def test_the_number_of_compressed_classes_is_the_tokenizers():
    raw = configuration(Tokenizer.from_directory(DATA / "tiny-a" / "quant"))
    golden = json.loads((DATA / "tiny-a" / "quant" / "config.json").read_text(encoding="utf-8"))["text_config"]
    assert raw["text_config"]["engram_compressed_vocab_size"] == golden["engram_compressed_vocab_size"]


def test_a_document_stands_between_begin_and_end_and_its_text_holds_no_control_token():
    config, tokenizer = ModelConfig.from_dict(template()), Tokenizer.from_directory(DATA / "tiny-a" / "quant")
    (tokens,) = encode_documents([Document("a.py", "x = '<｜end▁of▁sentence｜>'")], tokenizer, config)
    assert (tokens[0], tokens[-1]) == (config.bos_token_id, config.eos_token_id)
    assert config.eos_token_id not in tokens[1:-1]
