"""The converted layout: the arrays of parameters as orbax checkpoints, listed in one manifest.

Arrays larger than a bundle are cut into parts, contiguous in row order, so that a reader of a slice restores the parts
it touches and no more. Every bundle of parts is an orbax checkpoint of its own below ``arrays/``, a flat tree of NumPy
arrays. An array is named by the first released tensor it holds. The manifest has a digest of every file of a bundle;
a bundle's files are compared with them before the bundle is restored (see docs/formats.md).
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
from deepinfer_jax.checkpoint.pieces import Bounds, Piece, Plane, Rows, lengths
from deepinfer_jax.checkpoint.progress import Progress, silent
from deepinfer_jax.checkpoint.safetensors import TensorEntry
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.params import Parameter

MANIFEST_FILE = "arrays.json"
ARRAYS = "arrays"
BUNDLE_BYTES = 1 << 26
"""Most bytes of an orbax checkpoint, unless a single row is larger."""

_HEADER = {"format": "deepinfer-jax arrays", "version": 1}
_REMEDY = "convert the checkpoint again"
_BUNDLES_KEPT = 3  # a packed parameter is read from two arrays in turn, whose parts lie in different bundles


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """A block of an array: the bundle it lies in, its key there, and its place in the array."""

    bundle: str
    key: str
    bounds: Bounds


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array and its parts in row order."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    @property
    def row_size(self) -> int:
        """Elements of a row; a vector has rows of one."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @functools.cached_property
    def first_rows(self) -> tuple[int, ...]:
        """Where each part begins, counting the rows of all leading axes in order."""
        rows = self.shape[:-1] if len(self.shape) > 1 else self.shape
        corners = ([start for start, _ in part.bounds] for part in self.parts)
        return tuple(int(np.ravel_multi_index(corner[: len(rows)], rows)) for corner in corners)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All arrays by parameter, and the SHA-256 of all files by bundle and path.

    ``numerics`` names the form they were converted to, ``source`` is the unverified id of what they were made from.
    """

    numerics: str
    source: str
    arrays: Mapping[str, Mapping[Plane, StoredArray]]
    bundles: Mapping[str, Mapping[str, str]]


def array_name(item: Parameter) -> str:
    """The name of a parameter in the converted layout; it does not depend on the structure of parameter trees."""
    return item.released[0][0]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of a directory; with it the directory is a complete checkpoint."""
    arrays = {
        name: {plane.value: dataclasses.asdict(array) for plane, array in planes.items()}
        for name, planes in manifest.arrays.items()
    }
    content = {"numerics": manifest.numerics, "source": manifest.source, "arrays": arrays, "bundles": manifest.bundles}
    write_json(directory / MANIFEST_FILE, _HEADER | content)


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
            str(name): {Plane(plane): _stored_array(array) for plane, array in planes.items()}
            for name, planes in document["arrays"].items()
        }
        bundles = {
            str(bundle): {str(file): str(digest) for file, digest in files.items()}
            for bundle, files in document["bundles"].items()
        }
        _check_bundles(arrays, bundles)
        manifest = Manifest(str(document["numerics"]), str(document["source"]), arrays, bundles)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(str(path), repr(error), "a manifest of converted arrays", _REMEDY) from error
    if header != _HEADER:
        raise CheckpointError(str(path), header, f"{_HEADER}", _REMEDY)
    return manifest


def save_bundle(directory: Path, bundle: str, tree: Mapping[str, np.ndarray]) -> None:
    """Write one bundle; it appears complete or not at all. An earlier one of that name is replaced."""
    with _checkpointer() as checkpointer:
        checkpointer.save((directory / ARRAYS / bundle).resolve(), dict(tree), force=True)


def restore_bundle(directory: Path, bundle: str) -> dict[str, np.ndarray]:
    """The arrays of one bundle.

    Raises:
      CheckpointError: the bundle is missing or damaged.
    """
    path = (directory / ARRAYS / bundle).resolve()
    try:
        with _checkpointer() as checkpointer:
            restored: dict[str, Any] = checkpointer.restore(path)
    except Exception as error:  # orbax and its storage layers raise errors of many kinds
        raise CheckpointError(bundle, repr(error), f"a complete orbax checkpoint in {path}", _REMEDY) from error
    return {key: np.asarray(array) for key, array in restored.items()}


def file_digests(directory: Path, bundle: str) -> dict[str, str]:
    """SHA-256 of every file of a bundle, by its path inside."""
    root = directory / ARRAYS / bundle
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): _file_digest(path) for path in files}


def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class ConvertedStorage:
    """The arrays of a converted checkpoint. Bundles are checked and restored as a whole; the last few are kept."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._checked: set[str] = set()
        self._kept: OrderedDict[str, dict[str, np.ndarray]] = OrderedDict()

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
        """Check the files of all bundles; the weights id.

        Raises:
          CheckpointError: a file is missing or differs from its digest; names it, an array in it and both digests.
        """
        with progress(len(self.manifest.bundles), " bundles") as step:
            for planes in self.manifest.arrays.values():
                for part in (part for array in planes.values() for part in array.parts):
                    if part.bundle not in self._checked:
                        self._check_files(part)
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
        rows = {plane: self._rows(name, item, plane, array, stack) for plane, array in stored.items()}
        shape = item.shape[1:] if item.stacked else item.shape
        found = " and ".join(f"{array.dtype} {array.shape}" for array in stored.values())
        location = f"{found} in {self.directory / MANIFEST_FILE}"
        if set(stored) == {Plane.VALUES}:
            return [Piece(name, shape, location, rows[Plane.VALUES], None)]
        if set(stored) == {Plane.DATA, Plane.SCALE}:
            return [Piece(name, shape, location, rows[Plane.DATA], rows[Plane.SCALE])]
        accepted = f"values, or data and scale, in {self.directory / MANIFEST_FILE}"
        raise CheckpointError(name, [plane.value for plane in stored], accepted, _REMEDY)

    def _rows(self, name: str, item: Parameter, plane: Plane, array: StoredArray, stack: int) -> Rows:
        expected = plane.shape(item, item.shape)
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
            content = self._restored(part).reshape(-1, *row)
            found.append(content[max(0, start - first) : stop - first])
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _restored(self, part: StoredPart) -> np.ndarray:
        if part.bundle not in self._kept:
            if part.bundle not in self._checked:
                self._check_files(part)
            while len(self._kept) >= _BUNDLES_KEPT:
                self._kept.popitem(last=False)
            self._kept[part.bundle] = restore_bundle(self.directory, part.bundle)
        self._kept.move_to_end(part.bundle)
        content = self._kept[part.bundle].get(part.key)
        if content is None or content.shape != lengths(part.bounds):
            found = "missing" if content is None else f"shape {content.shape}"
            accepted = f"shape {lengths(part.bounds)} in {self.directory / ARRAYS / part.bundle}, by {MANIFEST_FILE}"
            raise CheckpointError(part.key, found, accepted, _REMEDY)
        return content

    def _check_files(self, part: StoredPart) -> None:
        for name, expected in self.manifest.bundles[part.bundle].items():
            path = self.directory / ARRAYS / part.bundle / name
            found = f"SHA-256 {_file_digest(path)}" if path.is_file() else "missing"
            if found != f"SHA-256 {expected}":
                raise CheckpointError(part.key, found, f"SHA-256 {expected} of {path}, by {MANIFEST_FILE}", _REMEDY)
        self._checked.add(part.bundle)


def _stored_array(document: Mapping[str, Any]) -> StoredArray:
    parts = tuple(
        StoredPart(
            str(part["bundle"]), str(part["key"]), tuple((int(start), int(stop)) for start, stop in part["bounds"])
        )
        for part in document["parts"]
    )
    return StoredArray(str(document["dtype"]), tuple(map(int, document["shape"])), parts)


def _check_bundles(arrays: Mapping[str, Mapping[Plane, StoredArray]], bundles: Mapping[str, Mapping[str, str]]) -> None:
    """A damaged manifest must lead neither out of the directory nor to rows that no part holds."""
    for bundle, files in bundles.items():
        if Path(bundle).name != bundle or any(Path(file).is_absolute() or ".." in Path(file).parts for file in files):
            raise ValueError(f"bundle {bundle!r} is not a directory below {ARRAYS}")
    for array in (array for planes in arrays.values() for array in planes.values()):
        end = 0
        for part, first in zip(array.parts, array.first_rows, strict=True):
            if part.bundle not in bundles or first != end:
                raise ValueError(f"part {part.key!r} lies in no bundle, or not behind the part before it")
            end += math.prod(lengths(part.bounds)) // array.row_size
        if end * array.row_size != math.prod(array.shape):
            raise ValueError(f"the parts do not make up shape {array.shape}")


def _checkpointer() -> ocp.Checkpointer:
    """A checkpointer of this process alone: processes restore different bundles, and none waits for another."""
    options = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)
