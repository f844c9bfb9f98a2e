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

    def read(item: Parameter) -> Array:
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


def read_parameter(item: Parameter, files: TensorFiles, numerics: Numerics) -> Array:
    """One parameter: its tensors read, dequantised, concatenated and stacked, in its device dtype.

    Pieces are written one by one into the result, so that nothing but the result and one piece is held.
    """
    dtype = np.dtype(item.dtype(numerics))
    result = np.empty(item.shape, dtype)
    stacks = result if item.stacked else result[None]
    rows = item.piece_shape[0]
    for stack, pieces in zip(stacks, item.released, strict=True):
        for part, name in enumerate(pieces):
            stack[part * rows : (part + 1) * rows] = read_tensor(name, item.piece_shape, item.stored, files)
    return jnp.asarray(result)


def read_tensor(name: str, shape: tuple[int, ...], stored: Stored, files: TensorFiles) -> np.ndarray:
    """One released tensor as float values (bfloat16 or float32), checked against its description.

    Raises:
      CheckpointError: wrong shape or dtype; names the tensor, its file and what was expected.
    """
    entry = files.entries[name]
    packed = stored is Stored.FP4_ROWS and entry.dtype == "I8"
    on_file = (*shape[:-1], shape[-1] // 2) if packed else shape
    if entry.shape != on_file:
        raise CheckpointError(name, f"shape {entry.shape} in {entry.file}", f"shape {on_file}")
    raw = files.raw(name)
    if entry.dtype in _PLAIN_DTYPES:
        return raw
    reads = {
        ("F8_E4M3", Stored.FP8_BLOCKS): dequantise_fp8_blocks,
        ("F8_E4M3", Stored.FP8_ROWS): dequantise_fp8_rows,
        ("I8", Stored.FP4_ROWS): dequantise_fp4_rows,
    }
    dequantise = reads.get((entry.dtype, stored))
    if dequantise is None:
        raise CheckpointError(name, f"dtype {entry.dtype} in {entry.file}", f"BF16, F32, or {stored.value}")
    return dequantise(raw, _read_scale(name, shape, stored, files))


def _read_scale(name: str, shape: tuple[int, ...], stored: Stored, files: TensorFiles) -> np.ndarray:
    scale = scale_name(name)
    rows = -(-shape[0] // 32) if stored is Stored.FP8_BLOCKS else shape[0]
    expected = (rows, -(-shape[1] // 32))
    entry = files.entries[scale]
    if entry.shape != expected or entry.dtype not in ("F8_E8M0", "U8"):
        found = f"{entry.dtype} {entry.shape} in {entry.file}"
        raise CheckpointError(scale, found, f"F8_E8M0 {expected}, one scale per 32 inputs of {name}")
    return files.raw(scale)


def token_map(directory: Path, config: ModelConfig) -> np.ndarray:
    """int32 ``[vocab_size]``: the compressed id of every token, from the checkpoint's own tokenizer."""
    engram = config.engram
    assert engram is not None
    tokenizer = Tokenizer.from_directory(directory, vocab_size=config.vocab_size)
    return compressed_token_map(tokenizer, config.vocab_size, engram.pad_token_id, engram.compressed_vocab_size)
