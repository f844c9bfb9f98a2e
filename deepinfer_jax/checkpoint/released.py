"""A checkpoint of the released layout as a source of parameters: which tensors they are made of, each one checked.

A tensor described as quantised may also be stored in bfloat16 or float32, as in converted checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from deepinfer_jax.checkpoint.digest import ContentCheck, WeightsId, read_digests, write_digests
from deepinfer_jax.checkpoint.pieces import Piece, Rows
from deepinfer_jax.checkpoint.progress import Progress, silent
from deepinfer_jax.checkpoint.safetensors import TensorEntry, TensorFiles, open_directory
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.params import Parameter, Stored, scale_name

PLAIN_DTYPES = ("BF16", "F32")
_SCALE_DTYPES = ("F8_E8M0", "U8")


class ReleasedStorage:
    """The tensors of a checkpoint directory, mapped. Rows are checked against the digest sidecar before they are used.

    ``content``: what checks them and keeps the digests; None where nothing needs hashing.
    """

    def __init__(self, files: TensorFiles, content: ContentCheck | None) -> None:
        self.files = files
        self.content = content

    @classmethod
    def open(cls, directory: Path) -> ReleasedStorage:
        """Open a directory; its content is checked if a sidecar stands beside it.

        Raises:
          CheckpointError: the directory's files are missing, damaged, or others than the sidecar describes.
        """
        files = open_directory(directory)
        digests = read_digests(directory)
        return cls(files, None if digests is None else ContentCheck(files, digests))

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Every tensor of the directory by name."""
        return self.files.entries

    def pieces(self, item: Parameter, stack: int) -> list[Piece]:
        """The released tensors of a parameter, or of its ``stack``-th stacked matrix, checked against its description.

        Raises:
          CheckpointError: missing, or of another shape or dtype; names the tensor, its file and what was expected.
        """
        return [self._piece(name, item) for name in item.released[stack]]

    def verify(self, progress: Progress = silent) -> WeightsId:
        """Check all tensors against the sidecar, or write one where there is none; the weights id.

        Raises:
          CheckpointError: a tensor's content differs from its digest; names tensor, file and both digests.
        """
        if self.content is not None:
            return self.content.digests(progress).weights_id
        digests = ContentCheck(self.files, None).digests(progress)
        write_digests(self.files.directory, digests)
        return digests.weights_id

    def _piece(self, name: str, item: Parameter) -> Piece:
        shape = item.piece_shape
        entry = self._entry(name, f"a tensor of shape {shape}")
        if entry.dtype in PLAIN_DTYPES:
            if entry.shape != shape:
                raise CheckpointError(name, f"shape {entry.shape} in {entry.file}", f"shape {shape}")
            return Piece(name, shape, _found(entry), self._rows(entry), None)
        if not item.has_scale:
            raise CheckpointError(name, f"dtype {entry.dtype} in {entry.file}", "BF16 or F32")
        weight_dtype = "I8" if item.stored is Stored.FP4_ROWS else "F8_E4M3"
        _check(entry, (weight_dtype,), item.data_shape(shape))
        expected = item.scale_shape(shape)
        scale = self._entry(scale_name(name), f"{_SCALE_DTYPES[0]} {expected} beside {name}, which is quantised")
        _check(scale, _SCALE_DTYPES, expected)
        return Piece(name, shape, _found(entry), self._rows(entry), self._rows(scale))

    def _entry(self, name: str, accepted: str) -> TensorEntry:
        entry = self.files.entries.get(name)
        if entry is None:
            raise CheckpointError(name, "missing", f"{accepted} in {self.files.directory}")
        return entry

    def _rows(self, entry: TensorEntry) -> Rows:
        return functools.partial(self._read, entry)

    def _read(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        if self.content is not None:
            row_bytes = entry.size // max(1, entry.shape[0])
            self.content.read(entry.name, start * row_bytes, stop * row_bytes)
        return self.files.raw(entry.name, (start, stop))


def _check(entry: TensorEntry, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if entry.shape != shape or entry.dtype not in dtypes:
        raise CheckpointError(entry.name, _found(entry), f"{dtypes[0]} {shape}")


def _found(entry: TensorEntry) -> str:
    return f"{entry.dtype} {entry.shape} in {entry.file}"
