"""The two spellings of a DeepSeek-V4.1 configuration, and typed access to one.

The released ``config.json`` nests ``text_config`` and ``vision_config``; the vendor's ``inference/config.json`` is flat
and names the same things differently. :func:`normalise` brings both to the released nesting and names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from deepinfer_jax.errors import ConfigError

_MISSING = object()

# Keys that select behaviour this project implements in exactly one way: absent, or one of the values listed.
FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "n_shared_experts": (1,),
    "tie_word_embeddings": (False,),
    "hc_shifted": (True,),
    "use_fp4_sparse_kv": (True,),
    "dspark_target_attn_input": (True,),
}

# The same for ``quantization_config``, where there is one.
FIXED_QUANTISATION: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "weight_block_size": ([32, 32],),
    "scale_fmt": ("ue8m0",),
    "expert_dtype": ("fp4",),
}

_VENDOR_TEXT_NAMES = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
    "engram_pad_id": "engram_pad_token_id",
}

_VENDOR_VISION_NAMES = {
    "vision_n_layers": "num_hidden_layers",
    "vision_dim": "hidden_size",
    "vision_n_heads": "num_attention_heads",
    "vision_inter_dim": "intermediate_size",
    "vision_patch_size": "patch_size",
    "vision_rope_theta": "rope_theta",
    "vision_downsample_ratio": "downsample_ratio",
    "vision_max_n_token": "max_image_tokens",
    "vision_min_pixels": "min_pixels",
    "vision_max_wh_ratio": "max_wh_ratio",
}

_VENDOR_YARN_NAMES = {
    "rope_factor": "factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_seq_len": "original_max_position_embeddings",
}

_TOP_LEVEL_DEFAULTS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def normalise(raw: Any) -> dict[str, Any]:
    """Bring either spelling to the released nesting: top level, ``text_config``, ``vision_config``.

    Raises:
      ConfigError: neither spelling is recognised, or ``model_type`` is another architecture.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError("config.json", raw, "a JSON object")
    if isinstance(raw.get("text_config"), Mapping):
        model_type = raw.get("model_type", "deepseek_v41")
        if model_type != "deepseek_v41":
            raise ConfigError("model_type", model_type, "deepseek_v41")
        return {**_TOP_LEVEL_DEFAULTS, **raw}
    if "n_layers" in raw and "dim" in raw:
        return _from_vendor(raw)
    raise ConfigError(
        "text_config", raw.get("text_config"), "the released nesting, or the vendor's flat inference keys"
    )


def _from_vendor(raw: Mapping[str, Any]) -> dict[str, Any]:
    consumed = {
        *_VENDOR_VISION_NAMES,
        *_VENDOR_YARN_NAMES,
        "dtype",
        "expert_dtype",
        *_TOP_LEVEL_DEFAULTS,
        "image_token_id",
    }
    text = {_VENDOR_TEXT_NAMES.get(key, key): value for key, value in raw.items() if key not in consumed}
    # The vendor's file leaves out the table length; only a lower bound of it is known there.
    text.setdefault("max_position_embeddings", 1 << 20)
    if raw.get("original_seq_len"):
        scaling = {name: raw[key] for key, name in _VENDOR_YARN_NAMES.items() if key in raw}
        text["rope_scaling"] = {"rope_type": "yarn", **scaling}
    released: dict[str, Any] = {
        **_TOP_LEVEL_DEFAULTS,
        **{key: raw[key] for key in (*_TOP_LEVEL_DEFAULTS, "image_token_id") if key in raw},
        "model_type": "deepseek_v41",
        "text_config": text,
    }
    if raw.get("vision_n_layers"):
        released["vision_config"] = {name: raw[key] for key, name in _VENDOR_VISION_NAMES.items() if key in raw}
    if raw.get("dtype") == "fp8" or raw.get("expert_dtype") == "fp4":
        released["quantization_config"] = {"quant_method": "fp8", "expert_dtype": raw.get("expert_dtype")}
    return released


@dataclasses.dataclass(frozen=True)
class Reader:
    """Typed access to one object of the configuration; errors name the full key path."""

    values: Mapping[str, Any]
    prefix: str

    def read(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        """The value of ``key`` as ``kind`` (int, float, or tuple of int); ``default`` when absent or null.

        Raises:
          ConfigError: the key is absent without a default, or has another type.
        """
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                self.refuse(key, "absent", f"{_describe(kind)}: this configuration names the feature that needs it")
            return default
        if kind is tuple:
            if not isinstance(value, list | tuple) or not all(_is_integer(item) for item in value):
                self.refuse(key, value, _describe(kind))
            return tuple(value)
        if kind is int and not _is_integer(value):
            self.refuse(key, value, _describe(kind))
        if kind is float and not ((_is_integer(value) or isinstance(value, float)) and math.isfinite(value)):
            self.refuse(key, value, _describe(kind))
        return kind(value)

    def section(self, key: str) -> Reader | None:
        """Access to the object under ``key``; None when it is absent, null or empty.

        Raises:
          ConfigError: the value is not an object.
        """
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            self.refuse(key, value, "an object, or null")
        return Reader(value, f"{self.prefix}{key}.")

    def fixed(self, key: str, accepted: tuple[Any, ...]) -> None:
        """Check a key that may be absent but, when present, has one of the ``accepted`` values."""
        value = self.values.get(key, accepted[0])
        if value not in accepted:
            self.refuse(key, value, " or ".join(repr(item) for item in accepted))

    def refuse(self, key: str, value: object, accepted: str) -> NoReturn:
        """Raise the :class:`ConfigError` of one key."""
        raise ConfigError(self.prefix + key, value, accepted)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _describe(kind: type) -> str:
    return {int: "an integer", float: "a finite number", tuple: "a list of integers"}[kind]
