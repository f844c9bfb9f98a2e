"""The golden checkpoints, loaded once per test process."""

import functools

import numpy as np
from jax import Array

from deepinfer_jax.checkpoint.reader import load_model
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.source import SequenceSource
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from tests.golden import DATA, document


@functools.cache
def golden_model(checkpoint: str, numerics: str) -> tuple[ModelConfig, Model]:
    """``checkpoint`` is "bf16" or "quant": the same weights, dequantised or as released."""
    return load_model(DATA / "tiny-a" / checkpoint, Numerics.preset(numerics))


def prompts() -> dict[str, list[int]]:
    """The golden prompts by name."""
    return document("tiny-a/prompts.json")


def prompt_batch(length: int) -> tuple[list[str], np.ndarray]:
    """All golden prompts as one padded batch; padding comes after the tokens, so that no prompt sees it."""
    named = prompts()
    batch = np.zeros((len(named), length), np.int32)
    for row, tokens in zip(batch, named.values(), strict=True):
        row[: len(tokens)] = tokens
    return list(named), batch


def sequence_source(config: ModelConfig, numerics: Numerics, rows: Rows, length: int) -> SequenceSource:
    """The stateless source for rows of :func:`deepinfer_jax.model.rows.sequence_rows`."""
    count = rows.tokens.shape[0]
    return SequenceSource.empty(count, length, config.head_dim, config.index_head_dim, numerics.dtype)


def assert_taps_close(got: Array | np.ndarray, want: np.ndarray, tolerance: float) -> None:
    """``|got - want| <= tolerance * max(1, |want|)`` everywhere."""
    error = np.abs(np.asarray(got, np.float64) - want) / np.maximum(1, np.abs(want))
    assert error.max(initial=0) <= tolerance
