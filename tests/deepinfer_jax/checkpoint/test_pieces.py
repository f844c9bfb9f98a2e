"""Any block of any parameter is that part of the whole: rows, columns, experts, through tiles and joined matrices."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.checkpoint.converted import ConvertedStorage
from deepinfer_jax.checkpoint.pieces import Piece, Plane, fill, lengths, whole
from deepinfer_jax.checkpoint.reader import check_parameter, read_parameter
from deepinfer_jax.checkpoint.released import ReleasedStorage
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.params import Parameter, Stored, parameters
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import F32, RELEASED
from deepinfer_jax.quant import dequantise_fp8_blocks

# One of every form: tiles, joined tiles, table rows, stacked and joined fp4, plain matrix, vector, float32.
NAMES = (
    "layers.4.attn.wq_b.weight",
    "layers.2.ffn.shared_experts.w1.weight",
    "layers.1.engram.embed.weight",
    "layers.3.ffn.experts.0.w1.weight",
    "layers.3.ffn.experts.0.w2.weight",
    "head.weight",
    "norm.weight",
    "layers.5.hc_attn_fn",
)


def storages(released, converted):
    return {"released": ReleasedStorage.open(released), "converted": ConvertedStorage.open(converted)}


@pytest.fixture(scope="session")
def items(released):
    described = parameters(Model.describe(ModelConfig.from_directory(released)))
    return {item.released[0][0]: item for item in described if item.released}


def random_bounds(shape, rng):
    ends = [sorted(rng.choice(length + 1, 2, replace=False)) for length in shape]
    return tuple((int(start), int(stop)) for start, stop in ends)


@pytest.mark.parametrize("layout", ["released", "converted"])
@pytest.mark.parametrize("name", NAMES)
def test_a_block_is_a_part_of_the_whole(name, layout, items, released, converted):
    storage, item = storages(released, converted)[layout], items[name]
    rng = np.random.default_rng(0)
    packed = read_parameter(item, storage, RELEASED) if item.has_scale else None
    arrays = {Plane.VALUES: read_parameter(item, storage, F32)}
    arrays |= {Plane.DATA: packed.data, Plane.SCALE: packed.scale} if packed else {}
    for plane, array in arrays.items():
        complete = np.asarray(array)
        assert complete.shape == plane.shape(item, item.shape)
        for _ in range(30):
            bounds = random_bounds(complete.shape, rng)
            out = np.empty(lengths(bounds), complete.dtype)
            fill(out, storage, item, plane, bounds)
            np.testing.assert_array_equal(out, complete[tuple(slice(*one) for one in bounds)], f"{plane} {bounds}")


@pytest.mark.parametrize("name", NAMES)
def test_both_layouts_hold_the_same(name, items, released, converted):
    one, other = storages(released, converted).values()
    for numerics in (F32, RELEASED):
        for left, right in zip(
            *(as_arrays(read_parameter(items[name], at, numerics)) for at in (one, other)), strict=True
        ):
            np.testing.assert_array_equal(left, right)


def as_arrays(value):
    return [value.data, value.scale] if hasattr(value, "scale") else [value]


class Memory:
    """Matrices of any number of rows, joined: quantised in tiles of 32 that do not go on from one to the next."""

    def __init__(self, heights, columns):
        rng = np.random.default_rng(0)
        self.weights = [rng.integers(0, 0x70, (height, columns), np.uint8) for height in heights]
        self.scales = [
            rng.integers(120, 130, (-(-height // 32), -(-columns // 32))).astype(np.uint8) for height in heights
        ]

    def pieces(self, item, stack):
        del item, stack
        return [
            Piece(
                name=f"w{number}",
                shape=weight.shape,
                origin="memory",
                weight=lambda start, stop, weight=weight: weight[start:stop],
                scale=lambda start, stop, scale=scale: scale[start:stop],
            )
            for number, (weight, scale) in enumerate(zip(self.weights, self.scales, strict=True))
        ]

    def values(self):
        return np.concatenate(
            [dequantise_fp8_blocks(weight, scale) for weight, scale in zip(self.weights, self.scales, strict=True)]
        )


@given(st.integers(1, 80), st.integers(1, 100), st.data())
def test_tiles_of_joined_matrices_are_decoded_apart(height, columns, data):
    storage = Memory([height, height], columns)
    item = Parameter((2 * height, columns), (None, None), Stored.FP8_BLOCKS, (("w0", "w1"),))
    complete = storage.values()
    first = data.draw(st.integers(0, 2 * height - 1))
    last = data.draw(st.integers(first + 1, 2 * height))
    left = data.draw(st.integers(0, columns - 1))
    right = data.draw(st.integers(left + 1, columns))
    out = np.empty((last - first, right - left), np.float32)
    fill(out, storage, item, Plane.VALUES, ((first, last), (left, right)))
    np.testing.assert_array_equal(out, complete[first:last, left:right])


@pytest.mark.parametrize(("height", "accepted"), [(32, True), (64, True), (48, False), (31, False)])
def test_joined_matrices_stay_packed_only_if_no_scale_belongs_to_both(height, accepted):
    storage = Memory([height, height], 64)
    item = Parameter((2 * height, 64), (None, None), Stored.FP8_BLOCKS, (("w0", "w1"),))
    check_parameter(item, storage, F32)
    if accepted:
        check_parameter(item, storage, RELEASED)
        out = np.empty(item.data_shape(item.shape), np.uint8)
        fill(out, storage, item, Plane.DATA, whole(out.shape))
        np.testing.assert_array_equal(out, np.concatenate(storage.weights))
        return
    with pytest.raises(CheckpointError, match="rows in multiples of 32 where matrices are joined") as refused:
        check_parameter(item, storage, RELEASED)
    assert refused.value.key == "w0"
    assert "numerics f32 or bf16" in str(refused.value)


def test_a_single_matrix_of_any_height_stays_packed():
    storage = Memory([48], 64)
    item = Parameter((48, 64), (None, None), Stored.FP8_BLOCKS, (("w0",),))
    check_parameter(item, storage, RELEASED)
    assert read_parameter(item, storage, RELEASED).scale.shape == (2, 2)


@pytest.mark.parametrize("numerics", [F32, RELEASED], ids=["f32", "released"])
def test_padding_is_zero(numerics, items, released, converted):
    for name, shape in (
        ("layers.1.engram.embed.weight", (256, 32)),
        ("layers.3.ffn.experts.0.w1.weight", (11, 64, 64)),
    ):
        item = items[name]
        assert all(wide >= size for wide, size in zip(shape, item.shape, strict=True))
        assert shape != item.shape
        for storage in storages(released, converted).values():
            padded = as_arrays(read_parameter(item, storage, numerics, shape=shape))
            stored = as_arrays(read_parameter(item, storage, numerics))
            for wide, exact in zip(padded, stored, strict=True):
                assert wide.shape[0] == shape[0]
                np.testing.assert_array_equal(wide[: exact.shape[0]], exact)
                assert not np.asarray(wide[exact.shape[0] :]).any()
    assert dataclasses.replace(item, shape=shape).shape == shape
