"""Conversion of a released checkpoint to the converted layout: bounded memory, resumable, verified.

The work is planned as bundles of at most 64 MiB, in the order of the parameter tree. A bundle is written, then noted in
``conversion/`` with the digests of what was written and of the released tensors it was made from; a conversion that was
interrupted goes on behind the last note. When every bundle is there, all of them are read back and compared, and only
then does the manifest make the directory a checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_jax.checkpoint.converted import (
    ARRAYS,
    BUNDLE_BYTES,
    MANIFEST_FILE,
    Manifest,
    StoredArray,
    StoredPart,
    array_name,
    file_digests,
    read_manifest,
    restore_bundle,
    save_bundle,
    write_manifest,
)
from deepinfer_jax.checkpoint.device_arrays import blocks
from deepinfer_jax.checkpoint.digest import (
    ChunkDigests,
    ContentCheck,
    Digests,
    read_digests,
    unverified_id,
    write_digests,
    write_json,
)
from deepinfer_jax.checkpoint.pieces import Bounds, Plane, fill, lengths, whole
from deepinfer_jax.checkpoint.progress import Progress, silent
from deepinfer_jax.checkpoint.reader import UNFINISHED, check_names, check_parameter
from deepinfer_jax.checkpoint.released import PLAIN_DTYPES, ReleasedStorage
from deepinfer_jax.checkpoint.safetensors import TensorFiles, open_directory
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError, InputError
from deepinfer_jax.model.params import Parameter, Stored, parameters
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import BF16, F32, RELEASED, Numerics

# Small files that make a checkpoint complete; the first is required.
COMPANIONS = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")

STORED_NUMERICS = (RELEASED.name, BF16.name, F32.name)
"""Numerics whose weights differ in form, by name."""

_PLAN_FILE = "plan.json"


@dataclasses.dataclass(frozen=True)
class PlannedPart:
    """A block of one array of a parameter, to be written under ``key``."""

    item: Parameter
    plane: Plane
    bounds: Bounds
    dtype: np.dtype
    key: str

    @property
    def bytes(self) -> int:
        """Size on disk, before compression."""
        return int(np.prod(lengths(self.bounds))) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Parts that are written together."""

    name: str
    parts: tuple[PlannedPart, ...]


@dataclasses.dataclass(frozen=True)
class Note:
    """What is known of a written bundle: digests of its parts by key, and of chunks of released tensors it covered."""

    parts: Mapping[str, str]
    tensors: ChunkDigests


def convert(
    source: Path,
    target: Path,
    numerics: Numerics | None = None,
    progress: Progress = silent,
) -> Digests:
    """Convert a checkpoint of the released layout; goes on where an earlier call was interrupted.

    Args:
      source: a checkpoint of the released layout.
      target: the directory to write, absent, empty, or an earlier conversion of the same source.
      numerics: the form to store; None means :func:`lossless_numerics`.
      progress: told of two phases, writing and verifying.

    Returns:
      The digests of the source, which are the target's too.

    Raises:
      ConfigError, CheckpointError: the source cannot be read, or what was written differs from what is read back.
      InputError: the target holds something else.
    """
    config = ModelConfig.from_directory(source)
    described = Model.describe(config)
    files = open_directory(source)
    storage = ReleasedStorage(files, ContentCheck(files, read_digests(source)))
    numerics = numerics or lossless_numerics(described, files)
    wanted = [item for item in parameters(described) if item.released]
    check_names(described, wanted, storage)
    for item in wanted:
        check_parameter(item, storage, numerics)
    conversion = Conversion(target, storage, numerics, tuple(plan(wanted, numerics)))
    if not conversion.begin():
        conversion.write(progress)
        conversion.finish(conversion.verify(progress))
    digests = read_digests(target)
    assert digests is not None
    return digests


def lossless_numerics(described: Model, files: TensorFiles) -> Numerics:
    """The most compact numerics whose stored form loses nothing of a checkpoint.

    Packed weights stay packed; a checkpoint that is plain, or plain in part, goes to bfloat16, which holds every
    product of a quantised element and its scale, unless it has float32 tensors where the release has others. So does
    one with joined matrices that would share a scale.
    """
    packable = True
    for item in parameters(described):
        for pieces in item.released:
            dtypes = {files.entries[name].dtype for name in pieces if name in files.entries}
            if "F32" in dtypes and item.stored is not Stored.F32:
                return F32
            shared = len(pieces) > 1 and item.piece_shape[0] % item.scale_rows > 0
            packable = packable and not (item.has_scale and (shared or dtypes & {*PLAIN_DTYPES}))
    return RELEASED if packable else BF16


def plan(items: list[Parameter], numerics: Numerics) -> Iterator[Bundle]:
    """The bundles of a conversion; a bundle holds parts of one layer, or of one part of the model beside the layers."""
    section, open_parts, size, number = "", list[PlannedPart](), 0, 0
    for part in (part for item in items for part in _parts(item, numerics)):
        next_section = _section(array_name(part.item))
        if open_parts and (next_section != section or size + part.bytes > BUNDLE_BYTES):
            yield Bundle(f"{section}-{number:05d}", tuple(open_parts))
            open_parts, size, number = [], 0, number + 1
        section = next_section
        open_parts.append(part)
        size += part.bytes
    if open_parts:
        yield Bundle(f"{section}-{number:05d}", tuple(open_parts))


class Conversion:
    """One conversion under way: its plan, and the notes about finished bundles that are kept beside them."""

    def __init__(self, target: Path, storage: ReleasedStorage, numerics: Numerics, bundles: tuple[Bundle, ...]) -> None:
        assert storage.content is not None
        self.target = target
        self.notes = target / UNFINISHED
        self.bundles = bundles
        self._storage = storage
        self._content = storage.content
        self._numerics = numerics

    def begin(self) -> bool:
        """Prepare the directory; True where it is a complete conversion of this source already.

        Raises:
          InputError: the directory holds something else, or a conversion of another source or to another form.
        """
        source = unverified_id(self._storage.files).value
        identity = {
            "source": source,
            "numerics": self._numerics.name,
            "bundles": [bundle.name for bundle in self.bundles],
        }
        if (self.target / MANIFEST_FILE).is_file():
            found = read_manifest(self.target)
            if (found.numerics, found.source) != (self._numerics.name, source):
                self._refuse("a conversion of another checkpoint, or to other numerics")
            shutil.rmtree(self.notes, ignore_errors=True)
            return True
        planned = self.notes / _PLAN_FILE
        if not planned.is_file():
            if self.target.is_dir() and any(path.name != UNFINISHED for path in self.target.iterdir()):
                self._refuse("a directory that is not empty")
            self.notes.mkdir(parents=True, exist_ok=True)
            write_json(planned, identity)
        elif json.loads(planned.read_bytes()) != identity:
            self._refuse("an unfinished conversion of another checkpoint, or to other numerics")
        for name in COMPANIONS:
            if (self._storage.files.directory / name).is_file():
                shutil.copyfile(self._storage.files.directory / name, self.target / name)
        return False

    def write(self, progress: Progress) -> None:
        """Write every bundle that has no note yet, and its note behind it."""
        finished = {bundle.name: note for bundle in self.bundles if (note := self._note(bundle)) is not None}
        for note in finished.values():
            self._content.recall(note.tensors)
        self._remove_leftovers(finished)
        left = [bundle for bundle in self.bundles if bundle.name not in finished]
        with progress(len(left), " bundles written") as step:
            for bundle in left:
                self._write_bundle(bundle)
                step()

    def verify(self, progress: Progress) -> dict[str, dict[str, str]]:
        """Read every bundle back and compare it with its note. The note of one that differs is removed.

        Returns:
          The digests of the files of every bundle.

        Raises:
          CheckpointError: a bundle cannot be restored or differs; names it and both digests.
        """
        files = {}
        with progress(len(self.bundles), " bundles verified") as step:
            for bundle in self.bundles:
                note = self._note(bundle)
                assert note is not None
                try:
                    _compare(self.target, bundle, note)
                except CheckpointError:
                    self._note_file(bundle).unlink()
                    raise
                files[bundle.name] = file_digests(self.target, bundle.name)
                step()
        return files

    def finish(self, files: dict[str, dict[str, str]]) -> None:
        """Complete the checkpoint: the digests, and last the manifest."""
        write_digests(self.target, self._content.digests())
        write_manifest(self.target, self._manifest(files))
        shutil.rmtree(self.notes)

    def _write_bundle(self, bundle: Bundle) -> None:
        tree = {}
        for part in bundle.parts:
            block = np.empty(lengths(part.bounds), part.dtype)
            fill(block, self._storage, part.item, part.plane, part.bounds)
            tree[part.key] = block
        save_bundle(self.target, bundle.name, tree)
        note = Note({key: _content_digest(block) for key, block in tree.items()}, self._content.take_new())
        write_json(self._note_file(bundle), dataclasses.asdict(note))

    def _remove_leftovers(self, finished: Mapping[str, Note]) -> None:
        """What an interrupted run left of bundles that have no note: orbax writes under a temporary name first."""
        arrays = self.target / ARRAYS
        for path in arrays.iterdir() if arrays.is_dir() else ():
            if path.name not in finished:
                shutil.rmtree(path)

    def _note(self, bundle: Bundle) -> Note | None:
        file = self._note_file(bundle)
        if not file.is_file():
            return None
        document: dict[str, Any] = json.loads(file.read_bytes())
        chunks = {
            name: {int(chunk): digest for chunk, digest in one.items()} for name, one in document["tensors"].items()
        }
        return Note(document["parts"], chunks)

    def _note_file(self, bundle: Bundle) -> Path:
        return self.notes / f"{bundle.name}.json"

    def _manifest(self, files: dict[str, dict[str, str]]) -> Manifest:
        arrays: dict[str, dict[Plane, StoredArray]] = {}
        for bundle in self.bundles:
            for planned in bundle.parts:
                part = StoredPart(bundle.name, planned.key, planned.bounds)
                shape = planned.plane.shape(planned.item, planned.item.shape)
                of_parameter = arrays.setdefault(array_name(planned.item), {})
                array = of_parameter.get(planned.plane, StoredArray(planned.dtype.name, shape, ()))
                of_parameter[planned.plane] = dataclasses.replace(array, parts=(*array.parts, part))
        return Manifest(self._numerics.name, unverified_id(self._storage.files).value, arrays, files)

    def _refuse(self, found: str) -> None:
        accepted = "an absent or empty directory, or an earlier conversion of the same checkpoint to the same numerics"
        raise InputError(str(self.target), found, accepted, "choose another directory or remove this one")


def _compare(target: Path, bundle: Bundle, note: Note) -> None:
    content = restore_bundle(target, bundle.name)
    for part in bundle.parts:
        found = f"SHA-256 {_content_digest(content[part.key])}" if part.key in content else "missing"
        if found != f"SHA-256 {note.parts[part.key]}":
            accepted = f"SHA-256 {note.parts[part.key]}, as written to {target / ARRAYS / bundle.name}"
            raise CheckpointError(part.key, found, accepted, "run the conversion again")


def _content_digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def _parts(item: Parameter, numerics: Numerics) -> Iterator[PlannedPart]:
    packed = item.packed(numerics)
    for plane in (Plane.DATA, Plane.SCALE) if packed else (Plane.VALUES,):
        dtype = np.dtype(np.uint8) if packed else np.dtype(item.dtype(numerics))
        shape = plane.shape(item, item.shape)
        for number, bounds in enumerate(blocks(whole(shape), dtype.itemsize, BUNDLE_BYTES)):
            yield PlannedPart(item, plane, bounds, dtype, f"{array_name(item)}.{plane.value}.{number}")


def _section(name: str) -> str:
    """``layers.N`` or ``mtp.N`` for what belongs to a layer, else the first part of a name."""
    pieces = name.split(".")
    return ".".join(pieces[:2]) if pieces[0] in ("layers", "mtp") else pieces[0]
