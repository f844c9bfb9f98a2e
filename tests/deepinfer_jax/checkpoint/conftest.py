"""A small random checkpoint, as released and converted, made once."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.checkpoint.convert import convert
from deepinfer_jax.checkpoint.synthetic import synthesize
from deepinfer_jax.commands.logits import sequence_logits
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from tests.large_checkpoint import small_document

TOKENS = tuple(range(3, 40))


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards, quantised; treat as read-only."""
    directory = tmp_path_factory.mktemp("released") / "model"
    synthesize(small_document(), directory, shards=2)
    return directory


@pytest.fixture(scope="session")
def converted(released: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in the packed form; treat as read-only."""
    directory = tmp_path_factory.mktemp("converted") / "model"
    convert(released, directory)
    return directory


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a checkpoint to be damaged."""
    return lambda directory: shutil.copytree(directory, tmp_path / "copy")


@pytest.fixture(scope="session")
def logits() -> Callable[[Model, ModelConfig, str], np.ndarray]:
    """Logits of a fixed sequence."""

    @functools.wraps(sequence_logits)
    def compute(model: Model, config: ModelConfig, numerics: str) -> np.ndarray:
        return sequence_logits(model, TOKENS, config, Numerics.preset(numerics), with_taps=False)["logits"]

    return compute
