"""The safetensors container: headers checked on opening, tensors as memory-mapped views.

A file is an eight-byte little-endian header size, a JSON header (`name -> dtype, shape, data_offsets`) and the tensors'
bytes back to back. Only headers are read when a directory is opened; a tensor's bytes are read by the operating system
when its view is used, so a table of hundreds of gigabytes can be streamed by rows. Source: the format description of
the `safetensors` project; `model.safetensors.index.json` as written by `huggingface_hub`.
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from deepinfer_jax.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NAME_PREFIX = "model."

NUMPY_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "U8": np.dtype(np.uint8),
        "I8": np.dtype(np.int8),
        "F8_E4M3": np.dtype(np.uint8),
        "F8_E8M0": np.dtype(np.uint8),
        "I16": np.dtype("<i2"),
        "U16": np.dtype("<u2"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "I32": np.dtype("<i4"),
        "U32": np.dtype("<u4"),
        "F32": np.dtype("<f4"),
        "I64": np.dtype("<i8"),
        "U64": np.dtype("<u8"),
        "F64": np.dtype("<f8"),
    }
)
"""NumPy dtype of each stored dtype. The eight-bit floats are bytes: only their scale gives them a value, and
`deepinfer_jax.quant` takes both as bytes."""

_HEADER_SIZE = struct.Struct("<Q")
_LARGEST_HEADER = 100_000_000  # bytes; the limit of the format, and what keeps a damaged size from being allocated


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `offset` and `size` are bytes in `file`, `name` has no `model.` prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size: int


@dataclass(frozen=True, eq=False)
class TensorFiles:
    """The tensors of a checkpoint directory, or of one file; made by `open_directory` and `open_file`.

    The files must not be changed or truncated while views of them are in use.
    """

    directory: Path
    entries: Mapping[str, TensorEntry]
    contents: Mapping[Path, np.ndarray]
    """The memory-mapped bytes of every file, read-only."""

    def raw(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """A read-only view of tensor `name`, or of its rows `rows[0]` up to but not including `rows[1]`.

        No bytes are copied and none are read before the view is used. The dtype is that of `NUMPY_DTYPES`. Raises
        CheckpointError where the checkpoint has no such tensor or the tensor no such rows.
        """
        if name not in self.entries:
            raise CheckpointError(name, "missing", f"one of the {len(self.entries)} tensors in {self.directory}")
        entry = self.entries[name]
        content = self.contents[entry.file][entry.offset : entry.offset + entry.size]
        tensor = content.view(NUMPY_DTYPES[entry.dtype]).reshape(entry.shape)
        if rows is None:
            return tensor
        start, stop = rows
        count = entry.shape[0] if entry.shape else 0
        if not 0 <= start <= stop <= count:
            raise CheckpointError(f"rows of {name}", rows, f"0 <= start <= stop <= {count} in {entry.file}")
        return tensor[start:stop]


def open_directory(path: str | Path) -> TensorFiles:
    """The tensors of `path`: one `model.safetensors`, or shards listed by `model.safetensors.index.json`.

    A `model.` in front of a tensor's name is dropped. Reads headers only. Raises CheckpointError, naming the file (and
    tensor) at fault, where files are missing, truncated or damaged, where index and shards disagree about which tensor
    is where, or where two tensors have the same name.
    """
    directory = Path(path)
    shards = _shard_of_tensor(directory)
    files = [directory / SINGLE_FILE] if shards is None else [directory / shard for shard in sorted({*shards.values()})]
    opened = _opened(directory, files)
    if shards is not None:
        _check_index(directory / INDEX_FILE, shards, opened.entries)
    return opened


def open_file(path: str | Path) -> TensorFiles:
    """The tensors of one file that is no checkpoint, under any name. Raises CheckpointError as `open_directory`."""
    return _opened(Path(path).parent, [Path(path)])


def _opened(directory: Path, files: list[Path]) -> TensorFiles:
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for entry in _read_header(file):
            if entry.name in entries:
                first = entries[entry.name].file.name
                raise CheckpointError(entry.name, f"in {first} and in {file.name}", "every tensor once")
            entries[entry.name] = entry
    contents = {file: np.memmap(file, np.uint8, mode="r").view(np.ndarray) for file in files}
    return TensorFiles(directory, MappingProxyType(entries), MappingProxyType(contents))


def _shard_of_tensor(directory: Path) -> dict[str, str] | None:
    """File name of each tensor's shard, by the index; None where the directory holds a single file."""
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if not index.is_file():
        if single.is_file():
            return None
        raise CheckpointError(str(directory), "no checkpoint", f"a directory with {SINGLE_FILE} or {INDEX_FILE}")
    if single.is_file():
        raise CheckpointError(
            str(directory), f"{SINGLE_FILE} and {INDEX_FILE}", "one of the two", remedy="remove the stale one"
        )
    document = _json_object(index.read_bytes(), index)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(str(index), weight_map, 'an object "weight_map" from tensor names to file names')
    shards: dict[str, str] = {}
    for stored_name, shard in weight_map.items():
        name = stored_name.removeprefix(NAME_PREFIX)
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{name} in {index}", shard, "the name of a file next to the index")
        if name in shards:
            raise CheckpointError(f"{name} in {index}", [shards[name], shard], "every tensor once")
        shards[name] = shard
    return shards


def _check_index(index: Path, shards: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> None:
    for name, shard in shards.items():
        found = entries[name].file.name if name in entries else "no file"
        if found != shard:
            raise CheckpointError(name, f"in {found}", f"in {shard}, where {index} puts it")
    for name, entry in entries.items():
        if name not in shards:
            raise CheckpointError(name, f"in {entry.file.name}", f"a tensor listed by {index}", "write the index anew")


def _read_header(file: Path) -> list[TensorEntry]:
    """The entries of one file in the order of their bytes, checked against the file's size and each other."""
    if not file.is_file():
        raise CheckpointError(str(file), "missing", f"a file, listed by {INDEX_FILE}", "download the missing shard")
    file_size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(_HEADER_SIZE.size)
        if len(prefix) < _HEADER_SIZE.size:
            raise _truncated(file, file_size, _HEADER_SIZE.size)
        (header_size,) = _HEADER_SIZE.unpack(prefix)
        if header_size > _LARGEST_HEADER:
            raise CheckpointError(str(file), header_size, f"a header of at most {_LARGEST_HEADER} bytes")
        data_start = _HEADER_SIZE.size + header_size
        if data_start > file_size:
            raise _truncated(file, file_size, data_start)
        header = _json_object(stream.read(header_size), file)
    header.pop("__metadata__", None)
    entries = [_entry(name, description, file, data_start) for name, description in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.size))
    _check_layout(entries, file, data_start, file_size)
    return entries


def _entry(stored_name: str, description: Any, file: Path, data_start: int) -> TensorEntry:
    name = stored_name.removeprefix(NAME_PREFIX)
    where = f"{name} in {file}"
    if not isinstance(description, dict):
        raise CheckpointError(where, description, "an object with dtype, shape and data_offsets")
    dtype = description.get("dtype")
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise CheckpointError(f"dtype of {where}", dtype, f"one of {', '.join(NUMPY_DTYPES)}")
    shape = _sizes(description.get("shape"), f"shape of {where}")
    offsets = _sizes(description.get("data_offsets"), f"data_offsets of {where}")
    size = math.prod(shape) * NUMPY_DTYPES[dtype].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        accepted = f"first byte and byte after the last, {size} bytes apart as {dtype} {list(shape)} takes"
        raise CheckpointError(f"data_offsets of {where}", list(offsets), accepted)
    return TensorEntry(name, dtype, shape, file, data_start + offsets[0], size)


def _check_layout(entries: list[TensorEntry], file: Path, data_start: int, file_size: int) -> None:
    """The format has tensors back to back from the header to the end of the file: no overlap, no hole, no rest."""
    end = data_start
    for entry in entries:
        if entry.offset != end:
            fault = "overlaps the tensor before it" if entry.offset < end else "leaves a hole in front of it"
            raise CheckpointError(
                f"data_offsets of {entry.name} in {file}",
                [entry.offset - data_start, entry.offset - data_start + entry.size],
                f"a first byte of {end - data_start}, where the tensor before it ends",
                remedy=f"as it is, it {fault}",
            )
        end += entry.size
        if end > file_size:
            raise _truncated(file, file_size, end, entry.name)
    if end != file_size:
        raise CheckpointError(str(file), f"{file_size} bytes", f"{end} bytes, where the last tensor ends")


def _truncated(file: Path, file_size: int, expected: int, name: str | None = None) -> CheckpointError:
    accepted = f"at least {expected} bytes, which {f'tensor {name}' if name else 'the header'} needs"
    return CheckpointError(str(file), f"{file_size} bytes", accepted, "the file is cut short; download it again")


def _sizes(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise CheckpointError(where, value, "a list of integers, none negative")
    return tuple(value)


def _json_object(content: bytes, file: Path) -> dict[str, Any]:
    def object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        collected = dict(pairs)
        if len(collected) != len(pairs):
            (repeated, times), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise CheckpointError(f"{repeated} in {file}", f"there {times} times", "every name once")
        return collected

    try:
        document = json.loads(content, object_pairs_hook=object_without_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(file), content[:40], "JSON text", f"the file is damaged: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(str(file), content[:40], "a JSON object")
    return document
