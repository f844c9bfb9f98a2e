"""Released configurations as raw data, and what may be changed in them: shared by the tests of the configuration."""

import copy
import dataclasses
import json
from importlib import resources

import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError

DELETED = object()

# Released key -> another valid value and the only field it may change. Equal numbers hide a mix-up in RELEASED.
CHANGES = {
    "vocab_size": (129281, "vocab_size"),
    "hidden_size": (5152, "hidden_size"),
    "num_attention_heads": (72, "num_attention_heads"),
    "head_dim": (544, "head_dim"),
    "qk_rope_head_dim": (66, "qk_rope_head_dim"),
    "q_lora_rank": (1312, "q_lora_rank"),
    "o_groups": (4, "o_groups"),
    "o_lora_rank": (1056, "o_lora_rank"),
    "sliding_window": (129, "sliding_window"),
    "index_n_heads": (33, "index_n_heads"),
    "index_head_dim": (160, "index_head_dim"),
    "index_topk": (511, "index_topk"),
    "index_source_layer_ids": ([2, 8, 14, 20, 24, 28, 32], "index_source_layer_ids"),
    "kv_source_layer_ids": ([2, 8, 20], "kv_source_layer_ids"),
    "compress_ratios": ([0] * 2 + [2] * 18 + [1] * 19 + [0], "compress_ratios"),
    "moe_intermediate_size": (2336, "moe_intermediate_size"),
    "n_routed_experts": (385, "n_routed_experts"),
    "num_experts_per_tok": (7, "num_experts_per_tok"),
    "routed_scaling_factor": (2.5, "routed_scaling_factor"),
    "swiglu_limit": (7, "swiglu_limit"),
    "gate_temp": (2, "gate_temperature"),
    "rms_norm_eps": (1e-6, "rms_norm_eps"),
    "hc_mult": (3, "hc_mult"),
    "hc_sinkhorn_iters": (19, "hc_sinkhorn_iters"),
    "hc_eps": (1e-7, "hc_eps"),
    "rope_theta": (10001, "rope_theta"),
    "compress_rope_theta": (160001, "compress_rope_theta"),
    "max_position_embeddings": (4096, "max_position_embeddings"),
    "candidate_source_layer_id": (24, "candidates.source_layer_id"),
    "candidate_topk_blocks": (2049, "candidates.topk_blocks"),
    "candidate_block_size": (16, "candidates.block_size"),
    "engram_layer_ids": ([3, 4], "engram.layer_ids"),
    "engram_num_embeddings": ([5, 6], "engram.num_embeddings"),
    "engram_max_ngram_size": (3, "engram.max_ngram_size"),
    "engram_vocab_size": (15000000, "engram.vocab_size"),
    "engram_n_heads": (9, "engram.n_heads"),
    "engram_head_dim": (128, "engram.head_dim"),
    "engram_pad_token_id": (3, "engram.pad_token_id"),
    "engram_compressed_vocab_size": (99093, "engram.compressed_vocab_size"),
    "dspark_block_size": (6, "draft.block_size"),
    "dspark_noise_token_id": (128798, "draft.noise_token_id"),
    "dspark_target_layer_ids": ([36, 38, 39], "draft.target_layer_ids"),
    "dspark_markov_rank": (255, "draft.markov_rank"),
    "dspark_n_routed_experts": (129, "draft.n_routed_experts"),
    "dspark_num_experts_per_tok": (4, "draft.num_experts_per_tok"),
    "rope_scaling.factor": (8, "yarn.factor"),
    "rope_scaling.beta_fast": (31, "yarn.beta_fast"),
    "rope_scaling.beta_slow": (2, "yarn.beta_slow"),
    "rope_scaling.original_max_position_embeddings": (65535, "yarn.original_max_position_embeddings"),
    "/bos_token_id": (5, "bos_token_id"),
    "/eos_token_id": (5, "eos_token_id"),
    "/pad_token_id": (5, "pad_token_id"),
    "/image_token_id": (5, "image_token_id"),
    "/quantization_config": (None, "quantised"),
    "/vision_config.num_hidden_layers": (33, "vision.num_hidden_layers"),
    "/vision_config.hidden_size": (1088, "vision.hidden_size"),
    "/vision_config.num_attention_heads": (8, "vision.num_attention_heads"),
    "/vision_config.intermediate_size": (2817, "vision.intermediate_size"),
    "/vision_config.patch_size": (16, "vision.patch_size"),
    "/vision_config.rope_theta": (10001, "vision.rope_theta"),
    "/vision_config.downsample_ratio": (2, "vision.downsample_ratio"),
    "/vision_config.max_image_tokens": (1023, "vision.max_image_tokens"),
    "/vision_config.min_pixels": (295937, "vision.min_pixels"),
    "/vision_config.max_wh_ratio": (4, "vision.max_wh_ratio"),
}
# Keys of the release that select behaviour and have one accepted value, and what another value might be.
FIXED = {
    "num_key_value_heads": 2,
    "hidden_act": "gelu",
    "attention_bias": True,
    "scoring_func": "sigmoid",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "n_shared_experts": 2,
    "tie_word_embeddings": True,
    "hc_shifted": False,
    "use_fp4_sparse_kv": False,
    "dspark_target_attn_input": False,
    "rope_scaling.rope_type": "linear",
    "/tie_word_embeddings": True,
    "/model_type": "deepseek_v4",
    "/quantization_config.quant_method": "awq",
    "/quantization_config.weight_block_size": [128, 128],
    "/quantization_config.scale_fmt": "float",
    "/quantization_config.expert_dtype": None,
}


def raw_preset(name="v4.1-flash"):
    return json.loads(resources.files("deepinfer_jax").joinpath("presets", f"{name}.json").read_text(encoding="utf-8"))


def full_path(path):
    """`a.b` is a key below text_config, `/a.b` one from the top; the spelling that errors use is `text_config.a.b`."""
    return path[1:] if path.startswith("/") else f"text_config.{path}"


def changed(path, value, raw=None):
    """A copy of the configuration with one key set; DELETED removes it."""
    raw = copy.deepcopy(raw_preset() if raw is None else raw)
    *parents, key = full_path(path).split(".")
    section = raw
    for parent in parents:
        section = section[parent]
    if value is DELETED:
        section.pop(key, None)
    else:
        section[key] = value
    return raw


def flat(config):
    """Field path -> value; the absence of a whole feature counts as one field."""
    fields = {}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            fields |= {f"{name}.{inner}": item for inner, item in value.items()}
        else:
            fields[name] = value
    return fields


def keys_of(raw, prefix=""):
    """Every key path of a parsed file that holds no object."""
    for key, value in raw.items():
        yield from keys_of(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]


def refusal(raw):
    with pytest.raises(ConfigError) as refused:
        ModelConfig.from_dict(raw)
    return refused.value


def assert_names(error, path, value, accepted):
    """One sentence with the key as the user wrote it, the value, and what would be accepted."""
    assert error.key == full_path(path)
    assert error.value == value
    assert accepted in error.accepted
    assert full_path(path) in str(error)
    assert error.accepted in str(error)
