"""Writing the released layout: safetensors shards whose tensors arrive in pieces, and their index.

A shard is written under a temporary name and renamed when it is complete; the index comes last, so that a directory
without one never passes for a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from deepinfer_jax.checkpoint.digest import TensorDigest, TensorHash, write_json
from deepinfer_jax.checkpoint.safetensors import INDEX_FILE, NUMPY_DTYPES

_HEADER_ALIGNMENT = 8  # bytes, by the format


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: name, stored dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


class ShardWriter:
    """One shard under way, used as a context; its file appears when the context ends without an error.

    Tensors lie in the file by falling size of their elements, so that each is aligned. Their bytes may come in any
    order of tensors, but in order within a tensor.
    """

    def __init__(self, file: Path, tensors: Iterable[TensorSpec]) -> None:
        self.file = file
        self._tensors = sorted(tensors, key=lambda tensor: -NUMPY_DTYPES[tensor.dtype].itemsize)
        self._hashes = {tensor.name: TensorHash() for tensor in self._tensors}
        self._next: dict[str, int] = {}
        self._partial = file.with_name(f".{file.name}.partial")

    def __enter__(self) -> ShardWriter:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in self._tensors:
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": [offset, offset + tensor.size],
            }
            self._next[tensor.name] = offset
            offset += tensor.size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        self._stream = self._partial.open("wb")
        self._stream.write(struct.pack("<Q", len(text)) + text)
        self._data_start = self._stream.tell()
        return self

    def write(self, name: str, rows: np.ndarray) -> None:
        """The next rows of a tensor, in its stored dtype."""
        content = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        self._stream.seek(self._data_start + self._next[name])
        self._stream.write(content.data)
        self._hashes[name].update(content)
        self._next[name] += content.size

    def digests(self) -> dict[str, TensorDigest]:
        """Digests of all tensors, after the last row."""
        return {
            tensor.name: TensorDigest(tensor.dtype, tensor.shape, self._hashes[tensor.name].chunks())
            for tensor in self._tensors
        }

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                end = 0
                for tensor in self._tensors:
                    end += tensor.size
                    if self._next[tensor.name] != end:
                        raise ValueError(f"{tensor.name} lacks {end - self._next[tensor.name]} bytes")
                self._stream.flush()
                os.fsync(self._stream.fileno())
                self._partial.replace(self.file)
        finally:
            self._stream.close()
            self._partial.unlink(missing_ok=True)


def write_index(directory: Path, shards: Mapping[str, Iterable[TensorSpec]]) -> None:
    """Write the index of shards: file name -> its tensors."""
    weight_map = {tensor.name: shard for shard, tensors in shards.items() for tensor in tensors}
    size = sum(tensor.size for tensors in shards.values() for tensor in tensors)
    write_json(directory / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": weight_map})
