"""Reading checkpoints of either layout into parameter trees, onto any devices.

What to read follows from the parameter descriptions alone. Every device gets its own slices and nothing else is read;
host memory beside the arrays stays below a few hundred megabytes whatever the size of a tensor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Int32

from deepinfer_jax.checkpoint.converted import MANIFEST_FILE, ConvertedStorage, array_name
from deepinfer_jax.checkpoint.device_arrays import Fill, place
from deepinfer_jax.checkpoint.pieces import Bounds, Piece, Plane, Storage, fill, lengths
from deepinfer_jax.checkpoint.released import PLAIN_DTYPES, ReleasedStorage
from deepinfer_jax.checkpoint.safetensors import TensorEntry
from deepinfer_jax.checkpoint.subset import Subset, everything
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError, InputError
from deepinfer_jax.model.params import Leaf, Parameter, Stored, map_parameters, parameters, scale_name
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.text.compressed_vocabulary import compressed_token_map
from deepinfer_jax.text.tokenizer import Tokenizer
from pallas_kernels import PackedWeight

# Directory of a conversion's own notes; it vanishes when the conversion is complete.
UNFINISHED = "conversion"
# Tensors that some exporters write although they are tied to the backbone's; reading drops them.
_TIED = (".embed.weight", ".head.weight")

Shardings = Callable[[Parameter], Sharding | PackedWeight] | Model
"""A sharding for every parameter, by a function or as a tree; of a packed weight one for both arrays, or one each."""


@runtime_checkable
class Entries(Protocol):
    """Anything that lists released tensors by name."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Every tensor by its name, without a ``model.`` prefix."""


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How a checkpoint's tensors compare with what a configuration describes.

    ``described`` and ``present`` are tensor counts; ``tied`` copies are ignored, ``extra`` tensors belong to nothing.
    """

    described: int
    present: int
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    tied: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether everything described is present."""
        return not self.missing


def load_model(
    directory: Path | str,
    numerics: Numerics,
    shardings: Shardings | None = None,
    progress: Callable[[str], None] | None = None,
    subset: Subset = everything,
    padded: Model | None = None,
    form: Callable[[Parameter, Leaf], Leaf] = lambda item, array: array,
) -> tuple[ModelConfig, Model]:
    """Read a checkpoint directory, of the released or the converted layout, as unrolled parameters.

    Args:
      directory: the checkpoint; what is read is checked against its digests, where it has them.
      numerics: the form of the parameters on the devices.
      shardings: where they go; None means the default device. A tree has the structure of
        :func:`deepinfer_jax.model.params.abstract` with shardings as leaves.
      progress: called with the name of every parameter's first tensor as it is read.
      subset: which parameters to read; the others are None in the result.
      padded: the description of all parameters with some axes longer than they are stored, so that a layout divides
        them (:func:`deepinfer_jax.parallel.layouts.padded`); what is added is zero.
      form: applied to every array once it is read (:func:`deepinfer_jax.model.params.backend_form`).

    Raises:
      ConfigError: ``config.json`` is missing or not accepted.
      CheckpointError: a tensor is missing, misshapen, of another dtype, damaged, or belongs to nothing; names tensor,
        file and what was expected.
      InputError: a sharding does not divide its array.
    """
    directory = Path(directory)
    config = ModelConfig.from_directory(directory)
    described = Model.describe(config)
    storage = open_storage(directory)
    wanted = [item for item in parameters(described) if item.released and subset(item, config)]
    check_names(described, wanted, storage)
    for item in wanted:
        check_parameter(item, storage, numerics)

    def read(item: Parameter, target: Parameter, sharding: Any) -> Leaf:
        if not subset(item, config):
            return None
        if item.stored is Stored.DERIVED:
            values = token_map(directory, config)
            return form(item, _place(target, Plane.VALUES, values.dtype, sharding, functools.partial(_copy, values)))
        if progress is not None:
            progress(item.released[0][0])
        return form(item, read_parameter(item, storage, numerics, sharding, target.shape))

    if shardings is None:
        shardings = map_parameters(lambda item: None, described)
    elif callable(shardings):
        shardings = map_parameters(shardings, described)
    whole = (described, padded or described, shardings)
    return config, jax.tree.map(read, *whole, is_leaf=lambda leaf: isinstance(leaf, Parameter))


def open_storage(directory: Path) -> ReleasedStorage | ConvertedStorage:
    """Open a checkpoint directory of either layout; the manifest of converted arrays tells them apart.

    Raises:
      CheckpointError: files are missing, damaged, or an unfinished conversion.
    """
    if (directory / MANIFEST_FILE).is_file():
        return ConvertedStorage.open(directory)
    if (directory / UNFINISHED).is_dir():
        raise CheckpointError(
            str(directory), "an unfinished conversion", f"a directory with {MANIFEST_FILE}", "run the conversion again"
        )
    return ReleasedStorage.open(directory)


def coverage(described: Model, files: Entries) -> Coverage:
    """Compare a checkpoint's tensor names with a described tree. Quantised weights need their scale beside them."""
    wanted: dict[str, None] = {}
    for item in parameters(described):
        wanted |= dict.fromkeys(_tensor_names(item, files))
    unwanted = [name for name in files.entries if name not in wanted]
    tied = [name for name in unwanted if name.startswith("mtp.") and name.endswith(_TIED)]
    return Coverage(
        described=len(wanted),
        present=len(files.entries),
        missing=tuple(name for name in wanted if name not in files.entries),
        extra=tuple(name for name in unwanted if name not in tied),
        tied=tuple(tied),
    )


def check_names(described: Model, wanted: list[Parameter], storage: ReleasedStorage | ConvertedStorage) -> None:
    """Check that nothing wanted is missing, and that nothing is there which no parameter is made of.

    Raises:
      CheckpointError: names the first missing or extra tensor, and its file.
    """
    if isinstance(storage, ConvertedStorage):
        known = {array_name(item) for item in parameters(described) if item.released}
        extra = {name: storage.directory / MANIFEST_FILE for name in storage.manifest.arrays if name not in known}
    else:
        covered = coverage(described, storage)
        needed = {name for item in wanted for name in _tensor_names(item, storage)}
        for name in covered.missing:
            if name in needed:
                directory = storage.files.directory
                raise CheckpointError(name, "missing", f"a tensor in {directory}, as {directory / 'config.json'} asks")
        extra = {name: storage.entries[name].file for name in covered.extra}
    for name, file in extra.items():
        remedy = "use the config.json that was released with these weights, or remove what it does not describe"
        raise CheckpointError(name, f"in {file}", "a tensor that config.json describes", remedy)


def check_parameter(item: Parameter, storage: Storage, numerics: Numerics) -> None:
    """Check that a parameter is stored in a form that these numerics can read, from descriptions alone.

    Raises:
      CheckpointError: a tensor is missing, misshapen, of another dtype, or cannot stay packed.
    """
    for stack in range(len(item.released) if item.stacked else 1):
        pieces = storage.pieces(item, stack)
        if item.packed(numerics):
            _check_packed(item, pieces)


def read_parameter(
    item: Parameter,
    storage: Storage,
    numerics: Numerics,
    sharding: Sharding | PackedWeight | None = None,
    shape: tuple[int, ...] | None = None,
) -> Array | PackedWeight:
    """One parameter: its tensors concatenated and stacked; packed, or dequantised in its device dtype.

    ``shape`` may be larger than the parameter's own; what is added is zero.
    """
    target = item if shape is None else dataclasses.replace(item, shape=shape)
    if not item.packed(numerics):
        assert not isinstance(sharding, PackedWeight)
        fill_values = functools.partial(_fill, storage, item, Plane.VALUES)
        return _place(target, Plane.VALUES, np.dtype(item.dtype(numerics)), sharding, fill_values)
    both = sharding if isinstance(sharding, PackedWeight) else item.pack(sharding, sharding, numerics)
    data, scale = (
        _place(target, plane, np.dtype(np.uint8), one, functools.partial(_fill, storage, item, plane))
        for plane, one in ((Plane.DATA, both.data), (Plane.SCALE, both.scale))
    )
    return item.pack(data, scale, numerics)


def token_map(directory: Path, config: ModelConfig) -> Int32[np.ndarray, " vocabulary"]:
    """The compressed id of every token, from the checkpoint's own tokenizer."""
    engram = config.engram
    assert engram is not None
    tokenizer = Tokenizer.from_directory(directory, vocab_size=config.vocab_size)
    return compressed_token_map(tokenizer, config.vocab_size, engram.pad_token_id, engram.compressed_vocab_size)


def _tensor_names(item: Parameter, files: Entries) -> list[str]:
    """The tensors that a parameter is made of, with scales except those of weights that are stored plain."""
    names = []
    for name in (piece for pieces in item.released for piece in pieces):
        names.append(name)
        if item.has_scale and not (name in files.entries and files.entries[name].dtype in PLAIN_DTYPES):
            names.append(scale_name(name))
    return names


def _check_packed(item: Parameter, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        if piece.scale is None:
            dtype = "I8" if item.stored is Stored.FP4_ROWS else "F8_E4M3"
            accepted = f"{dtype} {item.data_shape(piece.shape)} with its scale, where weights stay packed"
            raise CheckpointError(piece.name, piece.origin, accepted, "load it with numerics f32 or bf16")
        if len(pieces) > 1 and piece.shape[0] % item.scale_rows:
            raise CheckpointError(
                piece.name,
                piece.origin,
                f"rows in multiples of {item.scale_rows} where matrices are joined and stay packed, so that no scale "
                "belongs to both",
                "load it with numerics f32 or bf16",
            )


def _place(target: Parameter, plane: Plane, dtype: np.dtype, sharding: Sharding | None, fill: Fill) -> Array:
    shape = plane.shape(target, target.shape)
    if sharding is not None:
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            name = target.released[0][0] if target.released else "the token map"
            raise InputError(f"sharding of {name}", sharding, f"one that divides shape {shape} ({error})") from error
    return place(shape, dtype, sharding, fill)


def _fill(storage: Storage, item: Parameter, plane: Plane, out: np.ndarray, bounds: Bounds) -> None:
    """Fill a block of a parameter's array; beyond the end of what is stored it is zero."""
    stored = plane.shape(item, item.shape)
    inside = tuple((start, max(start, min(stop, end))) for (start, stop), end in zip(bounds, stored, strict=True))
    if inside != bounds:
        out[...] = 0
    if 0 not in lengths(inside):
        fill(out[tuple(map(slice, lengths(inside)))], storage, item, plane, inside)


def _copy(values: np.ndarray, out: np.ndarray, bounds: Bounds) -> None:
    part = values[tuple(slice(*one) for one in bounds)]
    if part.shape != out.shape:
        out[...] = 0
    out[tuple(map(slice, part.shape))] = part
