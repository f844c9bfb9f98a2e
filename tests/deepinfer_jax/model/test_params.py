"""Parameters: the released inventory to the last tensor and byte, and random weights that depend on the key alone.

The inventory is written out from the checkpoint table of the model specification (section 18); the totals are those
counted over the published shards (sections 18 and 19).
"""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.params import (
    Parameter,
    Stored,
    abstract,
    count,
    draw,
    initialise,
    map_parameters,
    norm,
    parameters,
    scale_name,
    single,
)
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics

F32, BF16, RELEASED = (Numerics.preset(name) for name in ("f32", "bf16", "released"))

LAYERS = range(40)
KEY_SOURCES = (2, 8, 14, 20)
PAIR_SOURCES = (2, 8, 14)
INDEX_SOURCES = (2, 8, 14, 20, 24, 28, 32, 36)
STAGES = range(3)
TABLE_ROWS = {1: 384006168, 14: 384016682}

# Released name with its numbers left open -> kind and logical shape. Kinds: a plain dtype; S is fp8 in 32 x 32 tiles
# (`S(o, i)` of the specification), R fp8 rows and E packed fp4 rows, all three with a scale tensor.
BLOCK = {
    "attn_norm.weight": ("BF16", (5120,)),
    "ffn_norm.weight": ("BF16", (5120,)),
    "hc_attn_fn": ("F32", (24, 20480)),
    "hc_ffn_fn": ("F32", (24, 20480)),
    "hc_attn_base": ("F32", (24,)),
    "hc_ffn_base": ("F32", (24,)),
    "hc_attn_scale": ("F32", (3,)),
    "hc_ffn_scale": ("F32", (3,)),
    "attn.attn_sink": ("F32", (64,)),
    "attn.wq_a": ("S", (1280, 5120)),
    "attn.q_norm.weight": ("BF16", (1280,)),
    "attn.wq_b": ("S", (32768, 1280)),
    "attn.wkv": ("S", (512, 5120)),
    "attn.kv_norm.weight": ("BF16", (512,)),
    "attn.wo_a": ("S", (8192, 4096)),
    "attn.wo_b": ("S", (5120, 8192)),
    "ffn.shared_experts.w1": ("S", (2304, 5120)),
    "ffn.shared_experts.w3": ("S", (2304, 5120)),
    "ffn.shared_experts.w2": ("S", (5120, 2304)),
}
EXPERT = {"w1": (2304, 5120), "w3": (2304, 5120), "w2": (5120, 2304)}
COMPRESSOR = {
    "attn.compressor.wkv.weight": ("BF16", (512, 5120)),
    "attn.compressor.norm.weight": ("BF16", (512,)),
    "attn.indexer.wk.weight": ("BF16", (128, 512)),
    "attn.indexer.k_norm.weight": ("BF16", (128,)),
}
INDEXER = {"attn.indexer.wq_b": ("S", (4096, 1280)), "attn.indexer.weights_proj.weight": ("BF16", (32, 5120))}
ENGRAM = {
    "engram.wkv": ("S", (25600, 6144)),
    "engram.q_weight": ("BF16", (4, 5120)),
    "engram.k_weight": ("BF16", (4, 5120)),
}
TOP = {
    "embed.weight": ("BF16", (129280, 5120)),
    "head.weight": ("BF16", (129280, 5120)),
    "norm.weight": ("BF16", (5120,)),
    "image_start": ("BF16", (5120,)),
    "image_end": ("BF16", (5120,)),
    "image_newline": ("BF16", (5120,)),
    "mtp.0.main_proj": ("S", (5120, 15360)),
    "mtp.0.main_norm.weight": ("BF16", (5120,)),
    "mtp.2.norm.weight": ("BF16", (5120,)),
    "mtp.2.markov_head.embed.weight": ("BF16", (129280, 256)),
    "mtp.2.markov_head.head.weight": ("BF16", (129280, 256)),
    "mtp.2.confidence_head.proj.weight": ("BF16", (1, 5376)),
    "vision.patch_embed.proj.weight": ("BF16", (1024, 588)),
    "vision.patch_embed.proj.bias": ("BF16", (1024,)),
    "vision.norm.weight": ("BF16", (1024,)),
    "aligner.w1.weight": ("BF16", (5120, 9216)),
    "aligner.w1.bias": ("BF16", (5120,)),
    "aligner.w2.weight": ("BF16", (5120, 5120)),
    "aligner.w2.bias": ("BF16", (5120,)),
}
VISION_BLOCK = {
    "norm1.weight": (1024,),
    "norm2.weight": (1024,),
    "attn.wqkv.weight": (3072, 1024),
    "attn.wqkv.bias": (3072,),
    "attn.wo.weight": (1024, 1024),
    "attn.wo.bias": (1024,),
    "mlp.w1.weight": (5632, 1024),
    "mlp.w2.weight": (1024, 2816),
}
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


def released_inventory():
    """Tensor name -> (dtype, shape) as they lie in the shards, scales included."""
    entries = dict(TOP)
    for prefix, experts in [(f"layers.{layer}", 384) for layer in LAYERS] + [(f"mtp.{stage}", 128) for stage in STAGES]:
        entries |= {f"{prefix}.{name}": entry for name, entry in BLOCK.items()}
        entries[f"{prefix}.ffn.gate.weight"] = ("BF16", (experts, 5120))
        entries[f"{prefix}.ffn.gate.bias"] = entries[f"{prefix}.ffn.gate.bias_vl"] = ("F32", (experts,))
        for expert in range(experts):
            entries |= {f"{prefix}.ffn.experts.{expert}.{name}": ("E", shape) for name, shape in EXPERT.items()}
    for layer in KEY_SOURCES:
        entries |= {f"layers.{layer}.{name}": entry for name, entry in COMPRESSOR.items()}
    for layer in PAIR_SOURCES:
        entries[f"layers.{layer}.attn.compressor.wgate.weight"] = ("BF16", (512, 5120))
    for layer in INDEX_SOURCES:
        entries |= {f"layers.{layer}.{name}": entry for name, entry in INDEXER.items()}
    for layer, rows in TABLE_ROWS.items():
        entries |= {f"layers.{layer}.{name}": entry for name, entry in ENGRAM.items()}
        entries[f"layers.{layer}.engram.embed"] = ("R", (rows, 256))
    for block in range(32):
        entries |= {f"vision.blocks.{block}.{name}": ("BF16", shape) for name, shape in VISION_BLOCK.items()}
    inventory = {}
    for name, (kind, shape) in entries.items():
        if kind in BYTES:
            inventory[name] = (kind, shape)
        else:
            inventory |= quantised_tensors(name, kind, shape)
    return inventory


def quantised_tensors(name, kind, shape):
    """Weight and scale of one quantised matrix, as stored."""
    rows, columns = shape
    weight = ("I8", (rows, columns // 2)) if kind == "E" else ("F8_E4M3", shape)
    scale_rows = rows // 32 if kind == "S" else rows
    return {f"{name}.weight": weight, f"{name}.scale": ("F8_E8M0", (scale_rows, columns // 32))}


def described_inventory(described):
    """The same, from a description."""
    kinds = {Stored.FP8_BLOCKS: "S", Stored.FP8_ROWS: "R", Stored.FP4_ROWS: "E"}
    inventory = []
    for item in parameters(described):
        for name in (name for piece in item.released for name in piece):
            if item.stored in kinds:
                tensors = quantised_tensors(name.removesuffix(".weight"), kinds[item.stored], item.piece_shape)
                inventory += tensors.items()
            elif item.stored is not Stored.DERIVED:
                inventory.append((name, (item.stored.name, item.piece_shape)))
    return inventory


@pytest.fixture(scope="module")
def released():
    """The description of the release; no array exists."""
    return Model.describe(ModelConfig.preset("v4.1-flash"))


@pytest.fixture(scope="module")
def miniature():
    return Model.describe(ModelConfig.preset("mini-40"))


def test_the_table_counts_what_the_shards_hold():
    """The table of this file against the published totals, so that it cannot be wrong together with the description."""
    inventory = released_inventory()
    sizes = collections.Counter()
    for dtype, shape in inventory.values():
        sizes[dtype] += math.prod(shape) * BYTES[dtype]
    assert len(inventory) == 96_085
    assert sizes == {
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "I8": 278_585_671_680,
    }
    assert sizes.total() == 510_286_023_000


def test_released_inventory(released):
    """Every tensor of the release is described once, with its shape and dtype, and no other."""
    described, expected = described_inventory(released), released_inventory()
    names = [name for name, _ in described]
    assert len(names) == len(set(names))
    assert sorted(set(names) ^ expected.keys()) == []
    different = {name: (entry, expected[name]) for name, entry in described if entry != expected[name]}
    assert different == {}


def test_released_tensor_names(released):
    names = [name for item in parameters(released) for name in item.tensor_names()]
    assert len(names) == 96_085
    assert set(names) == released_inventory().keys()


def test_released_parameter_counts(released):
    tables = sum(engram.table.size for engram in released.engrams)
    draft, vision = count(released.draft), count(released.vision)
    assert tables == 196_613_849_600
    assert draft == 14_225_362_530
    assert vision == 485_268_480
    assert count(released) - tables - draft - vision == 551_880_835_184
    assert count(released) == 763_205_315_794


def test_released_layers_count_their_parts(released):
    """Section 19 of the specification: every layer is the sum of its building blocks."""
    shared = 126_617_408 + 983_094 + 10_240 + 1_966_080 + 768 + 385 * 35_389_440
    for layer, description in enumerate(released.layers.layers):
        expected = shared
        if layer in KEY_SOURCES:
            expected += 65_664 + (5_243_392 if layer in PAIR_SOURCES else 2_621_952)
        if layer in INDEX_SOURCES:
            expected += 5_406_720
        assert count(description) == expected, layer
    assert sum(map(count, released.layers.layers)) == 550_242_348_144
    assert sum(count(engram) - engram.table.size for engram in released.engrams) == 314_654_720


def test_released_numerics_take_the_bytes_of_the_shards(released):
    """Packed weights lie on the device as released; only the token map, int32, comes from elsewhere."""
    sizes = collections.Counter()
    for leaf in jax.tree.leaves(abstract(released, RELEASED)):
        sizes[leaf.dtype.name] += math.prod(leaf.shape) * leaf.dtype.itemsize
    assert sizes == {
        "bfloat16": 3_952_883_712,
        "float32": 169_229_128,
        "uint8": 204_015_223_296 + 23_563_015_184 + 278_585_671_680,
        "int32": 4 * 129_280,
    }


def test_axes_fit_shapes(released):
    assert [item for item in parameters(released) if len(item.axes) != len(item.shape)] == []


@pytest.mark.parametrize("numerics", [F32, BF16, RELEASED], ids=lambda numerics: numerics.name)
def test_abstract_shapes_are_those_of_the_arrays(miniature, numerics):
    shapes = abstract(miniature, numerics)
    arrays = jax.eval_shape(lambda key: initialise(miniature, key, numerics), jax.random.key(0))
    assert jax.tree.structure(shapes) == jax.tree.structure(arrays)
    for expected, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(arrays), strict=True):
        assert (expected.shape, expected.dtype) == (array.shape, array.dtype)


def test_float32_stays_float32_in_every_numerics(miniature):
    """What the release stores in float32 keeps it; the derived token map is int32; the rest follows the numerics."""
    for item, shape in zip(parameters(miniature), jax.tree.leaves(abstract(miniature, BF16)), strict=True):
        expected = {Stored.F32: jnp.float32, Stored.DERIVED: jnp.int32}.get(item.stored, jnp.bfloat16)
        assert shape.dtype == expected, item.released


@pytest.fixture(scope="module")
def part(miniature):
    """Layers of three modes, an Engram memory and the token map; the rest repeats these."""
    return {"layers": [miniature.layers.layers[layer] for layer in (0, 2, 20)], "memory": miniature.engrams[0],
            "map": miniature.token_map}  # fmt: skip


def test_random_weights_depend_on_the_key(part):
    first, again, other = (initialise(part, jax.random.key(seed), F32) for seed in (0, 0, 1))
    for left, right, different in zip(*map(jax.tree.leaves, (first, again, other)), strict=True):
        np.testing.assert_array_equal(left, right)
        if jnp.issubdtype(left.dtype, jnp.floating):
            assert np.abs(left - different).max() > 1e-3


def test_no_two_parameters_share_their_values(part):
    """Equal shapes and rules at different places of the tree draw different values."""
    leaves = [leaf for leaf in jax.tree.leaves(initialise(part, jax.random.key(0), F32)) if leaf.dtype == jnp.float32]
    first_values = [float(leaf.reshape(-1)[0]) for leaf in leaves]
    assert len(set(first_values)) == len(first_values)


def test_a_parameter_does_not_depend_on_its_neighbours():
    """Only on the key and its place: other shapes and dtypes around it change nothing."""
    wide = [norm("a", 8), single("b", (4, 4), (None, None)), norm("c", 4)]
    narrow = [norm("a", 3), single("b", (4, 4), (None, None)), single("c", (2, 2), (None, None), Stored.F32)]
    left, right = (initialise(tree, jax.random.key(3), F32)[1] for tree in (wide, narrow))
    np.testing.assert_array_equal(left, right)


def test_bfloat16_weights_are_the_rounded_float32_weights(part):
    exact, half = (initialise(part, jax.random.key(0), numerics) for numerics in (F32, BF16))
    for left, right in zip(jax.tree.leaves(exact), jax.tree.leaves(half), strict=True):
        np.testing.assert_array_equal(left.astype(right.dtype), right)


@pytest.mark.parametrize(
    ("init", "mean", "deviation"),
    [("normal", 0.0, 1 / 16), ("unit", 0.0, 1.0), ("small", 0.0, 0.1), ("norm", 1.0, 0.1), ("mix_scale", 0.3, 0.05)],
)
def test_rules_of_drawing(init, mean, deviation):
    """`normal` keeps a product with unit inputs at unit size: deviation width^-1/2, here 256^-1/2."""
    values = np.asarray(draw(single("x", (64, 256), (None, None), init=init), jax.random.key(0), F32))
    np.testing.assert_allclose(values.mean(), mean, atol=deviation / 20)
    np.testing.assert_allclose(values.std(), deviation, rtol=0.02)


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_mix_offsets_keep_streams_apart(streams):
    """Collapse prefers stream 0 and comb prefers the diagonal, for any number of streams."""
    mixes = (2 + streams) * streams
    values = np.asarray(draw(single("x", (mixes,), (None,), init="mix_base"), jax.random.key(0), F32))
    pre, post, comb = np.split(values, [streams, 2 * streams])
    comb = comb.reshape(streams, streams)
    expected_pre = np.where(np.arange(streams) == 0, 1.0, -1.0)
    np.testing.assert_allclose(pre, expected_pre, atol=0.5)
    np.testing.assert_allclose(post, np.zeros(streams), atol=0.5)
    np.testing.assert_allclose(comb, np.where(np.eye(streams) > 0, 1.5, -1.5), atol=0.5)


def test_the_token_map_stays_inside_its_classes(miniature):
    drawn = np.asarray(draw(miniature.token_map, jax.random.key(0), BF16))
    assert drawn.shape == (512,)
    assert drawn.dtype == np.int32
    assert set(drawn.tolist()) == set(range(420))
    assert miniature.token_map.size == 0
    assert miniature.token_map.tensor_names() == []


def test_stacked_and_joined_pieces():
    """Two experts, each of w1 above w3: four tensors of half the rows, each with its scale."""
    item = Parameter(
        (2, 64, 32), ("experts", None, None), Stored.FP4_ROWS, (("a.weight", "b.weight"),) * 2, stacked=True
    )
    assert item.piece_shape == (32, 32)
    assert item.size == 4096
    assert item.tensor_names() == ["a.weight", "b.weight"] * 2 + ["a.scale", "b.scale"] * 2
    joined = Parameter((64, 32), (None, None), Stored.FP8_BLOCKS, (("a.weight", "b.weight"),))
    assert joined.piece_shape == (32, 32)
    assert single("c", (7, 3), (None, None)).piece_shape == (7, 3)


@pytest.mark.parametrize("stored", Stored)
def test_only_quantised_tensors_have_scales(stored):
    item = single("x.weight", (32, 32), (None, None), stored)
    quantised = stored in (Stored.FP8_BLOCKS, Stored.FP8_ROWS, Stored.FP4_ROWS)
    assert item.has_scale == quantised
    assert item.tensor_names() == (["x.weight", "x.scale"] if quantised else ["x.weight"])


def test_scale_names():
    assert scale_name("layers.0.attn.wq_a.weight") == "layers.0.attn.wq_a.scale"


def test_trees_with_absent_parts():
    """None stands where a layer lacks a mechanism; it is no parameter and stays in place."""
    tree = {"here": norm("a", 4), "absent": None}
    assert parameters(tree) == [tree["here"]]
    assert count(tree) == 4
    assert map_parameters(lambda item: item.shape, tree) == {"here": (4,), "absent": None}
    assert initialise(tree, jax.random.key(0), F32)["absent"] is None
