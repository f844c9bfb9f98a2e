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

from deepinfer_jax.config_checks import check
from deepinfer_jax.config_keys import FIXED_QUANTISATION, FIXED_VALUES, Reader, normalise
from deepinfer_jax.errors import ConfigError

PRESETS = ("v4.1-flash", "peer-50m", "mini-40")
SUPPORTED_RATIOS = (0, 1, 2)


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
        check(config)
        return config

    @classmethod
    def from_directory(cls, directory: Path | str) -> ModelConfig:
        """Read ``config.json`` of a checkpoint directory."""
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise ConfigError("config.json", str(path), "a checkpoint directory that holds a config.json")
        return cls.from_file(path)

    @classmethod
    def from_file(cls, path: Path | str) -> ModelConfig:
        """Read a file in the form of ``config.json``; what is no JSON is refused too."""
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
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
