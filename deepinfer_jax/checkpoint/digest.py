"""Digests of a checkpoint's content, the sidecar file that keeps them, and the weights id that follows from them.

Tensors are hashed in chunks of 16 MiB, so that a reader of some rows of a table checks the chunks it touches and no
more. The weights id is the digest of all tensor digests: it does not depend on how tensors are spread over files, and
every reader of the same weights, whole or in part, packed or converted, finds the same one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_jax.checkpoint.progress import Progress, silent
from deepinfer_jax.checkpoint.safetensors import NUMPY_DTYPES, TensorEntry, TensorFiles, open_directory
from deepinfer_jax.errors import CheckpointError

DIGEST_FILE = "digest.json"
CHUNK_BYTES = 1 << 24
"""Bytes of a tensor that are hashed together; part of the format, since digests depend on it."""

_HEADER = {"format": "deepinfer-jax digest", "version": 1, "algorithm": "sha256", "chunk_bytes": CHUNK_BYTES}
_REMEDY = f"fetch the file again, or remove {DIGEST_FILE} if the weights were changed on purpose"


ChunkDigests = dict[str, dict[int, str]]
"""Digests by tensor and number of the chunk."""


@dataclasses.dataclass(frozen=True)
class WeightsId:
    """Identity of a checkpoint's weights: hexadecimal, equal for equal content.

    ``verified``: it comes from digests of the content. Otherwise it comes from names, types and places of the tensors
    alone, and two checkpoints that differ in values only share it.
    """

    value: str
    verified: bool


@dataclasses.dataclass(frozen=True)
class TensorDigest:
    """Stored dtype, shape and the SHA-256 of every chunk of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


@dataclasses.dataclass(frozen=True)
class Digests:
    """Digests of all tensors of a checkpoint, by released name."""

    tensors: Mapping[str, TensorDigest]

    @property
    def weights_id(self) -> WeightsId:
        """The digest of the tensor digests, in the order of names."""
        lines = (
            f"{name} {tensor.dtype} {list(tensor.shape)} {' '.join(tensor.chunks)}\n"
            for name, tensor in sorted(self.tensors.items())
        )
        return WeightsId(_digest_of_lines(lines), verified=True)


def weights_id(directory: Path | str) -> WeightsId:
    """The identity of a checkpoint's weights: from its sidecar, or unverified from index and headers.

    Raises:
      CheckpointError: the sidecar, the index or a header is damaged.
    """
    digests = read_digests(directory)
    return unverified_id(open_directory(directory)) if digests is None else digests.weights_id


def unverified_id(files: TensorFiles) -> WeightsId:
    """An identity from index and headers: name, dtype, shape and place of every tensor."""
    lines = (
        f"{name} {entry.dtype} {list(entry.shape)} {entry.file.name} {entry.offset}\n"
        for name, entry in sorted(files.entries.items())
    )
    return WeightsId(_digest_of_lines(lines), verified=False)


def read_digests(directory: Path | str) -> Digests | None:
    """The sidecar of a checkpoint directory; None where there is none.

    Raises:
      CheckpointError: the file is not such a sidecar, or contradicts itself.
    """
    path = Path(directory) / DIGEST_FILE
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_bytes())
        found = {key: document[key] for key in _HEADER}
        tensors = {
            str(name): TensorDigest(str(one["dtype"]), tuple(map(int, one["shape"])), tuple(map(str, one["chunks"])))
            for name, one in document["tensors"].items()
        }
        recorded = document["weights_id"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(str(path), repr(error), "a digest sidecar of this project", _REMEDY) from error
    if found != _HEADER:
        raise CheckpointError(str(path), found, f"{_HEADER}", _REMEDY)
    for name, tensor in tensors.items():
        if tensor.dtype not in NUMPY_DTYPES:
            raise CheckpointError(f"dtype of {name} in {path}", tensor.dtype, f"one of {', '.join(NUMPY_DTYPES)}")
    digests = Digests(tensors)
    if recorded != digests.weights_id.value:
        accepted = f"a weights_id of {digests.weights_id.value}, as its own digests give"
        raise CheckpointError(str(path), recorded, accepted, _REMEDY)
    return digests


def write_digests(directory: Path | str, digests: Digests) -> None:
    """Write the sidecar of a checkpoint directory; it appears complete or not at all."""
    tensors = {name: dataclasses.asdict(tensor) for name, tensor in sorted(digests.tensors.items())}
    document = _HEADER | {"weights_id": digests.weights_id.value, "tensors": tensors}
    write_json(Path(directory) / DIGEST_FILE, document)


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file that appears complete, under its name, or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as stream:
        json.dump(document, stream, indent=1, ensure_ascii=False)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


class TensorHash:
    """The chunk digests of one tensor whose bytes arrive in order."""

    def __init__(self) -> None:
        self._chunks: list[str] = []
        self._open = hashlib.sha256()
        self._room = CHUNK_BYTES

    def update(self, content: np.ndarray) -> None:
        """Take the tensor's next bytes: a contiguous uint8 array."""
        while content.size:
            part, content = content[: self._room], content[self._room :]
            self._open.update(part.data)
            self._room -= part.size
            if not self._room:
                self._close()

    def chunks(self) -> tuple[str, ...]:
        """All digests, when every byte has come."""
        if self._room < CHUNK_BYTES:
            self._close()
        return tuple(self._chunks)

    def _close(self) -> None:
        self._chunks.append(self._open.hexdigest())
        self._open = hashlib.sha256()
        self._room = CHUNK_BYTES


class ContentCheck:
    """Hashes what is read of a checkpoint, every chunk once, and compares it with the sidecar where one stands.

    Raises:
      CheckpointError: the sidecar and the headers do not describe the same tensors.
    """

    def __init__(self, files: TensorFiles, expected: Digests | None) -> None:
        self._computed: ChunkDigests = {}
        self._new: ChunkDigests = {}
        self._files = files
        self._expected = expected
        if expected is not None:
            _check_headers(files, expected)

    def read(self, name: str, start: int, stop: int) -> None:
        """Check the chunks that hold bytes ``start`` up to ``stop`` of a tensor.

        Raises:
          CheckpointError: a chunk's content differs from its digest; names tensor, file and both digests.
        """
        entry = self._files.entries[name]
        computed = self._computed.setdefault(name, {})
        for chunk in range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)):
            if chunk in computed:
                continue
            found = hashlib.sha256(self._chunk(entry, chunk).data).hexdigest()
            if self._expected is not None and found != self._expected.tensors[name].chunks[chunk]:
                first = chunk * CHUNK_BYTES
                place = f"bytes {first} to {min(first + CHUNK_BYTES, entry.size)} in {entry.file}"
                expected = self._expected.tensors[name].chunks[chunk]
                accepted = f"{place} of SHA-256 {expected}, by {DIGEST_FILE}"
                raise CheckpointError(name, f"SHA-256 {found}", accepted, _REMEDY)
            computed[chunk] = found
            self._new.setdefault(name, {})[chunk] = found

    def take_new(self) -> ChunkDigests:
        """What was computed since the last call."""
        new, self._new = self._new, {}
        return new

    def recall(self, known: ChunkDigests) -> None:
        """Take digests that an earlier run computed, instead of reading these chunks again."""
        for name, chunks in known.items():
            self._computed.setdefault(name, {}).update(chunks)

    def digests(self, progress: Progress = silent) -> Digests:
        """Digests of all tensors, hashing what was not read yet."""
        tensors = {}
        with progress(len(self._files.entries), " tensors") as step:
            for name, entry in self._files.entries.items():
                self.read(name, 0, entry.size)
                chunks = tuple(digest for _, digest in sorted(self._computed[name].items()))
                tensors[name] = TensorDigest(entry.dtype, entry.shape, chunks)
                step()
        return Digests(tensors)

    def _chunk(self, entry: TensorEntry, chunk: int) -> np.ndarray:
        start = entry.offset + chunk * CHUNK_BYTES
        return self._files.contents[entry.file][start : min(start + CHUNK_BYTES, entry.offset + entry.size)]


def _check_headers(files: TensorFiles, expected: Digests) -> None:
    for name, tensor in expected.tensors.items():
        entry = files.entries.get(name)
        if entry is None:
            raise CheckpointError(name, "missing", f"a tensor in {files.directory}, by {DIGEST_FILE}", _REMEDY)
        chunks = -(-entry.size // CHUNK_BYTES)
        if (entry.dtype, entry.shape, chunks) != (tensor.dtype, tensor.shape, len(tensor.chunks)):
            found = f"{entry.dtype} {entry.shape} in {entry.file}"
            accepted = f"{tensor.dtype} {tensor.shape} in {len(tensor.chunks)} chunks, by {DIGEST_FILE}"
            raise CheckpointError(name, found, accepted, _REMEDY)
    for name, entry in files.entries.items():
        if name not in expected.tensors:
            raise CheckpointError(name, f"in {entry.file}", f"a tensor listed by {DIGEST_FILE}", _REMEDY)


def _digest_of_lines(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode())
    return digest.hexdigest()
