"""Formats of small and released shape, and host planes of random bits."""

import functools

import numpy as np

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.records import BlockPlanes, PackedRows, SlotPlanes, StateFormat, map_rows
from deepinfer_jax.cache.snapshot import Rings
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import NUMERICS_NAMES, Numerics
from tests.golden import DATA

NUMERICS = NUMERICS_NAMES
BLOCK_TOKENS = 8


@functools.cache
def small_config() -> ModelConfig:
    """Eleven layers of which six are on the encoder side, two draft stages, ratios 2, 2 and 1, window 16."""
    return ModelConfig.from_directory(DATA / "tiny-a" / "bf16")


@functools.cache
def small_form(numerics: str, weights_id: str = "weights") -> StateFormat:
    config = small_config()
    return StateFormat.of(weights_id, config, Numerics.preset(numerics), PageLayout.of(config, BLOCK_TOKENS))


def released_form(numerics: str) -> StateFormat:
    config = ModelConfig.preset("v4.1-flash")
    return StateFormat.of("weights", config, Numerics.preset(numerics), PageLayout.of(config))


def random_rows(rows, random: np.random.Generator):
    """Rows of the same shape with random bits in every plane, NaN patterns and negative zeros among them."""
    return map_rows(
        lambda plane: random.integers(0, 256, plane.nbytes, np.uint8).view(plane.dtype).reshape(plane.shape), rows
    )


def random_blocks(form: StateFormat, blocks: int, seed: int) -> BlockPlanes:
    random = np.random.default_rng(seed)
    return BlockPlanes(*(random_rows(rows, random) for rows in form.empty_blocks(blocks)))


def random_slot(form: StateFormat, rings: Rings, seed: int) -> SlotPlanes:
    random = np.random.default_rng(seed)
    window = form.window.empty((form.layers, rings.window))
    pending = form.pending.empty((len(form.layout.ratios), rings.pending))
    return SlotPlanes(
        random_rows(window, random),
        random_rows(pending, random),
        random_rows(np.zeros(rings.history, np.int32), random),
    )


def bits(rows) -> list[np.ndarray]:
    """The bytes of every plane of rows, the last axis widened."""
    planes = tuple(rows) if isinstance(rows, PackedRows) else (rows,)
    return [np.ascontiguousarray(plane).view(np.uint8) for plane in planes]


def assert_same_rows(got, want) -> None:
    for one, other in zip(bits(got), bits(want), strict=True):
        np.testing.assert_array_equal(one, other)
