"""The reader of safetensors directories: values against an independent reader and writer, and one error per damage."""

import json
import resource
import struct
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from deepinfer_jax.checkpoint.safetensors import (
    INDEX_FILE,
    NUMPY_DTYPES,
    SINGLE_FILE,
    TensorEntry,
    open_directory,
    open_file,
)
from deepinfer_jax.errors import CheckpointError
from tests.golden import tensors

SHARD = "model-{:05d}-of-00002.safetensors"


def write_container(file, header, data=b""):
    """One file with exactly this header (text, bytes or what becomes JSON) and these bytes after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def describe(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_index(directory, weight_map):
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path):
    """Two shards with `a.weight`, `a.scale` and `b`, and their index."""
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    save_file({"a.weight": weight, "a.scale": weight[:, :1].copy()}, tmp_path / SHARD.format(1))
    save_file({"b": weight + 1}, tmp_path / SHARD.format(2))
    write_index(tmp_path, {"a.weight": SHARD.format(1), "a.scale": SHARD.format(1), "b": SHARD.format(2)})
    return tmp_path


@pytest.fixture
def golden_directory(tmp_path, data_directory):
    (tmp_path / SINGLE_FILE).symlink_to(data_directory / "quant" / "quant.safetensors")
    return tmp_path


def refusal(directory):
    with pytest.raises(CheckpointError) as caught:
        open_directory(directory)
    return str(caught.value)


def test_golden_file_reads_as_by_the_independent_reader(golden_directory):
    files = open_directory(golden_directory)
    expected = tensors("quant/quant.safetensors")
    assert files.entries.keys() == expected.keys()
    for name, values in expected.items():
        raw = files.raw(name)
        assert raw.shape == files.entries[name].shape
        if files.entries[name].dtype == "I8":
            raw = raw.view(np.uint8)
        np.testing.assert_array_equal(raw.astype(values.dtype), values)


def test_dtypes_of_the_released_formats(golden_directory):
    files = open_directory(golden_directory)
    dtypes = {files.entries[name].dtype: files.raw(name).dtype for name in files.entries}
    assert dtypes == {
        "F32": np.float32,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": np.uint8,
        "F8_E8M0": np.uint8,
        "I8": np.int8,
        "U8": np.uint8,
    }


@pytest.mark.parametrize("dtype", ["BOOL", "U8", "I8", "I16", "U16", "F16", "I32", "U32", "F32", "I64", "U64", "F64"])
def test_plain_dtypes_written_by_the_format_library(tmp_path, dtype):
    values = np.array([[1, 0], [0, 1], [1, 1]], NUMPY_DTYPES[dtype])
    save_file({"x": values}, tmp_path / SINGLE_FILE)
    files = open_directory(tmp_path)
    assert files.entries["x"].dtype == dtype
    assert files.raw("x").dtype == values.dtype
    np.testing.assert_array_equal(files.raw("x"), values)


def test_entries_say_where_the_bytes_are(sharded):
    files = open_directory(sharded)
    entry = files.entries["b"]
    assert entry == TensorEntry("b", "F32", (3, 4), sharded / SHARD.format(2), entry.offset, 48)
    content = entry.file.read_bytes()[entry.offset : entry.offset + entry.size]
    np.testing.assert_array_equal(np.frombuffer(content, np.float32), np.arange(1, 13))


def test_shards_are_found_by_the_index(sharded):
    files = open_directory(str(sharded))
    assert set(files.entries) == {"a.weight", "a.scale", "b"}
    np.testing.assert_array_equal(files.raw("a.weight"), np.arange(12).reshape(3, 4))
    np.testing.assert_array_equal(files.raw("b"), np.arange(1, 13).reshape(3, 4))


def test_the_model_prefix_is_dropped(tmp_path):
    save_file({"model.layers.0.norm": np.ones(2, np.float32)}, tmp_path / SHARD.format(1))
    save_file({"head.model.weight": np.zeros(2, np.float32)}, tmp_path / SHARD.format(2))
    write_index(tmp_path, {"model.layers.0.norm": SHARD.format(1), "model.head.model.weight": SHARD.format(2)})
    files = open_directory(tmp_path)
    assert set(files.entries) == {"layers.0.norm", "head.model.weight"}
    np.testing.assert_array_equal(files.raw("layers.0.norm"), [1.0, 1.0])


def test_one_file_is_read_whatever_lies_beside_it(sharded):
    file = sorted(sharded.glob("*.safetensors"))[0]
    whole, alone = open_directory(sharded), open_file(file)
    assert set(alone.entries) == {name for name, entry in whole.entries.items() if entry.file == file}
    for name in alone.entries:
        np.testing.assert_array_equal(alone.raw(name), whole.raw(name))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="the file is cut short"):
        open_file(file)


def test_scalars_empty_tensors_and_odd_offsets(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "byte": describe("U8", [1], 0, 1),
        "empty": describe("F32", [0, 4], 1, 1),
        "scalar": describe("F32", [], 1, 5),
        "half": describe("BF16", [2], 5, 9),
    }
    write_container(tmp_path / SINGLE_FILE, header, b"\x07" + struct.pack("<f", 2.5) + b"\x80\x3f\x00\x40")
    files = open_directory(tmp_path)
    assert files.raw("empty").shape == (0, 4)
    assert files.raw("scalar").shape == ()
    assert files.raw("scalar") == np.float32(2.5)
    np.testing.assert_array_equal(files.raw("half").astype(np.float32), [1.0, 2.0])


def test_rows_are_a_part_of_the_tensor(sharded):
    files = open_directory(sharded)
    np.testing.assert_array_equal(files.raw("b", rows=(1, 3)), files.raw("b")[1:3])
    assert files.raw("b", rows=(2, 2)).shape == (0, 4)
    assert files.raw("b", rows=(0, 3)).shape == (3, 4)


@pytest.mark.parametrize("rows", [(1, 4), (-1, 2), (2, 1)])
def test_rows_outside_the_tensor_are_refused(sharded, rows):
    with pytest.raises(CheckpointError, match="rows of b.*0 <= start <= stop <= 3"):
        open_directory(sharded).raw("b", rows=rows)


def test_an_unknown_tensor_is_refused(sharded):
    with pytest.raises(CheckpointError, match=r"'c' is 'missing'; accepted: one of the 3 tensors"):
        open_directory(sharded).raw("c")


def test_views_are_of_the_file_and_cannot_be_written(sharded):
    files = open_directory(sharded)
    view = files.raw("b")
    assert np.shares_memory(view, files.raw("b", rows=(0, 1)))
    assert not view.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1.0


def peak_memory():
    """Largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def test_a_file_larger_than_memory_is_streamed_by_rows(tmp_path):
    rows, columns = 1 << 30, 256  # 256 gibibytes, of which the file system stores only what is written
    header = json.dumps({"table": describe("F8_E4M3", [rows, columns], 0, rows * columns)}).encode()
    last = len(header) + 8 + rows * columns
    with (tmp_path / SINGLE_FILE).open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(last)
        stream.seek(last - columns)
        stream.write(bytes(range(columns)))
    before = peak_memory()
    files = open_directory(tmp_path)
    np.testing.assert_array_equal(files.raw("table", rows=(rows - 2, rows))[1], np.arange(256))
    assert not files.raw("table", rows=(1 << 29, (1 << 29) + 8)).any()
    assert peak_memory() - before < 64 << 20


def test_no_checkpoint(tmp_path):
    assert f"{tmp_path}' is 'no checkpoint'; accepted: a directory with {SINGLE_FILE} or {INDEX_FILE}" in refusal(
        tmp_path
    )
    assert "no checkpoint" in refusal(tmp_path / "absent")


def test_single_file_beside_an_index(sharded):
    write_container(sharded / SINGLE_FILE, {})
    assert "remove the stale one" in refusal(sharded)


def test_missing_shard(sharded):
    (sharded / SHARD.format(2)).unlink()
    message = refusal(sharded)
    assert f"{SHARD.format(2)}' is 'missing'" in message
    assert INDEX_FILE in message


@pytest.mark.parametrize("text", ["", "{", "[]", '"weight_map"', "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_index_that_is_none(sharded, text):
    (sharded / INDEX_FILE).write_text(text)
    assert str(sharded / INDEX_FILE) in refusal(sharded)


@pytest.mark.parametrize("shard", [7, None, "../other.safetensors", "/elsewhere/model.safetensors"])
def test_index_that_leaves_the_directory(sharded, shard):
    write_index(sharded, {"b": shard})
    assert "accepted: the name of a file next to the index" in refusal(sharded)


def test_index_that_names_a_shard_without_the_tensor(sharded):
    write_index(sharded, {"a.weight": SHARD.format(1), "a.scale": SHARD.format(2), "b": SHARD.format(2)})
    message = refusal(sharded)
    assert f"'a.scale' is 'in {SHARD.format(1)}'; accepted: in {SHARD.format(2)}" in message
    write_index(
        sharded, {"a.weight": SHARD.format(1), "a.scale": SHARD.format(1), "b": SHARD.format(2), "c": SHARD.format(2)}
    )
    assert f"'c' is 'in no file'; accepted: in {SHARD.format(2)}" in refusal(sharded)


def test_index_that_lacks_a_tensor(sharded):
    write_index(sharded, {"a.weight": SHARD.format(1), "b": SHARD.format(2)})
    assert f"'a.scale' is 'in {SHARD.format(1)}'; accepted: a tensor listed by" in refusal(sharded)


def test_tensor_in_two_shards(sharded):
    save_file({"b": np.ones(1, np.float32), "model.a.scale": np.ones(1, np.float32)}, sharded / SHARD.format(2))
    assert f"'a.scale' is 'in {SHARD.format(1)} and in {SHARD.format(2)}'" in refusal(sharded)


def test_tensor_twice_in_the_index(sharded):
    write_index(sharded, {"b": SHARD.format(2), "model.b": SHARD.format(1)})
    assert f"b in {sharded / INDEX_FILE}" in refusal(sharded)


@pytest.mark.parametrize("size", [0, 7, 8, 60])
def test_file_cut_inside_the_header(sharded, size):
    file = sharded / SHARD.format(2)
    file.write_bytes(file.read_bytes()[:size])
    message = refusal(sharded)
    assert f"{file}' is '{size} bytes'; accepted: at least" in message
    assert "which the header needs (the file is cut short; download it again)" in message


def test_file_cut_inside_a_tensor(sharded):
    file = sharded / SHARD.format(2)
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    expected = f"is '{len(content) - 1} bytes'; accepted: at least {len(content)} bytes, which tensor b needs"
    assert expected in refusal(sharded)


def test_file_with_bytes_after_the_last_tensor(sharded):
    file = sharded / SHARD.format(2)
    content = file.read_bytes()
    file.write_bytes(content + b"\0")
    assert f"accepted: {len(content)} bytes, where the last tensor ends" in refusal(sharded)


def test_header_size_that_cannot_be(tmp_path):
    (tmp_path / SINGLE_FILE).write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert "a header of at most 100000000 bytes" in refusal(tmp_path)


@pytest.mark.parametrize("header", [b"", b"\xff\xfe{}", b"{'a': 1}", b"[1]", b"null", b"[" * 100_000])
def test_header_that_is_no_json_object(tmp_path, header):
    write_container(tmp_path / SINGLE_FILE, header)
    message = refusal(tmp_path)
    assert str(tmp_path / SINGLE_FILE) in message
    assert "JSON" in message
    assert len(message) < 1000


def test_tensor_twice_in_a_header(tmp_path):
    entry = json.dumps(describe("U8", [1], 0, 1))
    write_container(tmp_path / SINGLE_FILE, f'{{"a": {entry}, "b": {entry}, "a": {entry}}}'.encode(), b"\0")
    assert f"'a in {tmp_path / SINGLE_FILE}' is 'there 2 times'; accepted: every name once" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (7, "an object with dtype, shape and data_offsets"),
        ({}, "dtype of t in"),
        (describe("F8_E5M2", [8], 0, 8), "one of BOOL, U8"),
        (describe(["U8"], [8], 0, 8), "dtype of t in"),
        (describe("U8", 8, 0, 8), "shape of t in"),
        (describe("U8", [-8], 0, 8), "shape of t in"),
        (describe("U8", [8.0], 0, 8), "shape of t in"),
        (describe("U8", [True, 8], 0, 8), "shape of t in"),
        ({"dtype": "U8", "shape": [8]}, "data_offsets of t in"),
        ({"dtype": "U8", "shape": [8], "data_offsets": [0, 4, 8]}, "8 bytes apart as U8 [8] takes"),
        (describe("U8", [8], -1, 7), "data_offsets of t in"),
        (describe("U8", [8], 8, 0), "8 bytes apart as U8 [8] takes"),
        (describe("F32", [8], 0, 8), "32 bytes apart as F32 [8] takes"),
        (describe("U8", [9], 0, 9), "at least 77 bytes, which tensor t needs"),
        (describe("U8", [4], 4, 8), "a first byte of 0, where the tensor before it ends"),
    ],
)
def test_entry_that_is_damaged(tmp_path, description, message):
    write_container(tmp_path / SINGLE_FILE, {"t": description}, bytes(8))
    refused = refusal(tmp_path)
    assert message in refused
    assert str(tmp_path / SINGLE_FILE) in refused


@pytest.mark.parametrize(
    ("begin", "fault"), [(3, "overlaps the tensor before it"), (5, "leaves a hole in front of it")]
)
def test_tensors_that_are_not_back_to_back(tmp_path, begin, fault):
    header = {"second": describe("U8", [4], begin, begin + 4), "first": describe("U8", [4], 0, 4)}
    write_container(tmp_path / SINGLE_FILE, header, bytes(begin + 4))
    refused = refusal(tmp_path)
    assert f"data_offsets of second in {tmp_path / SINGLE_FILE}' is [{begin}, {begin + 4}]" in refused
    assert fault in refused
