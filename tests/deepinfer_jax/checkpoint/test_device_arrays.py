"""Device arrays made block by block: every element in its place, every block small, nothing copied twice."""

import itertools
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from deepinfer_jax.checkpoint import device_arrays
from deepinfer_jax.checkpoint.device_arrays import blocks, host_copies, place, uploaded_copies
from deepinfer_jax.checkpoint.pieces import lengths, whole
from tests.golden import DATA

REPOSITORY = DATA.parent.parent
shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


@given(shapes, st.sampled_from([1, 2, 4]), st.integers(1, 3000), st.data())
def test_blocks_tile_an_array_in_row_order(shape, item_bytes, limit, data):
    """Joined in order they are the array; each is contiguous and small, or a single row."""
    bounds = tuple(tuple(sorted(data.draw(st.tuples(st.integers(0, 5), st.integers(6, 9))))) for _ in shape)
    bounds = tuple((first, first + size) for (first, _), size in zip(bounds, shape, strict=True))
    numbers = np.arange(np.prod(shape)).reshape(shape)
    found = []
    for block in blocks(bounds, item_bytes, limit):
        inside = tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(block, bounds, strict=True))
        part = numbers[inside].reshape(-1)
        assert np.array_equal(part, np.arange(part[0], part[0] + part.size))
        row = shape[-1] if len(shape) > 1 else 1
        assert part.size * item_bytes <= limit or part.size == row
        found.append(part)
    assert np.array_equal(np.concatenate(found), numbers.reshape(-1))


def test_blocks_hold_whole_tiles():
    """Row counts are multiples of 32 where a block has so many, so that a tile is decoded once."""
    heights = [lengths(block)[0] for block in blocks(whole((1000, 10)), 1, 999)]
    assert heights == [96] * 10 + [40]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(device_arrays, "BLOCK_BYTES", 256)


VALUES = np.random.default_rng(0).integers(0, 100, (3, 50, 7))


def writer(values, asked):
    def fill(out, bounds):
        asked.append(bounds)
        out[...] = values[tuple(slice(*one) for one in bounds)]

    return fill


@pytest.mark.parametrize("make", [host_copies, uploaded_copies])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, jax.numpy.bfloat16, np.int32])
@pytest.mark.parametrize("bounds", [((0, 3), (0, 50), (0, 7)), ((1, 3), (7, 44), (2, 5)), ((1, 2), (3, 4), (0, 7))])
def test_both_ways_make_the_same_array(make, dtype, bounds, small_blocks):
    asked = []
    values = VALUES.astype(dtype)
    device = jax.devices()[0]
    (array,) = make(bounds, np.dtype(dtype), (device,), writer(values, asked))
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, values[tuple(slice(*one) for one in bounds)])
    assert all(np.prod(lengths(block)) * np.dtype(dtype).itemsize <= 256 for block in asked)


@pytest.mark.parametrize("dtype", [np.uint8, jax.numpy.bfloat16])
def test_cpu_arrays_take_over_the_memory_that_was_filled(dtype):
    """Otherwise a table would be held twice."""
    places = []

    def fill(out, bounds):
        del bounds
        out[...] = 1
        places.append(out.ctypes.data)

    array = place((1000, 64), np.dtype(dtype), None, fill)
    assert array.unsafe_buffer_pointer() == places[0]


def test_without_a_sharding_an_array_is_uncommitted():
    array = place((3, 50, 7), np.dtype(np.int32), None, writer(VALUES, []))
    assert not array.committed
    placed = place((3, 50, 7), np.dtype(np.int32), SingleDeviceSharding(jax.devices()[0]), writer(VALUES, []))
    assert placed.committed
    np.testing.assert_array_equal(array, placed)


EIGHT_DEVICES = """
import itertools, json
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from deepinfer_jax.checkpoint.device_arrays import place
mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
values = np.arange(8 * 12 * 4).reshape(8, 12, 4)
results = []
for spec in (P(), P("a"), P(None, "a"), P(("a", "b")), P("b", "a"), P(None, "a", "b"), P(None, None, "a")):
    asked = []
    def fill(out, bounds):
        asked.append(bounds)
        out[...] = values[tuple(slice(*one) for one in bounds)]
    sharding = NamedSharding(mesh, spec)
    array = place(values.shape, np.dtype(np.int32), sharding, fill)
    parts = [bool((np.asarray(shard.data) == values[shard.index]).all()) for shard in array.addressable_shards]
    results.append([array.sharding == sharding, bool((np.asarray(array) == values).all()), parts, asked])
print(json.dumps(results))
"""


def test_every_device_gets_its_slice_and_no_element_is_read_twice():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(REPOSITORY),
    }
    output = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES], env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    for same_sharding, same_values, slices, asked in json.loads(output):
        assert same_sharding
        assert same_values
        assert slices == [True] * 8
        cells = [cell for block in asked for cell in itertools.product(*(range(*one) for one in block))]
        assert len(cells) == len(set(cells)) == 8 * 12 * 4
