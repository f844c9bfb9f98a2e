"""The model configuration: a released ``config.json``, checked once and typed.

Field names are the released keys (DeepSeek-V4.1-Flash ``text_config``), so that a reader of the checkpoint finds them
again. Optional features are optional members: ``yarn``, ``candidates``, ``engram``, ``draft`` and ``vision`` are None
when the configuration has no such feature. The vendor's inference spelling (``dim``, ``n_layers``, ...) is accepted
too and translated in :mod:`deepinfer_jax.config_keys`.
"""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from pathlib import Path
from typing import Any

from deepinfer_jax.config_keys import FIXED_QUANTISATION, FIXED_VALUES, Reader, normalise
from deepinfer_jax.errors import ConfigError

PRESETS = ("v4.1-flash", "peer-50m", "mini-40")
SUPPORTED_RATIOS = (0, 1, 2)
# The device hash keeps ``256 * remainder + byte`` inside uint32, which needs every modulus below 2**24.
ENGRAM_VOCABULARY_LIMIT = 1 << 24


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """Frequency-only YaRN of the compressed layers (``rope_scaling``)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class CandidateConfig:
    """Block-level preselection: published by ``source_layer_id``, used by every later index source layer."""

    source_layer_id: int
    topk_blocks: int
    block_size: int


@dataclasses.dataclass(frozen=True)
class EngramConfig:
    """Hashed n-gram memory read before the blocks of ``layer_ids``. ``num_embeddings`` are table rows per layer."""

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    vocab_size: int
    n_heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def columns(self) -> int:
        """Table rows read per token and layer: one per n-gram length (2 .. max) and hash head."""
        return (self.max_ngram_size - 1) * self.n_heads


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """The DSpark draft head: ``stages`` window-only blocks that draft ``block_size`` tokens at once."""

    stages: int
    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    n_routed_experts: int
    num_experts_per_tok: int


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The vision tower and the limits of image planning (pixels and tokens)."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A checked DeepSeek-V4.1 configuration; hashable, so that it can be a static argument of compiled functions.

    ``compress_ratios`` covers the backbone layers only; draft stages are always window-only. Construct through
    :meth:`from_dict`, :meth:`from_directory` or :meth:`preset`, which raise :class:`ConfigError` on any defect.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    gate_temperature: float
    rms_norm_eps: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rope_theta: float
    compress_rope_theta: float
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None
    quantised: bool
    yarn: YarnConfig | None
    candidates: CandidateConfig | None
    engram: EngramConfig | None
    draft: DraftConfig | None
    vision: VisionConfig | None

    @classmethod
    def from_dict(cls, raw: Any) -> ModelConfig:
        """Read a parsed ``config.json`` in the released or the vendor's inference spelling.

        Raises:
          ConfigError: a key is missing, or a value is not accepted; names the key, the value and what is accepted.
        """
        released = normalise(raw)
        top, text = Reader(released, ""), Reader(released["text_config"], "text_config.")
        for key, accepted in FIXED_VALUES.items():
            text.fixed(key, accepted)
        top.fixed("tie_word_embeddings", FIXED_VALUES["tie_word_embeddings"])
        quantisation = top.section("quantization_config")
        if quantisation is not None:
            for key, accepted in FIXED_QUANTISATION.items():
                quantisation.fixed(key, accepted)
        config = cls(
            **{field: text.read(field, kind) for field, kind in _TEXT_FIELDS.items()},
            gate_temperature=text.read("gate_temp", float, default=1.0),
            compress_ratios=_backbone_ratios(text),
            bos_token_id=top.read("bos_token_id", int),
            eos_token_id=top.read("eos_token_id", int),
            pad_token_id=top.read("pad_token_id", int),
            image_token_id=top.read("image_token_id", int, default=None),
            quantised=quantisation is not None,
            yarn=_yarn(text),
            candidates=_candidates(text),
            engram=_engram(text),
            draft=_draft(text),
            vision=_vision(top),
        )
        _check(config)
        return config

    @classmethod
    def from_directory(cls, directory: Path | str) -> ModelConfig:
        """Read ``config.json`` of a checkpoint directory."""
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise ConfigError("config.json", str(path), "a checkpoint directory that holds a config.json")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError("config.json", str(path), f"valid JSON ({error})") from error
        return cls.from_dict(raw)

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """One of :data:`PRESETS`: the release, the 50 M peer shape, or 20 + 20 layers in miniature."""
        if name not in PRESETS:
            raise ConfigError("preset", name, f"one of {', '.join(PRESETS)}")
        text = resources.files("deepinfer_jax").joinpath("presets", f"{name}.json").read_text(encoding="utf-8")
        return cls.from_dict(json.loads(text))

    @property
    def encoder_layers(self) -> int:
        """Layers before the first ratio-1 layer: the causal encoder; all layers when no layer has ratio 1."""
        return self.compress_ratios.index(1) if 1 in self.compress_ratios else self.num_hidden_layers

    @property
    def draft_stages(self) -> int:
        """Number of draft stages; 0 without a draft head."""
        return self.draft.stages if self.draft else 0

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed cache ``layer`` attends; only defined for layers with a ratio above 0."""
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose selection ``layer`` attends; only defined for layers with a ratio above 0."""
        return max(source for source in self.index_source_layer_ids if source <= layer)


_TEXT_FIELDS: dict[str, Any] = {
    "vocab_size": int,
    "hidden_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "head_dim": int,
    "qk_rope_head_dim": int,
    "q_lora_rank": int,
    "o_groups": int,
    "o_lora_rank": int,
    "sliding_window": int,
    "kv_source_layer_ids": tuple,
    "index_source_layer_ids": tuple,
    "index_n_heads": int,
    "index_head_dim": int,
    "index_topk": int,
    "moe_intermediate_size": int,
    "n_routed_experts": int,
    "num_experts_per_tok": int,
    "routed_scaling_factor": float,
    "swiglu_limit": float,
    "rms_norm_eps": float,
    "hc_mult": int,
    "hc_sinkhorn_iters": int,
    "hc_eps": float,
    "rope_theta": float,
    "compress_rope_theta": float,
    "max_position_embeddings": int,
}


def _backbone_ratios(text: Reader) -> tuple[int, ...]:
    layers = text.read("num_hidden_layers", int)
    stages = text.read("num_nextn_predict_layers", int, default=0)
    if stages < 0:
        text.refuse("num_nextn_predict_layers", stages, "0 or more")
    ratios = text.read("compress_ratios", tuple)
    if len(ratios) not in (layers, layers + stages):
        text.refuse("compress_ratios", ratios, f"{layers} entries, or {layers + stages} with the draft stages")
    if any(ratios[layers:]):
        text.refuse("compress_ratios", ratios[layers:], "0 for every draft stage")
    for layer, ratio in enumerate(ratios):
        if ratio not in SUPPORTED_RATIOS:
            text.refuse(f"compress_ratios[{layer}]", ratio, f"one of {SUPPORTED_RATIOS}")
    return ratios[:layers]


def _yarn(text: Reader) -> YarnConfig | None:
    scaling = text.section("rope_scaling")
    if scaling is None:
        return None
    scaling.fixed("rope_type", ("yarn",))
    return YarnConfig(
        factor=scaling.read("factor", float),
        beta_fast=scaling.read("beta_fast", float),
        beta_slow=scaling.read("beta_slow", float),
        original_max_position_embeddings=scaling.read("original_max_position_embeddings", int),
    )


def _candidates(text: Reader) -> CandidateConfig | None:
    if text.values.get("candidate_source_layer_id") is None:
        return None
    return CandidateConfig(
        source_layer_id=text.read("candidate_source_layer_id", int),
        topk_blocks=text.read("candidate_topk_blocks", int),
        block_size=text.read("candidate_block_size", int),
    )


def _engram(text: Reader) -> EngramConfig | None:
    if not text.values.get("engram_layer_ids"):
        return None
    return EngramConfig(
        layer_ids=text.read("engram_layer_ids", tuple),
        num_embeddings=text.read("engram_num_embeddings", tuple),
        max_ngram_size=text.read("engram_max_ngram_size", int),
        vocab_size=text.read("engram_vocab_size", int),
        n_heads=text.read("engram_n_heads", int),
        head_dim=text.read("engram_head_dim", int),
        pad_token_id=text.read("engram_pad_token_id", int),
        compressed_vocab_size=text.read("engram_compressed_vocab_size", int),
    )


def _draft(text: Reader) -> DraftConfig | None:
    stages = text.read("num_nextn_predict_layers", int, default=0)
    if stages == 0:
        return None
    return DraftConfig(
        stages=stages,
        block_size=text.read("dspark_block_size", int),
        noise_token_id=text.read("dspark_noise_token_id", int),
        target_layer_ids=text.read("dspark_target_layer_ids", tuple),
        markov_rank=text.read("dspark_markov_rank", int),
        n_routed_experts=text.read("dspark_n_routed_experts", int),
        num_experts_per_tok=text.read("dspark_num_experts_per_tok", int),
    )


def _vision(top: Reader) -> VisionConfig | None:
    vision = top.section("vision_config")
    if vision is None:
        return None
    return VisionConfig(
        num_hidden_layers=vision.read("num_hidden_layers", int),
        hidden_size=vision.read("hidden_size", int),
        num_attention_heads=vision.read("num_attention_heads", int),
        intermediate_size=vision.read("intermediate_size", int),
        patch_size=vision.read("patch_size", int),
        rope_theta=vision.read("rope_theta", float),
        downsample_ratio=vision.read("downsample_ratio", int),
        max_image_tokens=vision.read("max_image_tokens", int),
        min_pixels=vision.read("min_pixels", int),
        max_wh_ratio=vision.read("max_wh_ratio", float, default=None),
    )


def _check(config: ModelConfig) -> None:
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
