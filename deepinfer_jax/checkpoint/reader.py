"""Reading a checkpoint of the released layout into parameter trees.

What to read follows from the parameter descriptions alone: names, shapes, how tensors are stored and how they combine.
A tensor described as quantised may also be stored in bfloat16 or float32, as in converted checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from deepinfer_jax.checkpoint.safetensors import TensorFiles, open_directory
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.params import Parameter, Stored, map_parameters, parameters, scale_name
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.quant import dequantise_fp4_rows, dequantise_fp8_blocks, dequantise_fp8_rows
from deepinfer_jax.text.compressed_vocabulary import compressed_token_map
from deepinfer_jax.text.tokenizer import Tokenizer
from pallas_kernels import PackedWeight

_PLAIN_DTYPES = ("BF16", "F32")
# Tensors that some exporters write although they are tied to the backbone's; reading drops them.
_TIED = (".embed.weight", ".head.weight")


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
    directory: Path | str, numerics: Numerics, progress: Callable[[str], None] | None = None
) -> tuple[ModelConfig, Model]:
    """Read a checkpoint directory, dequantised to the numerics' dtype, as unrolled parameters.

    ``progress`` is called with the name of every parameter's first tensor as it is read.

    Raises:
      ConfigError: ``config.json`` is missing or not accepted.
      CheckpointError: a tensor is missing, misshapen or of another dtype; names tensor, file and what was expected.
    """
    directory = Path(directory)
    config = ModelConfig.from_directory(directory)
    files = open_directory(directory)
    described = Model.describe(config)
    first_missing = coverage(described, files).missing[:1]
    if first_missing:
        raise CheckpointError(
            first_missing[0], "missing", f"a tensor in {directory}, as {directory / 'config.json'} asks"
        )

    def read(item: Parameter) -> Array | PackedWeight:
        if item.stored is Stored.DERIVED:
            return jnp.asarray(token_map(directory, config))
        if progress is not None:
            progress(item.released[0][0])
        return read_parameter(item, files, numerics)

    return config, map_parameters(read, described)


def coverage(described: Model, files: TensorFiles) -> Coverage:
    """Compare a checkpoint's tensor names with a described tree. Quantised weights need their scale beside them."""
    wanted: set[str] = set()
    missing: list[str] = []
    for item in parameters(described):
        for name in (piece for pieces in item.released for piece in pieces):
            names = [name]
            if item.has_scale and not (name in files.entries and files.entries[name].dtype in _PLAIN_DTYPES):
                names.append(scale_name(name))
            wanted.update(names)
            missing += [one for one in names if one not in files.entries]
    unwanted = [name for name in files.entries if name not in wanted]
    tied = [name for name in unwanted if name.startswith("mtp.") and name.endswith(_TIED)]
    return Coverage(
        described=len(wanted),
        present=len(files.entries),
        missing=tuple(missing),
        extra=tuple(name for name in unwanted if name not in tied),
        tied=tuple(tied),
    )


def read_parameter(item: Parameter, files: TensorFiles, numerics: Numerics) -> Array | PackedWeight:
    """One parameter: its tensors read, concatenated and stacked; packed, or dequantised in its device dtype.

    Pieces are written one by one into the result, so that nothing but the result and one piece is held.
    """

    def assemble(shape: tuple[int, ...], dtype: np.dtype, read: Callable[[str], np.ndarray]) -> Array:
        result = np.empty(shape, dtype)
        for stack, pieces in zip(result if item.stacked else result[None], item.released, strict=True):
            rows = stack.shape[0] // len(pieces)
            for part, name in enumerate(pieces):
                stack[part * rows : (part + 1) * rows] = read(name)
        return jnp.asarray(result)

    if not item.packed(numerics):
        dtype = np.dtype(item.dtype(numerics))
        return assemble(item.shape, dtype, lambda name: read_tensor(name, item, files))
    data = assemble(item.data_shape(item.shape), np.dtype(np.uint8), lambda name: read_packed(name, item, files)[0])
    scale = assemble(item.scale_shape(item.shape), np.dtype(np.uint8), lambda name: read_packed(name, item, files)[1])
    return item.pack(data, scale, numerics)


def read_tensor(name: str, item: Parameter, files: TensorFiles) -> np.ndarray:
    """One released tensor of a parameter as float values (bfloat16 or float32), checked against its description.

    Raises:
      CheckpointError: wrong shape or dtype; names the tensor, its file and what was expected.
    """
    entry = files.entries[name]
    if entry.dtype in _PLAIN_DTYPES:
        if entry.shape != item.piece_shape:
            raise CheckpointError(name, f"shape {entry.shape} in {entry.file}", f"shape {item.piece_shape}")
        return files.raw(name)
    dequantise = {
        Stored.FP8_BLOCKS: dequantise_fp8_blocks,
        Stored.FP8_ROWS: dequantise_fp8_rows,
        Stored.FP4_ROWS: dequantise_fp4_rows,
    }.get(item.stored)
    if dequantise is None:
        raise CheckpointError(name, f"dtype {entry.dtype} in {entry.file}", "BF16 or F32")
    return dequantise(*read_packed(name, item, files))


def read_packed(name: str, item: Parameter, files: TensorFiles) -> tuple[np.ndarray, np.ndarray]:
    """The stored bytes and scales of one released tensor, checked against its description; views, nothing is copied.

    Raises:
      CheckpointError: wrong shape or dtype; names the tensor, its file and what was expected.
    """
    scale = scale_name(name)
    dtypes = ("I8",) if item.stored is Stored.FP4_ROWS else ("F8_E4M3",)
    shape = item.piece_shape
    for tensor, accepted, expected in (
        (name, dtypes, item.data_shape(shape)),
        (scale, ("F8_E8M0", "U8"), item.scale_shape(shape)),
    ):
        entry = files.entries.get(tensor)
        if entry is None:
            raise CheckpointError(tensor, "missing", f"{accepted[0]} {expected} beside {name}, which is quantised")
        if entry.shape != expected or entry.dtype not in accepted:
            found = f"{entry.dtype} {entry.shape} in {entry.file}"
            raise CheckpointError(tensor, found, f"{accepted[0]} {expected}")
    return files.raw(name).view(np.uint8), files.raw(scale)


def token_map(directory: Path, config: ModelConfig) -> np.ndarray:
    """int32 ``[vocab_size]``: the compressed id of every token, from the checkpoint's own tokenizer."""
    engram = config.engram
    assert engram is not None
    tokenizer = Tokenizer.from_directory(directory, vocab_size=config.vocab_size)
    return compressed_token_map(tokenizer, config.vocab_size, engram.pad_token_id, engram.compressed_vocab_size)
