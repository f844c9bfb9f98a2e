"""What a typed configuration must satisfy beyond the types of its values: sizes, sources, and the optional features."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from deepinfer_jax.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer_jax.config import ModelConfig, VisionConfig

# The device hash keeps ``256 * remainder + byte`` inside uint32, which needs every modulus below 2**24.
ENGRAM_VOCABULARY_LIMIT = 1 << 24


def check(config: ModelConfig) -> None:
    """Refuse a configuration that contradicts itself, by key, value and what is accepted.

    Raises:
      ConfigError: the first contradiction found.
    """
    _check_sizes(config)
    _check_sources(config)
    _check_candidates(config)
    _check_engram(config)
    _check_draft(config)
    _check_vision(config.vision)


def _refuse(key: str, value: object, accepted: str) -> None:
    raise ConfigError(f"text_config.{key}", value, accepted)


def _check_positive(config: ModelConfig) -> None:
    """Every size and factor of the text configuration; ids and lists have checks of their own."""
    sections = (
        (config, ""),
        (config.yarn, "rope_scaling."),
        (config.candidates, "candidate_"),
        (config.engram, "engram_"),
        (config.draft, "dspark_"),
    )
    for section, prefix in sections:
        for field in dataclasses.fields(section) if section else ():
            value = getattr(section, field.name)
            if type(value) in (int, float) and not field.name.endswith("_id") and value <= 0:
                key = "gate_temp" if field.name == "gate_temperature" else prefix + field.name
                _refuse(key, value, "a value above 0")


def _check_sizes(config: ModelConfig) -> None:
    _check_positive(config)
    if config.num_attention_heads % config.o_groups:
        _refuse("o_groups", config.o_groups, f"a divisor of num_attention_heads {config.num_attention_heads}")
    widest = min(config.head_dim, config.index_head_dim)
    if config.qk_rope_head_dim % 2 or config.qk_rope_head_dim > widest:
        _refuse("qk_rope_head_dim", config.qk_rope_head_dim, f"an even number of at most {widest}")
    if config.num_experts_per_tok > config.n_routed_experts:
        _refuse(
            "num_experts_per_tok", config.num_experts_per_tok, f"at most n_routed_experts {config.n_routed_experts}"
        )
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        value = getattr(config, key)
        if value is not None and not 0 <= value < config.vocab_size:
            raise ConfigError(key, value, f"an id below vocab_size {config.vocab_size}")


def _check_layers(config: ModelConfig, key: str, layers: tuple[int, ...]) -> None:
    if not layers or len(set(layers)) != len(layers):
        _refuse(key, layers, "one or more distinct layer ids")
    for layer in layers:
        if not 0 <= layer < config.num_hidden_layers:
            _refuse(key, layer, f"layer ids below num_hidden_layers {config.num_hidden_layers}")


def _check_sources(config: ModelConfig) -> None:
    ratios, kv_sources, index_sources = (
        config.compress_ratios,
        config.kv_source_layer_ids,
        config.index_source_layer_ids,
    )
    for key, sources in (("kv_source_layer_ids", kv_sources), ("index_source_layer_ids", index_sources)):
        if list(sources) != sorted(set(sources)):
            _refuse(key, sources, "strictly ascending layer ids")
        for layer in sources:
            if not 0 <= layer < config.num_hidden_layers or ratios[layer] == 0:
                _refuse(key, layer, "a layer id whose compress_ratio is above 0")
    for layer in kv_sources:
        if layer not in index_sources:
            _refuse(
                "kv_source_layer_ids", layer, f"nested sources: each one also in index_source_layer_ids {index_sources}"
            )
    for layer, ratio in enumerate(ratios):
        if ratio == 0:
            continue
        if not kv_sources or layer < kv_sources[0]:
            _refuse("kv_source_layer_ids", kv_sources, f"a source at or before layer {layer}, which has ratio {ratio}")
        if ratios[config.kv_source(layer)] != ratio:
            source = config.kv_source(layer)
            _refuse(f"compress_ratios[{layer}]", ratio, f"the ratio {ratios[source]} of its KV source layer {source}")


def _check_candidates(config: ModelConfig) -> None:
    candidates = config.candidates
    if candidates is None:
        return
    source = candidates.source_layer_id
    if source not in config.index_source_layer_ids:
        _refuse("candidate_source_layer_id", source, f"one of index_source_layer_ids {config.index_source_layer_ids}")
    for layer in config.index_source_layer_ids:
        ratio, wanted = config.compress_ratios[layer], config.compress_ratios[source]
        if layer > source and ratio != wanted:
            accepted = f"a layer with the ratio of every later index source; layer {layer} has {ratio}, not {wanted}"
            _refuse("candidate_source_layer_id", source, accepted)


def _check_engram(config: ModelConfig) -> None:
    engram = config.engram
    if engram is None:
        return
    _check_layers(config, "engram_layer_ids", engram.layer_ids)
    if len(engram.num_embeddings) != len(engram.layer_ids):
        _refuse("engram_num_embeddings", engram.num_embeddings, f"one row count per engram layer {engram.layer_ids}")
    for rows in engram.num_embeddings:
        if not 0 < rows < 1 << 31:
            _refuse("engram_num_embeddings", rows, "row counts of 1 to 2^31 - 1, for row ids in int32")
    if engram.compressed_vocab_size > config.vocab_size:
        _refuse("engram_compressed_vocab_size", engram.compressed_vocab_size, f"at most vocab_size {config.vocab_size}")
    if not 0 <= engram.pad_token_id < config.vocab_size:
        _refuse("engram_pad_token_id", engram.pad_token_id, f"an id below vocab_size {config.vocab_size}")
    if engram.vocab_size >= ENGRAM_VOCABULARY_LIMIT:
        _refuse("engram_vocab_size", engram.vocab_size, f"below {ENGRAM_VOCABULARY_LIMIT}, for hashing in uint32")
    if engram.max_ngram_size < 2:
        _refuse("engram_max_ngram_size", engram.max_ngram_size, "2 or more")


def _check_draft(config: ModelConfig) -> None:
    draft = config.draft
    if draft is None:
        return
    _check_layers(config, "dspark_target_layer_ids", draft.target_layer_ids)
    if draft.num_experts_per_tok > draft.n_routed_experts:
        accepted = f"at most dspark_n_routed_experts {draft.n_routed_experts}"
        _refuse("dspark_num_experts_per_tok", draft.num_experts_per_tok, accepted)
    if not 0 <= draft.noise_token_id < config.vocab_size:
        _refuse("dspark_noise_token_id", draft.noise_token_id, f"an id below vocab_size {config.vocab_size}")


def _check_vision(vision: VisionConfig | None) -> None:
    if vision is None:
        return
    for field in dataclasses.fields(vision):
        value = getattr(vision, field.name)
        if value is not None and value <= 0:
            raise ConfigError(f"vision_config.{field.name}", value, "a value above 0")
    # Two-dimensional RoPE turns half of the head by rows and half by columns, in pairs.
    multiple = 4 * vision.num_attention_heads
    if vision.hidden_size % multiple:
        raise ConfigError("vision_config.hidden_size", vision.hidden_size, f"a multiple of 4 x heads, {multiple}")
    if vision.max_image_tokens < 4:
        raise ConfigError("vision_config.max_image_tokens", vision.max_image_tokens, "4 or more: the smallest span")
