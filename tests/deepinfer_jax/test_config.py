"""The configuration: every released key in its field, both spellings, and absent features."""

import dataclasses
import json

import pytest

from deepinfer_jax.config import PRESETS, ModelConfig
from tests.configurations import CHANGES, DELETED, FIXED, changed, flat, full_path, keys_of, raw_preset
from tests.golden import DATA

# Model specification, section 1, as ModelConfig holds it.
RELEASED = {
    "vocab_size": 129280,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": (0,) * 2 + (2,) * 18 + (1,) * 20,
    "kv_source_layer_ids": (2, 8, 14, 20),
    "index_source_layer_ids": (2, 8, 14, 20, 24, 28, 32, 36),
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "moe_intermediate_size": 2304,
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "gate_temperature": 1.0,
    "rms_norm_eps": 1e-20,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "max_position_embeddings": 1048576,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "quantised": True,
    "yarn": {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 65536},
    "candidates": {"source_layer_id": 20, "topk_blocks": 2048, "block_size": 8},
    "engram": {
        "layer_ids": (1, 14),
        "num_embeddings": (384006168, 384016682),
        "max_ngram_size": 4,
        "vocab_size": 16000000,
        "n_heads": 8,
        "head_dim": 256,
        "pad_token_id": 2,
        "compressed_vocab_size": 99092,
    },
    "draft": {
        "stages": 3,
        "block_size": 5,
        "noise_token_id": 128799,
        "target_layer_ids": (37, 38, 39),
        "markov_rank": 256,
        "n_routed_experts": 128,
        "num_experts_per_tok": 3,
    },
    "vision": {
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000.0,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}

# Keys that describe the file or its training and change nothing here.
IGNORED = {
    "/architectures",
    "/dtype",
    "/transformers_version",
    "/text_config.model_type",
    "/text_config.attention_dropout",
    "/text_config.initializer_range",
    "/text_config.use_cache",
    "/vision_config.model_type",
    "/quantization_config.activation_scheme",
}
# Changes that need others to stay valid, tested by name below.
JOINT = {"num_hidden_layers", "num_nextn_predict_layers"}


def test_released_configuration():
    assert dataclasses.asdict(ModelConfig.preset("v4.1-flash")) == RELEASED


@pytest.mark.parametrize("path", CHANGES)
def test_every_key_is_read_into_its_own_field(path):
    value, field = CHANGES[path]
    before, after = (flat(ModelConfig.from_dict(raw)) for raw in (raw_preset(), changed(path, value)))
    expected = tuple(value) if isinstance(value, list) else value
    if path == "/quantization_config":
        expected = False
    elif path == "compress_ratios":
        expected = expected[:40]
    assert {name: item for name, item in after.items() if item != before[name]} == {field: expected}
    assert type(after[field]) is type(before[field]) or before[field] is None


def test_every_released_key_is_accounted_for():
    """Read into a field, fixed to one value, or known to change nothing."""
    known = {full_path(path) for path in (*CHANGES, *FIXED, *JOINT)} | {path[1:] for path in IGNORED}
    assert set(keys_of(raw_preset())) - known == set()


@pytest.mark.parametrize("path", sorted(IGNORED))
def test_ignored_keys_change_nothing(path):
    for value in ("another", DELETED):
        assert ModelConfig.from_dict(changed(path, value)) == ModelConfig.preset("v4.1-flash")


def test_layers_and_draft_stages_may_change_together():
    raw = changed("num_nextn_predict_layers", 1, changed("compress_ratios", [0] * 2 + [2] * 18 + [1] * 20 + [0]))
    config = ModelConfig.from_dict(raw)
    assert (config.draft.stages, config.draft_stages, len(config.compress_ratios)) == (1, 1, 40)
    raw = changed("num_hidden_layers", 41, changed("compress_ratios", [0] * 2 + [2] * 18 + [1] * 21 + [0] * 3))
    assert len(ModelConfig.from_dict(raw).compress_ratios) == 41


def test_ratios_of_draft_stages_may_be_left_out():
    raw = changed("compress_ratios", list(RELEASED["compress_ratios"]))
    assert ModelConfig.from_dict(raw) == ModelConfig.preset("v4.1-flash")


def test_derived_values():
    config = ModelConfig.preset("v4.1-flash")
    assert config.encoder_layers == 20
    assert config.draft_stages == 3
    assert config.engram.columns == 24
    assert [config.kv_source(layer) for layer in (2, 7, 8, 19, 20, 39)] == [2, 2, 8, 14, 20, 20]
    assert [config.index_source(layer) for layer in (2, 20, 23, 24, 39)] == [2, 20, 20, 24, 36]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_hashable(name):
    assert ModelConfig.preset(name) == ModelConfig.preset(name)
    assert len({ModelConfig.preset(name), ModelConfig.preset(name)}) == 1


@pytest.mark.parametrize(("form", "quantised"), [("bf16", False), ("quant", True)])
def test_released_and_vendor_spellings_are_one_configuration(form, quantised):
    """All but the table length, which the vendor's file leaves out."""
    released, vendor = (ModelConfig.from_directory(DATA / "tiny-a" / form / part) for part in ("", "inference"))
    assert released.quantised == quantised
    assert released.max_position_embeddings == 1024
    assert dataclasses.replace(vendor, max_position_embeddings=1024) == released
    for feature in ("yarn", "candidates", "engram", "draft", "vision"):
        assert getattr(released, feature) is not None


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("gate_temp", 2.0, "gate_temperature"),
        ("bos_token_id", 7, "bos_token_id"),
        ("max_position_embeddings", 256, "max_position_embeddings"),
        ("norm_eps", 1e-6, "rms_norm_eps"),
        ("window_size", 17, "sliding_window"),
        ("vision_max_wh_ratio", 3.0, "vision.max_wh_ratio"),
    ],
)
def test_vendor_keys_are_read_into_their_fields(name, value, field):
    raw = json.loads((DATA / "tiny-a" / "bf16" / "inference" / "config.json").read_text(encoding="utf-8"))
    before, after = (flat(ModelConfig.from_dict(item)) for item in (raw, raw | {name: value}))
    assert {key: item for key, item in after.items() if item != before[key]} == {field: value}


def test_vendor_features_may_be_absent():
    raw = json.loads((DATA / "tiny-a" / "bf16" / "inference" / "config.json").read_text(encoding="utf-8"))
    raw |= {
        "original_seq_len": 0,
        "vision_n_layers": 0,
        "engram_layer_ids": [],
        "candidate_source_layer": None,
        "n_mtp_layers": 0,
        "compress_ratios": raw["compress_ratios"][: raw["n_layers"]],
    }
    config = ModelConfig.from_dict(raw)
    assert (config.yarn, config.candidates, config.engram, config.draft, config.vision) == (None,) * 5


@pytest.mark.parametrize("empty", [None, DELETED])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("rope_scaling", "yarn"),
        ("candidate_source_layer_id", "candidates"),
        ("engram_layer_ids", "engram"),
        ("/vision_config", "vision"),
        ("/image_token_id", "image_token_id"),
    ],
)
def test_features_may_be_absent(path, field, empty):
    before, config = ModelConfig.preset("v4.1-flash"), ModelConfig.from_dict(changed(path, empty))
    assert getattr(config, field) is None
    assert dataclasses.replace(config, **{field: getattr(before, field)}) == before


def test_the_draft_head_may_be_absent():
    raw = changed("compress_ratios", list(RELEASED["compress_ratios"]))
    for absent in (0, None, DELETED):
        config = ModelConfig.from_dict(changed("num_nextn_predict_layers", absent, raw))
        assert (config.draft, config.draft_stages) == (None, 0)


def test_keys_of_absent_features_may_be_absent():
    raw = changed("compress_ratios", list(RELEASED["compress_ratios"]))
    for path in CHANGES:
        if path.startswith(("candidate_", "engram_", "dspark_")):
            raw = changed(path, DELETED, raw)
    raw = changed("rope_scaling", DELETED, changed("num_nextn_predict_layers", DELETED, raw))
    raw = changed("/vision_config", DELETED, changed("/quantization_config", DELETED, raw))
    config = ModelConfig.from_dict(raw)
    assert (config.yarn, config.candidates, config.engram, config.draft, config.vision) == (None,) * 5
    assert not config.quantised


@pytest.mark.parametrize("path", [path for path in FIXED if not path.startswith(("/quant", "/model"))])
def test_fixed_keys_may_be_absent(path):
    assert ModelConfig.from_dict(changed(path, DELETED)) == ModelConfig.preset("v4.1-flash")


def test_a_directory_is_read_like_its_parsed_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw_preset()), encoding="utf-8")
    assert ModelConfig.from_directory(tmp_path) == ModelConfig.from_directory(str(tmp_path))
    assert ModelConfig.from_directory(tmp_path) == ModelConfig.preset("v4.1-flash")
