"""The converted layout: the arrays of parameters as orbax checkpoints, listed with their digests in one manifest.

Arrays larger than a group are cut into parts, contiguous in row order, so that a reader of a slice restores the parts
it touches and no more. Every group of parts is an orbax checkpoint of its own below ``arrays/``, a flat tree of NumPy
arrays. An array is named by the first released tensor it holds (see docs/formats.md).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from deepinfer_jax.checkpoint.digest import DIGEST_FILE, Digests, WeightsId, read_digests, write_json
from deepinfer_jax.checkpoint.pieces import Bounds, Part, Piece, Rows, lengths
from deepinfer_jax.checkpoint.progress import Progress, silent
from deepinfer_jax.checkpoint.safetensors import TensorEntry
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.params import Parameter

MANIFEST_FILE = "arrays.json"
ARRAYS = "arrays"
GROUP_BYTES = 1 << 26
"""Most bytes of an orbax checkpoint, unless a single row is larger."""

_HEADER = {"format": "deepinfer-jax arrays", "version": 1}
_REMEDY = "convert the checkpoint again"
_GROUPS_KEPT = 3  # a packed parameter is read from two arrays in turn, whose parts lie in different groups


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """A block of an array: the group it lies in, its key there, its place in the array, and SHA-256 of its bytes."""

    group: str
    key: str
    bounds: Bounds
    digest: str


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array and its parts in row order."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    @functools.cached_property
    def first_rows(self) -> tuple[int, ...]:
        """Where each part begins, counting the rows of all leading axes in order."""
        rows = self.shape[:-1] if len(self.shape) > 1 else self.shape
        corners = ([start for start, _ in part.bounds] for part in self.parts)
        return tuple(int(np.ravel_multi_index(corner[: len(rows)], rows)) for corner in corners)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All arrays by parameter.

    ``numerics`` names the form they were converted to, ``source`` is the unverified id of what they were made from.
    """

    numerics: str
    source: str
    arrays: Mapping[str, Mapping[Part, StoredArray]]


def array_name(item: Parameter) -> str:
    """The name of a parameter in the converted layout; it does not depend on the structure of parameter trees."""
    return item.released[0][0]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of a directory; with it the directory is a complete checkpoint."""
    arrays = {
        name: {part.value: dataclasses.asdict(array) for part, array in parts.items()}
        for name, parts in manifest.arrays.items()
    }
    write_json(
        directory / MANIFEST_FILE,
        _HEADER | {"numerics": manifest.numerics, "source": manifest.source, "arrays": arrays},
    )


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a converted checkpoint.

    Raises:
      CheckpointError: the file is not such a manifest.
    """
    path = directory / MANIFEST_FILE
    try:
        document = json.loads(path.read_bytes())
        header = {key: document[key] for key in _HEADER}
        arrays = {
            str(name): {Part(part): _stored_array(array) for part, array in parts.items()}
            for name, parts in document["arrays"].items()
        }
        manifest = Manifest(str(document["numerics"]), str(document["source"]), arrays)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(str(path), repr(error), "a manifest of converted arrays", _REMEDY) from error
    if header != _HEADER:
        raise CheckpointError(str(path), header, f"{_HEADER}", _REMEDY)
    return manifest


def save_group(directory: Path, group: str, tree: Mapping[str, np.ndarray]) -> None:
    """Write one group; it appears complete or not at all. An earlier one of that name is replaced."""
    with _checkpointer() as checkpointer:
        checkpointer.save((directory / ARRAYS / group).resolve(), dict(tree), force=True)


def restore_group(directory: Path, group: str) -> dict[str, np.ndarray]:
    """The arrays of one group.

    Raises:
      CheckpointError: the group is missing or damaged.
    """
    path = (directory / ARRAYS / group).resolve()
    try:
        with _checkpointer() as checkpointer:
            restored: dict[str, Any] = checkpointer.restore(path)
    except Exception as error:  # orbax and its storage layers raise errors of many kinds
        raise CheckpointError(group, f"{error!r} in {path}", "a complete orbax checkpoint", _REMEDY) from error
    return {key: np.asarray(array) for key, array in restored.items()}


def content_digest(array: np.ndarray) -> str:
    """SHA-256 of an array's bytes in row order."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()


class ConvertedStorage:
    """The arrays of a converted checkpoint. Whole groups are restored and checked; the last few are kept."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._kept: OrderedDict[str, dict[str, np.ndarray]] = OrderedDict()
        self._digests: dict[str, dict[str, str]] = {}
        for parts in manifest.arrays.values():
            for part in (part for array in parts.values() for part in array.parts):
                self._digests.setdefault(part.group, {})[part.key] = part.digest

    @classmethod
    def open(cls, directory: Path) -> ConvertedStorage:
        """Open a converted checkpoint.

        Raises:
          CheckpointError: its manifest is missing or damaged.
        """
        return cls(directory, read_manifest(directory))

    @functools.cached_property
    def digests(self) -> Digests:
        """The digests of the released tensors that were converted.

        Raises:
          CheckpointError: the sidecar that conversion writes is missing or damaged.
        """
        digests = read_digests(self.directory)
        if digests is None:
            path = self.directory / DIGEST_FILE
            raise CheckpointError(str(path), "missing", "the digest sidecar that conversion writes", _REMEDY)
        return digests

    @functools.cached_property
    def entries(self) -> Mapping[str, TensorEntry]:
        """The released tensors that were converted, as the digest sidecar lists them."""
        path = self.directory / DIGEST_FILE
        return {
            name: TensorEntry(name, tensor.dtype, tensor.shape, path, 0, tensor.size)
            for name, tensor in self.digests.tensors.items()
        }

    def verify(self, progress: Progress = silent) -> WeightsId:
        """Check all arrays; the weights id.

        Raises:
          CheckpointError: an array is missing or differs from its digest; names it, its group and both digests.
        """
        with progress(len(self._digests), " groups") as step:
            for group, digests in self._digests.items():
                check_group(self.directory, group, restore_group(self.directory, group), digests)
                step()
        return self.digests.weights_id

    def pieces(self, item: Parameter, stack: int) -> list[Piece]:
        """The rows of a parameter, or of its ``stack``-th stacked matrix, as one piece.

        Raises:
          CheckpointError: the array is missing or has another shape; names it and what was expected.
        """
        name = array_name(item)
        stored = self.manifest.arrays.get(name)
        if stored is None:
            accepted = f"an array of shape {item.shape} in {self.directory / MANIFEST_FILE}"
            raise CheckpointError(name, "missing", accepted, _REMEDY)
        rows = {part: self._rows(name, item, part, array, stack) for part, array in stored.items()}
        shape = item.shape[1:] if item.stacked else item.shape
        found = " and ".join(f"{array.dtype} {array.shape}" for array in stored.values())
        location = f"{found} in {self.directory / MANIFEST_FILE}"
        if set(stored) == {Part.VALUES}:
            return [Piece(name, shape, location, rows[Part.VALUES], None)]
        if set(stored) == {Part.DATA, Part.SCALE}:
            return [Piece(name, shape, location, rows[Part.DATA], rows[Part.SCALE])]
        raise CheckpointError(name, [part.value for part in stored], "values, or data and scale", _REMEDY)

    def _rows(self, name: str, item: Parameter, part: Part, array: StoredArray, stack: int) -> Rows:
        expected = part.shape(item, item.shape)
        if array.shape != expected:
            where = f"shape {array.shape} in {self.directory / MANIFEST_FILE}"
            raise CheckpointError(name, where, f"shape {expected}", _REMEDY)
        offset = stack * expected[1] if item.stacked else 0
        return lambda start, stop: self._read(array, offset + start, offset + stop)

    def _read(self, array: StoredArray, start: int, stop: int) -> np.ndarray:
        firsts = array.first_rows
        row = array.shape[-1:] if len(array.shape) > 1 else ()
        found = []
        for number in range(bisect.bisect_right(firsts, start) - 1, bisect.bisect_left(firsts, stop)):
            part, first = array.parts[number], firsts[number]
            content = self._group(part.group)[part.key].reshape(-1, *row)
            found.append(content[max(0, start - first) : stop - first])
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _group(self, group: str) -> dict[str, np.ndarray]:
        if group in self._kept:
            self._kept.move_to_end(group)
            return self._kept[group]
        while len(self._kept) >= _GROUPS_KEPT:
            self._kept.popitem(last=False)
        content = restore_group(self.directory, group)
        check_group(self.directory, group, content, self._digests[group])
        self._kept[group] = content
        return content


def check_group(directory: Path, group: str, content: Mapping[str, np.ndarray], digests: Mapping[str, str]) -> None:
    """Compare a restored group with its digests.

    Raises:
      CheckpointError: a part is missing or differs; names it, its directory and both digests.
    """
    for key, expected in digests.items():
        found = f"SHA-256 {content_digest(content[key])}" if key in content else "missing"
        if found != f"SHA-256 {expected}":
            accepted = f"SHA-256 {expected}, by {MANIFEST_FILE}"
            raise CheckpointError(key, f"{found} in {directory / ARRAYS / group}", accepted, _REMEDY)


def _stored_array(document: Mapping[str, Any]) -> StoredArray:
    parts = tuple(
        StoredPart(
            group=str(part["group"]),
            key=str(part["key"]),
            bounds=tuple((int(start), int(stop)) for start, stop in part["bounds"]),
            digest=str(part["digest"]),
        )
        for part in document["parts"]
    )
    array = StoredArray(str(document["dtype"]), tuple(map(int, document["shape"])), parts)
    # A damaged manifest must lead neither out of the directory nor to rows that no part holds.
    if any(Path(part.group).name != part.group for part in parts):
        raise ValueError("groups are directories beside each other")
    if sum(math.prod(lengths(part.bounds)) for part in parts) != math.prod(array.shape):
        raise ValueError(f"the parts do not make up shape {array.shape}")
    return array


def _checkpointer() -> ocp.Checkpointer:
    """A checkpointer of this process alone: processes restore different groups, and none waits for another."""
    options = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)
