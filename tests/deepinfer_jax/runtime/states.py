"""States of the golden shape: steps over them, random bits in them, and their comparison bit by bit."""

import functools

import jax
import numpy as np
from jax import Array

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import State, initial_state
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.runtime.advance import advance
from deepinfer_jax.runtime.batch import Batch
from deepinfer_jax.runtime.step import row_logits
from tests.golden import DATA


def golden_config() -> ModelConfig:
    return ModelConfig.from_directory(DATA / "tiny-a" / "bf16")


def fresh_state(
    numerics: str, slots: int, blocks: int, block_tokens: int, max_drafts: int | None = None, fill: float = np.nan
) -> State:
    """A state of the golden shape; its floats are poisoned unless told otherwise."""
    config = golden_config()
    return initial_state(
        config,
        Numerics.preset(numerics),
        slots=slots,
        blocks=blocks,
        layout=PageLayout.of(config, block_tokens),
        max_drafts=max_drafts,
        fill=fill,
    )


@functools.partial(jax.jit, static_argnames=("config", "numerics", "deterministic"), donate_argnames="state")
def step(
    params: Model,
    state: State,
    batch: Batch,
    tables: Array,
    config: ModelConfig,
    numerics: Numerics,
    deterministic: bool,
) -> tuple[State, Array]:
    """A step, and the logits of all its rows."""
    advanced = advance(params, state, batch.to_rows(), tables, config, numerics, deterministic=deterministic)
    return advanced.state, row_logits(params, advanced.hidden, deterministic=deterministic)


def random_content(tree, seed: int):
    """The tree with random bits in every array, NaN patterns and negative zeros among them."""
    random = np.random.default_rng(seed)

    def one(leaf):
        size = leaf.size * leaf.dtype.itemsize
        bits = random.integers(0, 256, size, np.uint8).view(leaf.dtype).reshape(leaf.shape)
        return jax.numpy.asarray(bits)

    return jax.tree.map(one, tree)


def bits_of(leaf) -> np.ndarray:
    return np.ascontiguousarray(leaf).view(np.uint8)


def assert_same_bits(got, want) -> None:
    """Two trees have one structure, and arrays of equal dtype, shape and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(bits_of(one), bits_of(other))
