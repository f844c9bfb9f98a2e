"""Conversion: what is restored is what was stored, in whole and in part, and nothing unfinished or damaged passes."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from deepinfer_jax.checkpoint import convert as conversion
from deepinfer_jax.checkpoint import converted as layout
from deepinfer_jax.checkpoint.convert import convert, lossless_numerics
from deepinfer_jax.checkpoint.converted import ConvertedStorage, read_manifest
from deepinfer_jax.checkpoint.digest import read_digests, weights_id
from deepinfer_jax.checkpoint.reader import coverage, load_model, open_storage
from deepinfer_jax.checkpoint.safetensors import open_directory
from deepinfer_jax.checkpoint.subset import encoder_only, everything, text_only, vision_only
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError, InputError
from deepinfer_jax.model.params import Parameter, Stored, parameters
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import BF16, F32, RELEASED, Numerics
from tests.containers import flip_bit, place_of
from tests.golden import DATA

TINY = DATA / "tiny-a"
REPOSITORY = DATA.parent.parent


def arrays(model):
    return jax.tree.leaves(model)


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(arrays(one), arrays(other), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def test_restored_logits_equal_those_of_the_direct_read(released, converted, logits):
    """Synthesize, read, convert, restore: bit for bit, expanded from the packed form (packed: test_streaming)."""
    config, direct = load_model(released, F32)
    same_config, restored = load_model(converted, F32)
    assert config == same_config
    assert_same(direct, restored)
    expected = logits(direct, config, "f32")
    assert np.isfinite(expected).all()
    assert expected.std() > 0.1
    np.testing.assert_array_equal(logits(restored, config, "f32"), expected)


@pytest.mark.parametrize(
    ("form", "stored", "read"),
    [("quant", None, "released"), ("bf16", None, "f32"), ("quant", "bf16", "f32")],
)
def test_golden_checkpoints_survive(form, stored, read, tmp_path):
    """Draft head, vision tower and token map included. Expanding to bfloat16 loses nothing either."""
    convert(TINY / form, tmp_path / "out", None if stored is None else Numerics.preset(stored))
    assert_same(*(load_model(at, Numerics.preset(read))[1] for at in (TINY / form, tmp_path / "out")))


def test_the_form_is_the_most_compact_one_that_loses_nothing(released, converted, tmp_path):
    assert read_manifest(converted).numerics == "released"
    convert(TINY / "bf16", tmp_path / "plain")
    assert read_manifest(tmp_path / "plain").numerics == "bf16"
    files = open_directory(released)
    described = Model.describe(ModelConfig.from_directory(released))
    assert lossless_numerics(described, files) == RELEASED
    for rows, expected in ((64, RELEASED), (96, BF16)):
        joined = Parameter((rows, 64), (None, None), Stored.FP8_BLOCKS, (("a.weight", "b.weight"),))
        assert lossless_numerics(dataclasses.replace(described, head=joined), files) == expected
    wide = dataclasses.replace(files, entries=dict(files.entries))
    wide.entries["norm.weight"] = dataclasses.replace(files.entries["norm.weight"], dtype="F32")
    assert lossless_numerics(described, wide) == F32


def test_expanded_weights_cannot_be_packed_again(released, tmp_path):
    convert(released, tmp_path / "out", BF16)
    with pytest.raises(CheckpointError, match="where weights stay packed.*numerics f32 or bf16"):
        load_model(tmp_path / "out", RELEASED)


def test_a_converted_checkpoint_is_complete_in_itself(released, converted, tmp_path):
    """The identity is the source's, with or without a sidecar there; companions are copied and nothing else is left."""
    assert weights_id(converted) == weights_id(released)
    assert read_digests(converted) == read_digests(released)
    assert {path.name for path in converted.iterdir()} == {
        "arrays", "arrays.json", "config.json", "digest.json", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    bare = shutil.copytree(released, tmp_path / "bare")
    (bare / "digest.json").unlink()
    convert(bare, tmp_path / "out")
    assert weights_id(tmp_path / "out") == weights_id(released)
    assert not (bare / "digest.json").exists()


def test_coverage_of_a_converted_checkpoint(released, converted):
    described = Model.describe(ModelConfig.from_directory(converted))
    assert coverage(described, open_storage(converted)) == coverage(described, open_storage(released))


def test_bundles_are_plain_orbax_checkpoints(converted):
    """Anyone can restore one, by the manifest."""
    array = read_manifest(converted).arrays["norm.weight"][layout.Plane.VALUES]
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(converted / "arrays" / array.parts[0].bundle)
    np.testing.assert_array_equal(tree[array.parts[0].key], load_model(converted, BF16)[1].norm)


@pytest.fixture
def small_bundles(monkeypatch):
    """Bundles of 15,000 bytes, so that every array of some size has several parts."""
    monkeypatch.setattr(conversion, "BUNDLE_BYTES", 15_000)


def test_arrays_in_many_parts(released, tmp_path, small_bundles):
    convert(released, tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    assert len(manifest.arrays["embed.weight"][layout.Plane.VALUES].parts) == 4
    assert len(manifest.arrays["layers.0.ffn.experts.0.w1.weight"][layout.Plane.DATA].parts) == 2
    for numerics in (F32, RELEASED):
        assert_same(load_model(released, numerics)[1], load_model(tmp_path / "out", numerics)[1])


class InterruptionError(Exception):
    pass


def interrupted(monkeypatch, bundles):
    """Fail while the bundle after this many is being noted: it is written, but does not count."""
    write_json, written = conversion.write_json, []

    def write(path, document):
        if path.parent.name == "conversion" and path.name != "plan.json":
            written.append(path)
            if len(written) > bundles:
                raise InterruptionError
        write_json(path, document)

    monkeypatch.setattr(conversion, "write_json", write)


def test_an_interrupted_conversion_goes_on_behind_the_last_note(released, tmp_path, monkeypatch):
    """Of a source without a sidecar, so that the digests of its first half come from the notes."""
    source, target = shutil.copytree(released, tmp_path / "bare"), tmp_path / "out"
    (source / "digest.json").unlink()
    monkeypatch.setattr(conversion, "BUNDLE_BYTES", 40_000)
    with monkeypatch.context() as patch:
        interrupted(patch, 15)
        with pytest.raises(InterruptionError):
            convert(source, target)
    with pytest.raises(CheckpointError, match="an unfinished conversion"):
        load_model(target, F32)
    finished = [path.stem for path in (target / "conversion").glob("*-*.json")]
    bundles = {path.name: path.stat().st_ino for path in (target / "arrays").iterdir()}
    assert len(finished) == 15
    assert len(bundles) == 16
    (target / "arrays" / "layers.9-99999.orbax-checkpoint-tmp").mkdir()
    saved = []
    save = conversion.save_bundle
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "save_bundle", lambda *one: (saved.append(one[1]), save(*one))[1])
        convert(source, target)
    assert len(saved) > 10
    assert not {*finished} & {*saved}
    assert all((target / "arrays" / name).stat().st_ino == bundles[name] for name in finished)
    assert {path.name for path in (target / "arrays").iterdir()} == {*finished, *saved}
    assert_same(load_model(released, RELEASED)[1], load_model(target, RELEASED)[1])
    assert read_digests(target) == read_digests(released)


def test_a_conversion_can_be_repeated(released, tmp_path):
    target = tmp_path / "out"
    convert(released, target)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    convert(released, target)
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == before


def test_a_bundle_that_differs_when_read_back_is_written_again(released, tmp_path, monkeypatch):
    """The last check finds it, names it, and forgets its note, so that the next call repairs it."""
    target = tmp_path / "out"
    save = conversion.save_bundle

    def damage(directory, bundle, tree):
        if "norm.weight.values.0" in tree:
            tree = dict(tree) | {"norm.weight.values.0": tree["norm.weight.values.0"] + 1}
        save(directory, bundle, tree)

    original = load_model(released, BF16)[1].norm
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "save_bundle", damage)
        with pytest.raises(CheckpointError, match="SHA-256") as refused:
            convert(released, target)
    assert refused.value.key == "norm.weight.values.0"
    expected = hashlib.sha256(np.asarray(original).tobytes()).hexdigest()
    assert expected in refused.value.accepted
    assert str(target) in str(refused.value)
    assert not (target / "arrays.json").exists()
    convert(released, target)
    np.testing.assert_array_equal(load_model(target, BF16)[1].norm, original)


def test_a_damaged_source_is_found_on_the_way(copy, released, tmp_path):
    directory = copy(released)
    file, first, _ = place_of(directory, "layers.3.ffn.experts.5.w2.weight")
    flip_bit(file, first + 9)
    with pytest.raises(CheckpointError, match="digest.json") as refused:
        convert(directory, tmp_path / "out")
    assert refused.value.key == "layers.3.ffn.experts.5.w2.weight"


def test_other_targets_are_refused(released, converted, copy, tmp_path):
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        convert(released, occupied)
    assert [path.name for path in occupied.iterdir()] == ["notes.txt"]
    with pytest.raises(InputError, match="to other numerics"):
        convert(released, converted, BF16)
    with pytest.raises(InputError, match="another checkpoint"):
        convert(TINY / "quant", converted, RELEASED)


def test_an_unfinished_conversion_is_only_continued_as_it_began(released, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupted(patch, 2)
        with pytest.raises(InterruptionError):
            convert(released, tmp_path / "out")
    with pytest.raises(InputError, match="unfinished conversion of another checkpoint, or to other numerics"):
        convert(released, tmp_path / "out", F32)
    with pytest.raises(InputError, match="unfinished conversion of another checkpoint"):
        convert(TINY / "quant", tmp_path / "out", RELEASED)


def change_manifest(directory, change):
    file = directory / "arrays.json"
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def drop(name):
    return lambda document: document["arrays"].pop(name)


def misshape(document):
    array = document["arrays"]["norm.weight"]["values"]
    array["shape"] = array["parts"][0]["bounds"][0][1:] = [60]
    array["parts"][0]["bounds"] = [[0, 60]]


def other_digest(document):
    bundle = document["arrays"]["norm.weight"]["values"]["parts"][0]["bundle"]
    document["bundles"][bundle]["_METADATA"] = "0" * 64


def outside(document):
    document["bundles"]["../arrays"] = {}


def other_bounds(document):
    document["arrays"]["norm.weight"]["values"]["parts"][0]["bounds"] = [[1, 65]]


def half_packed(document):
    del document["arrays"]["layers.4.attn.wq_b.weight"]["scale"]


MANIFESTS = {
    "missing": (drop("head.weight"), "head.weight", "missing"),
    "misshapen": (misshape, "norm.weight", "accepted: shape (64,)"),
    "extra": (
        lambda document: document["arrays"].update(x=document["arrays"]["norm.weight"]), "x", "config.json describes"
    ),
    "digest": (other_digest, "norm.weight.values.0", "_METADATA, by arrays.json"),
    "bundle": (lambda document: document["bundles"].clear(), None, "a manifest of converted arrays"),
    "bounds": (other_bounds, None, "a manifest of converted arrays"),
    "outside": (outside, None, "a manifest of converted arrays"),
    "half packed": (half_packed, "layers.4.attn.wq_b.weight", "values, or data and scale"),
    "version": (lambda document: document.update(version=9), None, "'version': 1"),
    "parts": (
        lambda document: document["arrays"]["norm.weight"]["values"]["parts"].clear(), None, "a manifest of converted"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "key", "sentence"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_damaged_manifest_is_one_error(change, key, sentence, converted, copy):
    directory = copy(converted)
    change_manifest(directory, change)
    with pytest.raises(CheckpointError) as refused:
        load_model(directory, RELEASED)
    assert refused.value.key == (key or str(directory / "arrays.json"))
    assert sentence in str(refused.value)
    assert str(directory) in str(refused.value)


def test_a_missing_bundle_is_one_error(converted, copy):
    directory = copy(converted)
    bundle = read_manifest(directory).arrays["norm.weight"][layout.Plane.VALUES].parts[0].bundle
    shutil.rmtree(directory / "arrays" / bundle)
    with pytest.raises(CheckpointError, match="'missing'.*" + bundle) as refused:
        load_model(directory, F32)
    assert refused.value.key == "norm.weight.values.0"


def test_every_bit_of_every_file_of_a_bundle_is_checked(converted, copy):
    """By the digests of its files: the error names one of its arrays, and the file."""
    directory = copy(converted)
    bundle = read_manifest(directory).arrays["layers.4.attn.wq_b.weight"][layout.Plane.DATA].parts[0].bundle
    rng = np.random.default_rng(0)
    files = [path for path in (directory / "arrays" / bundle).rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        offset = int(rng.integers(path.stat().st_size))
        flip_bit(path, offset)
        with pytest.raises(CheckpointError, match="convert the checkpoint again") as refused:
            ConvertedStorage.open(directory).verify()
        assert refused.value.key.startswith("layers.4.")
        assert str(path) in str(refused.value)
        flip_bit(path, offset)
    flip_bit(files[0], 0)
    with pytest.raises(CheckpointError, match=re.escape(str(files[0]))):
        load_model(directory, RELEASED)
    flip_bit(files[0], 0)
    assert ConvertedStorage.open(directory).verify() == weights_id(converted)


def test_a_lost_sidecar_is_one_error(converted, copy):
    directory = copy(converted)
    (directory / "digest.json").unlink()
    with pytest.raises(CheckpointError, match="the digest sidecar that conversion writes"):
        ConvertedStorage.open(directory).verify()


ENCODER_LAYERS = 3
ENCODER_ONLY = {
    "embed.weight",
    *(f"layers.1.engram.{name}" for name in ("embed.weight", "wkv.weight", "q_weight", "k_weight")),
    *(f"layers.3.attn.compressor.{name}.weight" for name in ("wkv", "norm")),
    *(f"layers.3.attn.indexer.{name}.weight" for name in ("wk", "k_norm")),
    "layers.3.attn_norm.weight",
}


def test_the_encoder_only_subset_is_what_the_design_lists(released):
    config = ModelConfig.from_directory(released)
    items = [item for item in parameters(Model.describe(config)) if item.released]
    chosen = {item.released[0][0] for item in items if encoder_only(item, config)}
    layers = {
        item.released[0][0] for item in items if item.released[0][0].startswith(("layers.0.", "layers.1.", "layers.2."))
    }
    assert config.encoder_layers == ENCODER_LAYERS
    assert chosen == ENCODER_ONLY | layers


@pytest.mark.parametrize("numerics", [F32, RELEASED], ids=["f32", "released"])
def test_a_part_is_restored_without_the_rest(numerics, released, converted, copy):
    """The bundles of the other layers are gone, and nobody misses them."""
    whole = load_model(released, numerics)[1]
    directory = copy(converted)
    for path in (directory / "arrays").iterdir():
        if path.name.startswith(("layers.4", "layers.5", "head", "norm", "mtp")):
            shutil.rmtree(path)
    config, part = load_model(directory, numerics, subset=encoder_only)
    assert part.head is part.norm is None
    assert part.draft.markov_head is None
    assert part.layers.layers[5].feed_forward.gate_up is None
    assert part.layers.layers[3].attention.query_down is None
    np.testing.assert_array_equal(part.token_map, whole.token_map)
    kept = dict(jax.tree.leaves_with_path(part))
    complete = dict(jax.tree.leaves_with_path(whole))
    assert 50 < len(kept) < len(complete)
    for path, array in kept.items():
        np.testing.assert_array_equal(array, complete[path])
    assert_same(part, load_model(released, numerics, subset=encoder_only)[1])
    assert config.encoder_layers == ENCODER_LAYERS


def test_vision_and_text_divide_a_model():
    config = ModelConfig.from_directory(TINY / "quant")
    for item in parameters(Model.describe(config)):
        assert everything(item, config)
        assert vision_only(item, config) != text_only(item, config)
    _, tower = load_model(TINY / "quant", F32, subset=vision_only)
    assert tower.embedding is None
    assert_same(tower.vision, load_model(TINY / "quant", F32)[1].vision)
    assert jax.tree.leaves(load_model(TINY / "quant", F32, subset=text_only)[1].vision) == []


EIGHT_DEVICES = """
import json, sys
import jax, numpy as np
from pathlib import Path
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from deepinfer_jax.checkpoint.reader import load_model
from deepinfer_jax.commands.logits import sequence_logits
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.params import abstract, map_parameters
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import F32, RELEASED
from deepinfer_jax.parallel.layouts import expert_and_data_parallel, padded

released, converted = map(Path, sys.argv[1:3])
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
layout = expert_and_data_parallel(8)
config = ModelConfig.from_directory(released)
described = Model.describe(config)
tall = padded(described, layout)
by_function = lambda item: NamedSharding(mesh, layout.spec(item.axes))
differences = {}
for numerics in (F32, RELEASED):
    whole = load_model(released, numerics)[1]
    by_tree = jax.tree.map(
        lambda item, array: jax.tree.map(lambda _: by_function(item), array),
        described, abstract(tall, numerics), is_leaf=lambda leaf: hasattr(leaf, "released"),
    )
    for name, directory, shardings in (("direct", released, by_function), ("restored", converted, by_tree)):
        model = load_model(directory, numerics, shardings, padded=tall)[1]
        spread = model.layers.layers[0].feed_forward.gate_up
        spread = spread.data if numerics is RELEASED else spread
        assert len(spread.addressable_shards) == 8
        assert {shard.data.shape[0] for shard in spread.addressable_shards} == {1}
        for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(model), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other)[: one.shape[0]])
            assert not np.asarray(other)[one.shape[0] :].any()
        assert (model.engrams[0].table.shape[0], whole.engrams[0].table.shape[0]) == (256, 252)
        if numerics is F32:
            expected, got = (
                sequence_logits(one, tuple(range(3, 40)), config, F32, with_taps=False)["logits"]
                for one in (whole, model)
            )
            differences[name] = float(np.abs(got - expected).max())
try:
    load_model(released, F32, by_function)
except InputError as error:
    differences["refused"] = str(error)
print(json.dumps(differences))
"""


def test_eight_devices_hold_and_compute_the_same(released, converted):
    """By function and by tree; a table whose rows do not divide is padded with zeros, or refused."""
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(REPOSITORY),
        "JAX_COMPILATION_CACHE_DIR": str(REPOSITORY / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    output = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES, str(released), str(converted)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert output.returncode == 0, output.stderr
    differences = json.loads(output.stdout)
    refused = differences.pop("refused")
    assert "layers.1.engram.embed.weight" in refused
    assert "one that divides shape (252, 32)" in refused
    assert differences.keys() == {"direct", "restored"}
    assert max(differences.values()) <= 2e-4
