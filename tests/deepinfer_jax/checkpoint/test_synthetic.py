"""Synthetic checkpoints: the released layout as others read it, the same values for the same seed, never half done."""

import json
import shutil
from importlib import resources
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

from deepinfer_jax.checkpoint import synthetic
from deepinfer_jax.checkpoint.digest import weights_id
from deepinfer_jax.checkpoint.reader import coverage, load_model, open_storage
from deepinfer_jax.checkpoint.synthetic import synthesize
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError, ConfigError, InputError
from deepinfer_jax.model.params import Stored, parameters
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import BF16, F32, RELEASED
from tests.containers import read_container
from tests.golden import tensors
from tests.large_checkpoint import small_document

# Weights id of the small document with seed 0.
SMALL_ID = "05e8b0d1e811cdbc5bc3cb6937d5de608953ab7f9dc84db6805fb23a67b2c69e"
DTYPES = {
    Stored.BF16: "BF16",
    Stored.F32: "F32",
    Stored.FP8_BLOCKS: "F8_E4M3",
    Stored.FP8_ROWS: "F8_E4M3",
    Stored.FP4_ROWS: "I8",
}


def stored(directory):
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= read_container(file)
    return found


@pytest.mark.parametrize("quantised", [True, False], ids=["quantised", "bf16"])
def test_every_tensor_has_its_released_form(quantised, tmp_path):
    """Read by the reference implementation of the container, not by ours."""
    synthesize(small_document(), tmp_path / "m", quantised=quantised, shards=3)
    config = ModelConfig.from_directory(tmp_path / "m")
    assert config.quantised == quantised
    expected = {}
    for item in parameters(Model.describe(config)):
        for name in (piece for pieces in item.released for piece in pieces):
            shape = item.piece_shape
            packed = quantised and item.has_scale
            dtype = DTYPES[item.stored] if packed or item.stored is Stored.F32 else "BF16"
            expected[name] = (dtype, [*(item.data_shape(shape) if packed else shape)])
            if packed:
                expected[f"{name.removesuffix('.weight')}.scale"] = ("F8_E8M0", [*item.scale_shape(shape)])
    found = {}
    for file in (tmp_path / "m").glob("*.safetensors"):
        with safetensors.safe_open(file, framework="np") as reader:
            assert reader.metadata() == {"format": "pt"}
            for name in reader.keys():  # noqa: SIM118 -- the reader is no mapping
                part = reader.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
    assert found == expected


def test_the_index_lists_every_shard(released):
    index = json.loads((released / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in released.glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert index["weight_map"] == {name: file for file in files for name in read_container(released / file)}
    assert index["metadata"]["total_size"] == sum(len(tensor.content) for tensor in stored(released).values())
    sizes = [(released / file).stat().st_size for file in files]
    assert max(sizes) < 2 * min(sizes)


def test_tensors_are_aligned(released):
    """Elements of four and two bytes lie where processors want them."""
    for file in released.glob("*.safetensors"):
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        assert size % 8 == 0
        header = json.loads(content[8 : 8 + size])
        del header["__metadata__"]
        for entry in header.values():
            assert entry["data_offsets"][0] % {"F32": 4, "BF16": 2}.get(entry["dtype"], 1) == 0


def test_it_is_complete_and_has_a_verified_id(released):
    config = ModelConfig.from_directory(released)
    found = coverage(Model.describe(config), open_storage(released))
    assert (found.missing, found.extra, found.tied) == ((), (), ())
    assert found.described == found.present > 300
    assert open_storage(released).verify() == weights_id(released)


def test_values_depend_on_seed_and_name_alone(released, tmp_path):
    again = synthesize(small_document(), tmp_path / "again", shards=1)
    assert again == weights_id(released)
    other = synthesize(small_document(), tmp_path / "other", seed=1)
    assert other != again
    longer = small_document()
    longer["text_config"] |= {"num_hidden_layers": 7, "compress_ratios": [0, 2, 2, 1, 1, 1, 1]}
    synthesize(longer, tmp_path / "longer")
    one, two, three = (stored(tmp_path / name) for name in ("again", "other", "longer"))
    assert one.items() <= three.items()
    same = [name for name in one if one[name].content == two[name].content]
    # A scale of few tiles may well be the same.
    assert not [name for name in same if not name.endswith(".scale")]
    contents = [tensor.content for name, tensor in one.items() if not name.endswith((".scale", "_scale"))]
    assert len(set(contents)) == len(contents)


def test_the_weights_do_not_depend_on_the_version_of_jax(released):
    """Drawn by NumPy and shaped by exact operations; this id was computed with JAX 0.10 and 0.12."""
    assert weights_id(released).value == SMALL_ID


def test_both_forms_hold_the_same_values_up_to_rounding(released, tmp_path):
    synthesize(small_document(), tmp_path / "plain", quantised=False)
    exact, rounded = (load_model(at, F32)[1] for at in (tmp_path / "plain", released))
    config = ModelConfig.from_directory(released)
    items = parameters(Model.describe(config))
    for item, one, other in zip(items, arrays(exact), arrays(rounded), strict=True):
        tolerance = {Stored.FP4_ROWS: 0.2, Stored.FP8_BLOCKS: 0.065, Stored.FP8_ROWS: 0.065}.get(item.stored, 0)
        error = np.abs(np.asarray(one) - np.asarray(other)).max() / np.abs(np.asarray(one)).max()
        assert error <= tolerance, item.released
        assert (error > 0) == (tolerance > 0), item.released


def arrays(model):
    return jax.tree.leaves(model)


def test_values_have_the_size_of_their_rule(released):
    values = tensors(released / "model-00001-of-00002.safetensors")
    assert abs(values["embed.weight"].std() - 1) < 0.02
    model = load_model(released, F32)[1]
    assert abs(float(model.head.std()) - 64**-0.5) < 0.003
    assert abs(float(model.layers.layers[2].feed_forward.gate_up.std()) - 64**-0.5) < 0.01
    assert abs(float(model.norm.mean()) - 1) < 0.05
    assert np.asarray(model.layers.layers[2].attention_mix.base)[:4].argmax() == 0


def test_large_weights_are_drawn_in_parts(tmp_path, monkeypatch):
    """The rows of a weight do not depend on how many are drawn at once."""
    one = synthesize(small_document(), tmp_path / "one")
    monkeypatch.setattr(synthetic, "_DRAWN_ELEMENTS", 3000)
    assert synthesize(small_document(), tmp_path / "two") == one


@pytest.mark.parametrize("preset", ["peer-50m", "mini-40"])
def test_presets_load(preset, tmp_path):
    text = resources.files("deepinfer_jax").joinpath("presets", f"{preset}.json").read_text(encoding="utf-8")
    synthesize(json.loads(text), tmp_path / "m")
    config, model = load_model(tmp_path / "m", RELEASED)
    assert config.quantised
    written = json.loads((tmp_path / "m" / "config.json").read_text())
    assert written["text_config"] == json.loads(text)["text_config"]
    if config.engram is not None:
        assert int(model.token_map.max()) + 1 == config.engram.compressed_vocab_size == 420


def test_the_configuration_takes_the_number_of_classes_from_the_tokenizer(tmp_path):
    document = small_document()
    document["text_config"]["engram_compressed_vocab_size"] = 64
    synthesize(document, tmp_path / "m")
    config, model = load_model(tmp_path / "m", BF16)
    assert config.engram.compressed_vocab_size == int(model.token_map.max()) + 1 > 200


def test_a_vendor_configuration_is_written_in_the_released_spelling(tmp_path):
    """The flat keys of the vendor's inference code."""
    names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
             "moe_intermediate_size": "moe_inter_dim", "num_experts_per_tok": "n_activated_experts",
             "routed_scaling_factor": "route_scale", "qk_rope_head_dim": "rope_head_dim", "rms_norm_eps": "norm_eps",
             "sliding_window": "window_size", "kv_source_layer_ids": "kv_source_layers",
             "index_source_layer_ids": "index_source_layers", "candidate_source_layer_id": "candidate_source_layer",
             "num_nextn_predict_layers": "n_mtp_layers", "engram_pad_token_id": "engram_pad_id",
             "dspark_num_experts_per_tok": "dspark_n_activated_experts"}  # fmt: skip
    text = small_document()["text_config"]
    synthesize({names.get(key, key): value for key, value in text.items()}, tmp_path / "m")
    written = json.loads((tmp_path / "m" / "config.json").read_text())
    assert written["text_config"]["hidden_size"] == 64
    assert load_model(tmp_path / "m", F32)[0].draft.num_experts_per_tok == 2


def test_an_interrupted_checkpoint_is_none(tmp_path, monkeypatch):
    written = []
    write = synthetic._write_unit

    def fail(shard, unit, seed):
        written.append(unit)
        if len(written) > 300:
            raise KeyboardInterrupt
        write(shard, unit, seed)

    target = tmp_path / "m"
    with monkeypatch.context() as patch:
        patch.setattr(synthetic, "_write_unit", fail)
        with pytest.raises(KeyboardInterrupt):
            synthesize(small_document(), target, shards=4)
    names = {path.name for path in target.iterdir()}
    assert "model-00001-of-00004.safetensors" in names
    assert not {"model.safetensors.index.json", "digest.json"} & names
    assert not [name for name in names if "partial" in name]
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_model(target, F32)
    with pytest.raises(InputError, match="overwrite"):
        synthesize(small_document(), target)
    synthesize(small_document(), target, overwrite=True, shards=1)
    assert load_model(target, F32)[0].vocab_size == 320


def test_overwriting_leaves_nothing_of_the_old_one(released, copy):
    directory = copy(released)
    (directory / ".model-00002-of-00002.safetensors.partial").write_text("x")
    with pytest.raises(InputError, match="not empty"):
        synthesize(small_document(), directory)
    synthesize(small_document(), directory, seed=3, shards=3, overwrite=True)
    assert sorted(path.name for path in directory.glob("*.safetensors")) == [
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    ]
    assert not list(directory.glob(".*"))
    assert open_storage(directory).verify() == weights_id(directory)


def test_something_else_is_not_overwritten(converted, copy, tmp_path):
    directory = copy(converted)
    with pytest.raises(InputError, match=r"arrays\.json"):
        synthesize(small_document(), directory, overwrite=True)
    assert load_model(directory, F32)[0].vocab_size == 320
    single = tmp_path / "single"
    single.mkdir()
    (single / "model.safetensors").write_text("mine")
    with pytest.raises(InputError, match=r"model\.safetensors"):
        synthesize(small_document(), single, overwrite=True)


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match="1,000 bytes free"):
        synthesize(small_document(), tmp_path / "m")
    assert not (tmp_path / "m").exists() or not list((tmp_path / "m").iterdir())


def test_widths_that_cannot_be_quantised_are_refused(tmp_path):
    document = small_document()
    document["text_config"]["q_lora_rank"] = 48
    with pytest.raises(InputError, match="a multiple of 32 columns.*store it in bf16") as refused:
        synthesize(document, tmp_path / "m")
    assert refused.value.key == "layers.0.attn.wq_b.weight"
    assert not (tmp_path / "m").exists()
    synthesize(document, tmp_path / "m", quantised=False)
    assert load_model(tmp_path / "m", F32)[1].layers.layers[0].attention.query_down.shape == (48, 64)


def test_wrong_configurations_are_refused(tmp_path):
    document = small_document()
    document["text_config"]["engram_num_embeddings"] = [100]
    with pytest.raises(ConfigError, match="sums of hash moduli"):
        synthesize(document, tmp_path / "m")
    with pytest.raises(ConfigError, match="text_config"):
        synthesize({"model_type": "deepseek_v41"}, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_plain_values_are_rounded_once(tmp_path):
    """From float32 to bfloat16, and not by way of another format."""
    synthesize(small_document(), tmp_path / "m", quantised=False)
    head = load_model(tmp_path / "m", BF16)[1].head
    assert head.dtype == jnp.bfloat16
    noise = synthetic._generator(0, "head.weight").standard_normal((320, 64), np.float32)
    np.testing.assert_array_equal(head, jnp.asarray(noise * np.float32(64**-0.5)).astype(jnp.bfloat16))
