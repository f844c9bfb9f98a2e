"""The vision tower, the aligner and the span embeddings against golden values, and the description of the weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.images.span import TokenType
from deepinfer_jax.model import params as parameters
from deepinfer_jax.model import vision
from deepinfer_jax.model.vision import Vision
from deepinfer_jax.numerics import BF16, F32
from tests.golden import DATA, tensors

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CONFIG = ModelConfig.from_directory(DATA / "tiny-a" / "bf16")
CHECKPOINT = tensors("tiny-a/bf16/model.safetensors")
TOWER = tensors("vision/tower.safetensors")
PROMPT = tensors("tiny-a/multimodal.safetensors")
GRIDS = sorted({name.split(".")[0] for name in TOWER})

every_grid = pytest.mark.parametrize("name", GRIDS)


def load(numerics):
    def read(item):
        return jnp.asarray(CHECKPOINT[item.released[0][0]]).astype(item.dtype(numerics))

    return parameters.map_parameters(read, Vision.describe(CONFIG))


@pytest.fixture(scope="module")
def weights():
    return load(F32)


@functools.partial(jax.jit, static_argnums=(2, 3))
def encode(params, patches, grid, config=CONFIG.vision):
    features = vision.vision_tower(params, patches, grid, config)
    return features, vision.align(params, features, grid, config)


def grid_of(name):
    rows, columns = name.split("x")
    return int(rows), int(columns)


def token_grid(grid, ratio=3):
    return -(-grid[0] // ratio), -(-grid[1] // ratio)


def test_golden_grids():
    assert GRIDS == ["1x4", "3x3", "4x11", "6x9", "7x5"]


@every_grid
def test_float32_equals_golden(weights, name):
    features, aligned = encode(weights, TOWER[f"{name}.patches"], grid_of(name))
    assert features.dtype == aligned.dtype == jnp.float32
    np.testing.assert_allclose(features, TOWER[f"{name}.vit_f32"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(aligned, TOWER[f"{name}.aligned_f32"], rtol=0, atol=1e-5)


@every_grid
def test_bfloat16_is_as_exact_as_the_reference(name):
    """Both round at every operator, at slightly different places, and err about equally."""
    outputs = encode(load(BF16), TOWER[f"{name}.patches"], grid_of(name))
    for part, output in zip(("vit", "aligned"), outputs, strict=True):
        assert output.dtype == jnp.bfloat16
        exact, rounded = TOWER[f"{name}.{part}_f32"], TOWER[f"{name}.{part}_bf16"]
        ours = np.asarray(output.astype(jnp.float32))
        assert np.abs(ours - exact).mean() <= 1.5 * np.abs(rounded - exact).mean()
        np.testing.assert_allclose(ours, rounded, rtol=0, atol=0.1 * exact.std())


def test_image_rows_of_a_prompt_equal_golden(weights):
    grid = tuple(PROMPT["grid_vit"].tolist())
    _, aligned = encode(weights, PROMPT["patches"], grid)
    span = vision.image_span_embeddings(weights, aligned, token_grid(grid))
    image = PROMPT["token_types"] != TokenType.TEXT
    np.testing.assert_allclose(span, PROMPT["embeds_f32"][image], rtol=0, atol=1e-5)


def test_flat_patches_are_accepted(weights):
    patches = TOWER["3x3.patches"]
    shaped, _ = encode(weights, patches, (3, 3))
    flat, _ = encode(weights, patches.reshape(9, -1), (3, 3))
    assert np.array_equal(shaped, flat)


def test_patches_that_do_not_fill_the_grid_are_refused(weights):
    with pytest.raises(InputError, match="'patches' is 9; accepted: 12 for a grid of 3 x 4"):
        vision.vision_tower(weights, jnp.asarray(TOWER["3x3.patches"]), (3, 4), CONFIG.vision)


@pytest.mark.parametrize("tile", [1, 7, 44, 45])
def test_attention_tile_does_not_matter(weights, monkeypatch, tile):
    """4 x 11 patches: tiles that divide them, leave a rest, or hold them all."""
    monkeypatch.setattr(vision, "QUERY_TILE", tile)
    features = vision.vision_tower(weights, jnp.asarray(TOWER["4x11.patches"]), (4, 11), CONFIG.vision)
    np.testing.assert_allclose(features, TOWER["4x11.vit_f32"], rtol=0, atol=1e-5)


def test_large_image_needs_no_score_matrix(weights):
    """The compiled attention of a large image holds scores of one tile of patches, not of all pairs."""
    grid = (60, 60)
    patches = jax.ShapeDtypeStruct((grid[0] * grid[1], 588), jnp.float32)
    compiled = encode.lower(weights, patches, grid).compile()
    all_pairs = CONFIG.vision.num_attention_heads * (grid[0] * grid[1]) ** 2 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < all_pairs / 2


def test_description_names_and_shapes_are_the_checkpoint_s():
    stored = {
        name: value.shape for name, value in CHECKPOINT.items() if name.startswith(("vision.", "aligner.", "image_"))
    }
    described = {item.released[0][0]: item.shape for item in parameters.parameters(Vision.describe(CONFIG))}
    assert described == stored


def test_released_size():
    described = Vision.describe(ModelConfig.preset("v4.1-flash"))
    assert len(parameters.parameters(described)) == 266
    assert parameters.count(described) == 485_268_480
    assert parameters.count(described.aligner) == 73_410_560
    vectors = (described.image_start, described.image_newline, described.image_end)
    assert parameters.count(vectors) == 15_360
    assert described.patch_embedding.shape == (1024, 588)
    assert described.aligner.first.shape == (5120, 9216)


@pytest.mark.parametrize("numerics", [F32, BF16], ids=lambda numerics: numerics.name)
def test_random_weights_give_sizeable_finite_rows(numerics):
    """As many channels a head, grid rows and layers as differ from the golden model's."""
    small = dataclasses.replace(
        CONFIG.vision, num_hidden_layers=3, hidden_size=48, num_attention_heads=3, patch_size=4, downsample_ratio=2
    )
    config = dataclasses.replace(CONFIG, vision=small)
    weights = parameters.initialise(Vision.describe(config), jax.random.key(0), numerics)
    patches = jax.random.normal(jax.random.key(1), (5 * 3, 3, 4, 4))
    _, aligned = encode(weights, patches, (5, 3), small)
    span = vision.image_span_embeddings(weights, aligned, (3, 2)).astype(jnp.float32)
    assert span.shape == (3 * (2 + 1) + 2, CONFIG.hidden_size)
    assert bool(jnp.isfinite(span).all())
    assert 0.1 < float(aligned.astype(jnp.float32).std()) < 10
