"""Reading checkpoints: both golden ones value by value, and copies with one damage each, which give one error each.

What a parameter must hold is put together here from the golden arrays as the independent reader of the tests sees them,
so that names, order of experts and order of joined matrices are compared and not assumed.
"""

import dataclasses
import functools
import json
import math
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.checkpoint.reader import coverage, load_model
from deepinfer_jax.checkpoint.safetensors import open_directory
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError, ConfigError
from deepinfer_jax.model.params import Stored, parameters
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import BF16, F32, Numerics
from tests.containers import Tensor, read_container, write_container
from tests.golden import DATA, tensors

PLAIN, QUANTISED = DATA / "tiny-a" / "bf16", DATA / "tiny-a" / "quant"
SHARD = "model-{:05d}-of-{:05d}.safetensors"
both_checkpoints = pytest.mark.parametrize("directory", [PLAIN, QUANTISED], ids=["plain", "quantised"])


@functools.cache
def stored_tensors(directory):
    """All tensors of a golden checkpoint; treat as read-only."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= read_container(file)
    return found


def write_checkpoint(target, stored, source=QUANTISED, shards=1):
    """A checkpoint directory with these tensors and the source's configuration and tokenizer."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(source / name, target / name)
    if shards == 1:
        write_container(target / "model.safetensors", stored)
        return target
    weight_map = {}
    for shard in range(shards):
        part = dict(list(stored.items())[shard::shards])
        file = SHARD.format(shard + 1, shards)
        write_container(target / file, part)
        weight_map |= dict.fromkeys(part, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return target


def plain(values, dtype="BF16"):
    """Float values as a stored tensor."""
    numpy_dtype = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16}[dtype]
    return Tensor(dtype, values.shape, values.astype(numpy_dtype).tobytes())


@functools.cache
def described():
    """Both golden checkpoints are of one configuration."""
    return Model.describe(ModelConfig.from_directory(QUANTISED))


@functools.cache
def golden_values():
    """Name -> float32 values: the plain checkpoint, of which the quantised one is another spelling."""
    return tensors("tiny-a/bf16/model.safetensors")


def expected(item):
    """The array of a parameter: pieces on top of each other, experts behind each other."""
    stacks = [np.concatenate([golden_values()[name] for name in pieces]) for pieces in item.released]
    return np.stack(stacks) if item.stacked else stacks[0]


def read_items(model):
    """Pairs of description and array, without the derived token map."""
    items = parameters(described())
    arrays = jax.tree.leaves(model, is_leaf=lambda leaf: hasattr(leaf, "scale_rows"))
    return [(item, array) for item, array in zip(items, arrays, strict=True) if item.stored is not Stored.DERIVED]


def assert_golden(model):
    for item, array in read_items(model):
        assert array.dtype == jnp.float32
        assert np.array_equal(np.asarray(array), expected(item)), item.released[0][0]


@both_checkpoints
def test_every_parameter_holds_its_tensors(directory):
    config, model = load_model(directory, F32)
    assert config == ModelConfig.from_directory(directory)
    assert_golden(model)


@both_checkpoints
def test_every_tensor_is_described_and_present(directory):
    found = coverage(described(), open_directory(directory))
    assert (found.missing, found.extra, found.tied, found.complete) == ((), (), (), True)
    assert found.described == found.present == len(stored_tensors(directory))


def test_experts_and_joined_matrices_keep_their_order():
    """By hand, for one layer and one draft stage: w1 above w3, expert after expert, w2 in the order of the experts."""
    _, model = load_model(QUANTISED, F32)
    values = golden_values()
    for prefix, layer, experts in (("layers.4", model.layers.layers[4], 8), ("mtp.1", model.draft.stages[1], 4)):
        width = layer.feed_forward.gate_up.shape[1] // 2
        assert layer.feed_forward.gate_up.shape[0] == layer.feed_forward.down.shape[0] == experts
        for expert in range(experts):
            name = f"{prefix}.ffn.experts.{expert}"
            np.testing.assert_array_equal(layer.feed_forward.gate_up[expert, :width], values[f"{name}.w1.weight"])
            np.testing.assert_array_equal(layer.feed_forward.gate_up[expert, width:], values[f"{name}.w3.weight"])
            np.testing.assert_array_equal(layer.feed_forward.down[expert], values[f"{name}.w2.weight"])
        shared = f"{prefix}.ffn.shared_experts"
        np.testing.assert_array_equal(layer.feed_forward.shared_gate_up[:width], values[f"{shared}.w1.weight"])
        np.testing.assert_array_equal(layer.feed_forward.shared_gate_up[width:], values[f"{shared}.w3.weight"])


def test_packed_weights_hold_the_stored_bytes():
    """Numerics released: data and scales of every quantised parameter, joined and stacked like values."""
    _, model = load_model(QUANTISED, Numerics.preset("released"))
    stored = stored_tensors(QUANTISED)
    packed = [(item, array) for item, array in read_items(model) if item.has_scale]
    assert len(packed) > 50
    for item, array in packed:
        for part, suffix in ((array.data, ".weight"), (array.scale, ".scale")):
            names = [[name.removesuffix(".weight") + suffix for name in pieces] for pieces in item.released]
            rows = [b"".join(stored[name].content for name in pieces) for pieces in names]
            assert np.asarray(part).tobytes() == b"".join(rows), names[0][0]
            assert part.dtype == jnp.uint8


def test_numerics_choose_the_dtype():
    """bf16 rounds nothing of this checkpoint, and what the release keeps in float32 stays float32."""
    _, model = load_model(QUANTISED, BF16)
    for item, array in read_items(model):
        assert array.dtype == (jnp.float32 if item.stored is Stored.F32 else jnp.bfloat16)
        assert np.array_equal(np.asarray(array).astype(np.float32), expected(item)), item.released[0][0]


def test_the_token_map_comes_from_the_tokenizer():
    config, model = load_model(PLAIN, F32)
    assert model.token_map.dtype == jnp.int32
    assert model.token_map.shape == (config.vocab_size,)
    assert int(model.token_map.max()) == config.engram.compressed_vocab_size - 1


def test_progress_names_every_parameter_as_it_is_read():
    names = []
    load_model(PLAIN, F32, progress=names.append)
    assert names == [item.released[0][0] for item in parameters(described()) if item.stored is not Stored.DERIVED]


@pytest.mark.parametrize("shards", [1, 3])
def test_names_may_have_the_model_prefix(tmp_path, shards):
    """As converted checkpoints write them, in one file and in shards."""
    prefixed = {f"model.{name}": tensor for name, tensor in stored_tensors(QUANTISED).items()}
    assert_golden(load_model(write_checkpoint(tmp_path, prefixed, shards=shards), F32)[1])


def test_shards_may_be_cut_anywhere(tmp_path):
    """Round robin over five files: every weight lies apart from its scale."""
    assert_golden(load_model(write_checkpoint(tmp_path, stored_tensors(QUANTISED), shards=5), F32)[1])


FP8_TILES, FP8_ROWS, FP4_ROWS = "layers.3.attn.wq_b", "layers.1.engram.embed", "layers.2.ffn.experts.5.w3"


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_plain_tensors_are_accepted_where_quantised_ones_are_described(tmp_path, dtype):
    """One of each format. Their scales are not needed, and those that are left over belong to nothing."""
    names = (FP8_TILES, FP8_ROWS, FP4_ROWS)
    plain_ones = {f"{name}.weight": plain(golden_values()[f"{name}.weight"], dtype) for name in names}
    directory = write_checkpoint(tmp_path, stored_tensors(QUANTISED) | plain_ones)
    assert set(coverage(described(), open_directory(directory)).extra) == {f"{name}.scale" for name in names}
    stored = stored_tensors(QUANTISED) | plain_ones
    for name in names:
        del stored[f"{name}.scale"]
    write_checkpoint(tmp_path, stored)
    found = coverage(described(), open_directory(directory))
    assert (found.extra, found.missing) == ((), ())
    assert found.described == found.present == len(stored)
    assert_golden(load_model(directory, F32)[1])


def test_extra_tensors_are_reported_and_refused(tmp_path):
    extra = {
        "layers.3.attn.compressor.wkv.weight": plain(np.ones((64, 64))),
        "layers.11.attn_norm.weight": plain(np.ones(64)),
        "rotary.inv_freq": plain(np.ones(8), "F32"),
    }
    directory = write_checkpoint(tmp_path, stored_tensors(QUANTISED) | extra)
    found = coverage(described(), open_directory(directory))
    assert set(found.extra) == extra.keys()
    assert (found.missing, found.tied, found.complete) == ((), (), True)
    assert found.present == found.described + 3
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path}")) as refused:
        load_model(directory, F32)
    assert refused.value.key in extra
    assert "config.json describes" in refused.value.accepted


def test_tied_copies_in_draft_stages_are_dropped(tmp_path):
    """Some exporters repeat the backbone's tables there; the Markov tables of the last stage end alike and stay."""
    table = plain(np.full((512, 64), 7.0))
    tied = {f"mtp.{stage}.{part}.weight": table for stage in (0, 1) for part in ("embed", "head")}
    directory = write_checkpoint(tmp_path, stored_tensors(QUANTISED) | tied)
    found = coverage(described(), open_directory(directory))
    assert set(found.tied) == tied.keys()
    assert (found.missing, found.extra) == ((), ())
    assert_golden(load_model(directory, F32)[1])


def transposed(tensor):
    return dataclasses.replace(tensor, shape=tensor.shape[::-1])


def as_dtype(dtype):
    return lambda tensor: dataclasses.replace(tensor, dtype=dtype)


def zeros(dtype, *shape):
    item_bytes = 2 if dtype == "BF16" else 1
    return lambda tensor: Tensor(dtype, shape, bytes(math.prod(shape) * item_bytes))


# Damage -> the tensor, what becomes of it (None: it goes missing), and what the error must show of it.
DAMAGES = {
    "missing plain tensor": ("norm.weight", None, "missing"),
    "missing float32 tensor": ("layers.5.ffn.gate.bias_vl", None, "missing"),
    "missing quantised tensor": (f"{FP8_TILES}.weight", None, "missing"),
    "missing expert": ("mtp.0.ffn.experts.3.w2.weight", None, "missing"),
    "missing scale of tiles": (f"{FP8_TILES}.scale", None, "missing"),
    "missing scale of an expert": (f"{FP4_ROWS}.scale", None, "missing"),
    "transposed plain tensor": ("layers.2.attn.indexer.wk.weight", transposed, "(64, 32)"),
    "transposed quantised tensor": (f"{FP8_TILES}.weight", transposed, "(64, 512)"),
    "norm of another width": ("norm.weight", zeros("BF16", 63), "(63,)"),
    "expert stored unpacked": (f"{FP4_ROWS}.weight", zeros("I8", 32, 64), "(32, 64)"),
    "scale per row where tiles have one": (f"{FP8_TILES}.scale", zeros("F8_E8M0", 512, 2), "(512, 2)"),
    "scale of an expert per tile": (f"{FP4_ROWS}.scale", zeros("F8_E8M0", 1, 2), "(1, 2)"),
    "scale in bfloat16": (f"{FP8_TILES}.scale", zeros("BF16", 16, 2), "BF16"),
    "half precision where bfloat16 is described": ("head.weight", as_dtype("F16"), "F16"),
    "bytes where a plain tensor is described": ("norm.weight", zeros("F8_E4M3", 64), "F8_E4M3"),
    "integers where fp8 is described": (f"{FP8_TILES}.weight", as_dtype("I8"), "I8"),
    "fp8 where packed fp4 is described": (f"{FP4_ROWS}.weight", zeros("F8_E4M3", 32, 64), "F8_E4M3"),
}


@pytest.mark.parametrize(("name", "change", "found"), DAMAGES.values(), ids=DAMAGES)
def test_every_damage_has_its_one_error(tmp_path, name, change, found):
    """It names the tensor, what was found, what was expected, and the file, or the directory that lacks the tensor."""
    stored = dict(stored_tensors(QUANTISED))
    tensor = stored.pop(name)
    if change is not None:
        stored[name] = change(tensor)
    directory = write_checkpoint(tmp_path, stored)
    with pytest.raises(CheckpointError) as refused:
        load_model(directory, F32)
    assert refused.value.key == name
    assert found in str(refused.value.value)
    assert str(tmp_path) in str(refused.value)
    assert re.search(r"accepted: .{5}", str(refused.value))
    assert coverage(described(), open_directory(directory)).missing == ((name,) if change is None else ())


def test_packed_weights_need_quantised_tensors():
    """Numerics released cannot keep packed what is stored plain."""
    with pytest.raises(CheckpointError, match="BF16.*accepted: F8_E4M3"):
        load_model(PLAIN, Numerics.preset("released"))


def test_a_directory_without_configuration_is_refused(tmp_path):
    shutil.copy(PLAIN / "model.safetensors", tmp_path)
    with pytest.raises(ConfigError, match=re.escape("config.json")):
        load_model(tmp_path, F32)


def test_a_directory_without_tensors_is_refused(tmp_path):
    shutil.copy(PLAIN / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_model(tmp_path, F32)
