"""Every refusal of a configuration is one ConfigError that names the key, the value and what is accepted."""

import json

import pytest

from deepinfer_jax.config import PRESETS, ModelConfig
from deepinfer_jax.errors import ConfigError
from tests.configurations import (
    CHANGES,
    DELETED,
    FIXED,
    assert_names,
    changed,
    flat,
    full_path,
    keys_of,
    raw_preset,
    refusal,
)


@pytest.mark.parametrize("path", FIXED)
def test_other_values_of_fixed_keys_are_refused(path):
    error = refusal(changed(path, FIXED[path]))
    assert_names(error, path, FIXED[path], "")
    right = raw_preset()
    for key in full_path(path).split("."):
        right = right.get(key, True)
    assert str(right) in error.accepted


OPTIONAL = {"gate_temp", "candidate_source_layer_id", "engram_layer_ids", "/quantization_config", "/image_token_id",
            "/vision_config.max_wh_ratio", "/bos_token_id", "/eos_token_id", "/pad_token_id"}  # fmt: skip


@pytest.mark.parametrize("path", [path for path in (*CHANGES, "num_hidden_layers") if path not in OPTIONAL])
@pytest.mark.parametrize("value", [DELETED, None], ids=["absent", "null"])
def test_a_missing_key_of_a_named_feature_is_refused(path, value):
    assert_names(refusal(changed(path, value)), path, "absent", "this configuration names the feature that needs it")


@pytest.mark.parametrize("path", [path for path in CHANGES if path != "/quantization_config"])
def test_values_of_another_type_are_refused(path):
    """Text, a boolean, a nested list and a number that is not finite; a fraction where an integer belongs."""
    kind = type(flat(ModelConfig.preset("v4.1-flash"))[CHANGES[path][1]])
    accepted = {int: "an integer", float: "a finite number", tuple: "a list of integers"}.get(kind, "a finite number")
    wrong = ["text", True, [[1]], float("nan"), float("inf")] + ([1.5] if kind is int else [])
    for value in wrong:
        error = refusal(changed(path, value))
        assert error.key == full_path(path)
        assert accepted in error.accepted


@pytest.mark.parametrize("path", ["rope_scaling", "/vision_config", "/quantization_config"])
@pytest.mark.parametrize("value", ["text", [], [1], 3, 0, True])
def test_features_of_another_type_are_refused(path, value):
    assert_names(refusal(changed(path, value)), path, value, "an object")


SIZES = [
    path
    for path, (_, field) in CHANGES.items()
    if isinstance(flat(ModelConfig.preset("v4.1-flash"))[field], int | float) and not field.endswith("_id")
    and path not in ("/quantization_config", "engram_max_ngram_size")
]  # fmt: skip


@pytest.mark.parametrize("path", [*SIZES, "engram_max_ngram_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_that_are_not_above_zero_are_refused(path, value):
    assert_names(refusal(changed(path, value)), path, value, "above 0")


IDS = [path for path, (_, field) in CHANGES.items() if field.endswith("token_id")]


@pytest.mark.parametrize("path", IDS)
@pytest.mark.parametrize("value", [-1, 129280])
def test_token_ids_outside_the_vocabulary_are_refused(path, value):
    assert_names(refusal(changed(path, value)), path, value, "an id below vocab_size 129280")


RATIOS = [0] * 2 + [2] * 18 + [1] * 20
SOURCES = "(2, 8, 14, 20, 24, 28, 32, 36)"

# Changed key, its value, a part of what is accepted; then, where the error is more precise, its own key and value.
REFUSALS = [
    ("compress_ratios", [*RATIOS[:5], 4, *RATIOS[6:]], "one of (0, 1, 2)", "compress_ratios[5]", 4),
    ("compress_ratios", [*RATIOS, 0, 2, 0], "0 for every draft stage", "compress_ratios", (0, 2, 0)),
    ("compress_ratios", RATIOS[:39], "40 entries, or 43 with the draft stages"),
    ("compress_ratios", [*RATIOS, 0], "40 entries, or 43 with the draft stages"),
    (
        "compress_ratios",
        [*RATIOS[:9], 1, *RATIOS[10:]],
        "the ratio 2 of its KV source layer 8",
        "compress_ratios[9]",
        1,
    ),
    ("compress_ratios", [0, *RATIOS[2:3], *RATIOS[2:]], "at or before layer 1,", "kv_source_layer_ids", (2, 8, 14, 20)),
    ("kv_source_layer_ids", [], "a source at or before layer 2, which has ratio 2"),
    ("kv_source_layer_ids", [8, 14, 20], "a source at or before layer 2, which has ratio 2"),
    ("kv_source_layer_ids", [2, 8, 14, 20, 22], f"each one also in index_source_layer_ids {SOURCES}", None, 22),
    ("kv_source_layer_ids", [8, 2, 14, 20], "strictly ascending"),
    ("index_source_layer_ids", [2, 8, 8, 14, 20], "strictly ascending"),
    ("index_source_layer_ids", [2, 8, 14, 20, 40], "a layer id whose compress_ratio is above 0", None, 40),
    ("kv_source_layer_ids", [-2, 8, 14, 20], "a layer id whose compress_ratio is above 0", None, -2),
    ("index_source_layer_ids", [1, 2, 8, 14, 20], "a layer id whose compress_ratio is above 0", None, 1),
    ("candidate_source_layer_id", 21, f"one of index_source_layer_ids {SOURCES}"),
    ("candidate_source_layer_id", 14, "the ratio of every later index source; layer 20 has 1, not 2"),
    ("o_groups", 7, "a divisor of num_attention_heads 64"),
    ("qk_rope_head_dim", 63, "an even number of at most 128"),
    ("qk_rope_head_dim", 130, "an even number of at most 128"),
    ("num_experts_per_tok", 385, "at most n_routed_experts 384"),
    ("engram_vocab_size", 1 << 24, "below 16777216, for hashing in uint32"),
    ("engram_num_embeddings", [5, 1 << 31], "row counts of 1 to 2^31 - 1, for row ids in int32", None, 1 << 31),
    ("engram_num_embeddings", [0, 5], "row counts of 1 to 2^31 - 1", None, 0),
    ("engram_num_embeddings", [384006168], "one row count per engram layer (1, 14)"),
    ("engram_max_ngram_size", 1, "2 or more"),
    ("engram_layer_ids", [1, 40], "layer ids below num_hidden_layers 40", None, 40),
    ("engram_layer_ids", [-1, 14], "layer ids below num_hidden_layers 40", None, -1),
    ("engram_layer_ids", [14, 14], "one or more distinct layer ids"),
    ("engram_compressed_vocab_size", 129281, "at most vocab_size 129280"),
    ("dspark_target_layer_ids", [38, 39, 40], "layer ids below num_hidden_layers 40", None, 40),
    ("dspark_target_layer_ids", [-1, 38, 39], "layer ids below num_hidden_layers 40", None, -1),
    ("dspark_target_layer_ids", [38, 38, 39], "one or more distinct layer ids"),
    ("dspark_target_layer_ids", [], "one or more distinct layer ids"),
    ("dspark_num_experts_per_tok", 129, "at most dspark_n_routed_experts 128"),
    ("num_nextn_predict_layers", -1, "0 or more"),
    ("/vision_config.hidden_size", 1056, "a multiple of 4 x heads, 64"),
    ("/vision_config.max_image_tokens", 3, "4 or more"),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: f"{case[0]} {case[2]}")
def test_contradictions_are_refused(case):
    path, value, accepted, error_path, error_value = (*case, None, None)[:5]
    expected = tuple(value) if isinstance(value, list) else value
    error = refusal(changed(path, value))
    assert_names(error, error_path or path, expected if error_value is None else error_value, accepted)


@pytest.mark.parametrize("content", ["[]", '"text"', "null", "3"])
def test_a_file_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        ModelConfig.from_directory(tmp_path)
    assert_names(refused.value, "/config.json", json.loads(content), "a JSON object")


def test_an_unknown_preset_is_refused():
    with pytest.raises(ConfigError) as refused:
        ModelConfig.preset("v4")
    assert_names(refused.value, "/preset", "v4", f"one of {', '.join(PRESETS)}")


@pytest.mark.parametrize("raw", [{}, {"text_config": None}, {"text_config": []}, {"dim": 64}, {"hidden_size": 64}])
def test_an_unknown_nesting_is_refused(raw):
    assert_names(refusal(raw), "/text_config", raw.get("text_config"), "the vendor's flat inference keys")


def test_a_directory_without_configuration_is_refused(tmp_path):
    with pytest.raises(ConfigError) as refused:
        ModelConfig.from_directory(tmp_path)
    assert_names(refused.value, "/config.json", str(tmp_path / "config.json"), "a checkpoint directory")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"{'a': 1}"])
def test_a_file_that_is_no_json_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        ModelConfig.from_directory(tmp_path)
    assert_names(refused.value, "/config.json", str(tmp_path / "config.json"), "valid JSON")


ANYTHING = ["text", None, [], [1.5], {}, True, -1, 0, float("nan"), 1 << 70, 3.7, [3], [-1, 500]]


@pytest.mark.parametrize("value", ANYTHING, ids=repr)
def test_no_value_of_any_key_raises_anything_else(value):
    """Whatever stands at one key, the file is read or refused with a ConfigError that names a key of the file."""
    raw = raw_preset("mini-40")
    paths = [*keys_of(raw), "text_config.rope_scaling", "text_config", "vision_config", "quantization_config"]
    for path in paths:
        assert refused_key(changed(f"/{path}", value, raw)) in (None, *paths)


def refused_key(raw):
    """The key, without an index, that makes a configuration be refused; None when it is accepted."""
    try:
        ModelConfig.from_dict(raw)
    except ConfigError as error:
        return error.key.split("[")[0]
    return None
