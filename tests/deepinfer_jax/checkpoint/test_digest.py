"""Digests: what the weights id depends on, and that every changed bit is one error that says where it is."""

import hashlib
import json
import re

import numpy as np
import pytest

from deepinfer_jax.checkpoint import digest
from deepinfer_jax.checkpoint.digest import (
    ContentCheck,
    Digests,
    TensorDigest,
    TensorHash,
    read_digests,
    unverified_id,
    weights_id,
    write_digests,
)
from deepinfer_jax.checkpoint.reader import load_model
from deepinfer_jax.checkpoint.released import ReleasedStorage
from deepinfer_jax.checkpoint.safetensors import open_directory
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.numerics import F32, RELEASED
from tests.containers import Tensor, flip_bit, place_of, read_container, write_container
from tests.golden import DATA

CONTENT = np.random.default_rng(0).integers(0, 256, 10_007, np.uint8)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 1,000 bytes, so that a small tensor has several."""
    monkeypatch.setattr(digest, "CHUNK_BYTES", 1000)


def write_one(directory, tensor, name="w", file="model.safetensors"):
    write_container(directory / file, {"before": Tensor("U8", (3,), b"abc"), name: tensor})
    return directory


def of(directory):
    return ContentCheck(open_directory(directory), None).digests()


def sha(content):
    return hashlib.sha256(content).hexdigest()


def test_a_tensor_is_hashed_in_chunks(tmp_path, small_chunks):
    write_one(tmp_path, Tensor("U8", (CONTENT.size,), CONTENT.tobytes()))
    found = of(tmp_path).tensors["w"]
    expected = tuple(sha(CONTENT[start : start + 1000].tobytes()) for start in range(0, CONTENT.size, 1000))
    assert found == TensorDigest("U8", (10_007,), expected)
    assert found.size == 10_007


@pytest.mark.parametrize("cuts", [[], [1, 2, 999], [1000, 2000], [500, 1500, 1501, 9999]])
def test_bytes_may_arrive_in_any_lengths(cuts, tmp_path, small_chunks):
    write_one(tmp_path, Tensor("U8", (CONTENT.size,), CONTENT.tobytes()))
    streamed = TensorHash()
    for part in np.split(CONTENT, cuts):
        streamed.update(part)
    assert streamed.chunks() == of(tmp_path).tensors["w"].chunks


def test_whole_chunks_and_empty_tensors(small_chunks):
    exact, empty = TensorHash(), TensorHash()
    exact.update(CONTENT[:2000])
    assert len(exact.chunks()) == 2
    assert empty.chunks() == ()


def test_the_id_does_not_depend_on_files_and_prefixes(tmp_path, released):
    """One file or two, `model.` in front or not: the same weights."""
    stored = {}
    for file in sorted(released.glob("*.safetensors")):
        stored |= read_container(file)
    write_container(tmp_path / "model.safetensors", {f"model.{name}": stored[name] for name in sorted(stored)})
    assert of(tmp_path).weights_id == weights_id(released)
    assert weights_id(released).verified


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("U8", (4,), b"\1\2\3\5"),
        Tensor("I8", (4,), b"\1\2\3\4"),
        Tensor("U8", (2, 2), b"\1\2\3\4"),
        Tensor("U8", (5,), b"\1\2\3\4\0"),
    ],
    ids=["value", "dtype", "shape", "size"],
)
def test_the_id_depends_on_everything_about_a_tensor(tensor, tmp_path):
    reference = of(write_one(tmp_path, Tensor("U8", (4,), b"\1\2\3\4"))).weights_id
    assert of(write_one(tmp_path, Tensor("U8", (4,), b"\1\2\3\4"))).weights_id == reference
    assert of(write_one(tmp_path, tensor)).weights_id != reference
    assert of(write_one(tmp_path, Tensor("U8", (4,), b"\1\2\3\4"), name="v")).weights_id != reference


def test_without_a_sidecar_the_id_is_unverified_and_ignores_values(tmp_path):
    one = weights_id(write_one(tmp_path, Tensor("U8", (4,), b"\1\2\3\4")))
    assert not one.verified
    assert one == unverified_id(open_directory(tmp_path))
    assert weights_id(write_one(tmp_path, Tensor("U8", (4,), b"\4\3\2\1"))) == one
    assert weights_id(write_one(tmp_path, Tensor("U8", (2, 2), b"\1\2\3\4"))) != one


def test_a_sidecar_is_read_as_it_was_written(tmp_path):
    digests = Digests({"b": TensorDigest("F32", (2, 3), ("00", "11")), "a": TensorDigest("BF16", (), ())})
    write_digests(tmp_path, digests)
    assert read_digests(tmp_path) == digests
    assert [path.name for path in tmp_path.iterdir()] == ["digest.json"]
    document = json.loads((tmp_path / "digest.json").read_text())
    assert document["weights_id"] == digests.weights_id.value == weights_id(tmp_path).value


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: text[: len(text) // 2], "accepted: a digest sidecar"),
        (lambda text: "[]", "accepted: a digest sidecar"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "'version': 2"),
        (lambda text: text.replace('"00"', '"01"'), "as its own digests give"),
        (lambda text: text.replace('"F32"', '"F31"'), "dtype of a"),
    ],
    ids=["cut", "list", "version", "digest", "dtype"],
)
def test_a_damaged_sidecar_is_refused(change, sentence, tmp_path):
    write_digests(tmp_path, Digests({"a": TensorDigest("F32", (1,), ("00",))}))
    file = tmp_path / "digest.json"
    file.write_text(change(file.read_text()))
    with pytest.raises(CheckpointError, match=re.escape(sentence)) as refused:
        weights_id(tmp_path)
    assert str(file) in str(refused.value)


FLIPPED = {
    "plain": ("layers.3.attn.q_norm.weight", 0),
    "float32": ("layers.2.ffn.gate.bias_vl", -1),
    "tiles": ("layers.4.attn.wq_b.weight", 100),
    "scale of tiles": ("layers.4.attn.wq_b.scale", -1),
    "expert": ("layers.5.ffn.experts.7.w3.weight", 5),
    "scale of an expert": ("layers.0.ffn.experts.0.w2.scale", 0),
    "table": ("layers.1.engram.embed.weight", 777),
    "draft": ("mtp.0.markov_head.head.weight", 1),
}


@pytest.mark.parametrize("numerics", [F32, RELEASED], ids=["f32", "released"])
@pytest.mark.parametrize(("name", "offset"), FLIPPED.values(), ids=FLIPPED)
def test_a_flipped_bit_is_one_error(name, offset, numerics, released, copy):
    directory = copy(released)
    file, first, size = place_of(directory, name)
    flip_bit(file, first + offset % size)
    with pytest.raises(CheckpointError) as refused:
        load_model(directory, numerics)
    error = refused.value
    assert error.key == name
    assert str(file) in str(error)
    assert read_digests(directory).tensors[name].chunks[0] in error.accepted
    assert "digest.json" in str(error)


def test_without_a_sidecar_a_flipped_bit_is_read(released, copy):
    directory = copy(released)
    (directory / "digest.json").unlink()
    file, first, _ = place_of(directory, "norm.weight")
    flip_bit(file, first)
    changed = load_model(directory, F32)[1].norm
    assert np.count_nonzero(np.asarray(changed) != np.asarray(load_model(released, F32)[1].norm)) == 1


def test_rows_are_checked_by_the_chunks_they_lie_in(tmp_path, small_chunks):
    """A damaged chunk is found when one of its rows is read, and not before."""
    write_one(tmp_path, Tensor("U8", (1000, 10), CONTENT[:10_000].tobytes()))
    write_digests(tmp_path, of(tmp_path))
    file, first, _ = place_of(tmp_path, "w")
    flip_bit(file, first + 4321)
    content = ContentCheck(open_directory(tmp_path), read_digests(tmp_path))
    content.read("w", 0, 4000)
    content.read("w", 5000, 10_000)
    with pytest.raises(CheckpointError, match="bytes 4000 to 5000"):
        content.read("w", 3999, 4001)
    assert set(content.take_new()["w"]) == {*range(10)} - {4}


def test_every_chunk_is_hashed_once(tmp_path, small_chunks):
    write_one(tmp_path, Tensor("U8", (1000, 10), CONTENT[:10_000].tobytes()))
    content = ContentCheck(open_directory(tmp_path), None)
    content.read("w", 100, 2100)
    assert [*content.take_new()["w"]] == [0, 1, 2]
    content.read("w", 0, 4000)
    new = content.take_new()
    assert [*new["w"]] == [3]
    assert content.take_new() == {}
    other = ContentCheck(open_directory(tmp_path), None)
    other.recall(new)
    other.read("w", 2500, 4000)
    assert [*other.take_new()["w"]] == [2]


@pytest.mark.parametrize(
    ("stored", "sentence"),
    [
        ({"w": Tensor("U8", (4,), b"1234")}, "'before' is 'missing'"),
        ({"before": Tensor("U8", (3,), b"abc"), "w": Tensor("U8", (2, 2), b"1234")}, "U8 (2, 2)"),
        ({"before": Tensor("U8", (3,), b"abc"), "w": Tensor("I8", (4,), b"1234")}, "I8 (4,)"),
        (
            {"before": Tensor("U8", (3,), b"abc"), "w": Tensor("U8", (4,), b"1234"), "x": Tensor("U8", (1,), b"1")},
            "a tensor listed by digest.json",
        ),
    ],
    ids=["missing", "shape", "dtype", "extra"],
)
def test_a_sidecar_of_other_tensors_is_refused(stored, sentence, tmp_path):
    write_one(tmp_path, Tensor("U8", (4,), b"1234"))
    write_digests(tmp_path, of(tmp_path))
    write_container(tmp_path / "model.safetensors", stored)
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        ReleasedStorage.open(tmp_path)


def test_verification_writes_a_sidecar_once(copy, released):
    directory = copy(released)
    (directory / "digest.json").unlink()
    assert not weights_id(directory).verified
    identity = ReleasedStorage.open(directory).verify()
    assert identity == weights_id(directory) == weights_id(released)
    written = (directory / "digest.json").stat().st_mtime_ns
    assert ReleasedStorage.open(directory).verify() == identity
    assert (directory / "digest.json").stat().st_mtime_ns == written


def test_the_golden_checkpoints_differ():
    identities = [of(DATA / "tiny-a" / form).weights_id for form in ("quant", "bf16")]
    assert identities[0] != identities[1]
