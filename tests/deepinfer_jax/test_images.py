"""Image plans, patches and spans against golden values of the vendor's image processor, and as properties."""

import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.images.pixels import image_patches, resize_image
from deepinfer_jax.images.plan import plan_image
from deepinfer_jax.images.span import TokenType, span_tokens, splice_spans
from tests.golden import DATA, document, tensors

LAYOUT = document("vision/image_layout.json")
PIXELS = tensors("vision/pixels.npz")
PROMPT = tensors("tiny-a/multimodal.safetensors")

RELEASED = ModelConfig.preset("v4.1-flash").vision
TINY = ModelConfig.from_directory(DATA / "tiny-a" / "bf16").vision
CONFIGS = {
    "released": RELEASED,
    "tiny": TINY,
    "max_wh_ratio_4": dataclasses.replace(RELEASED, max_wh_ratio=4.0),
}
IMAGE_TOKEN_ID = 511

every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
# As many small sizes as large ones, up to strips whose short side vanishes when they are resized.
sides = st.one_of(st.integers(1, 60), st.integers(1, 3000), st.integers(1, 200_000))


def layout_entries():
    entries = [{"settings": "released", **entry} for entry in LAYOUT["released"]] + LAYOUT["others"]
    return [pytest.param(entry, id="{settings}-{width}x{height}".format(**entry)) for entry in entries]


def synthetic_image(width, height):
    """The golden images: a gradient each way, and a chequered pattern with fine diagonals."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    blue = (x // 24 + y // 24) % 2 * 180 + (x + y) % 16 * 4
    return np.stack([255 * x // (width - 1), 255 * y // (height - 1), blue], axis=-1).astype(np.uint8)


def test_golden_settings_are_those_of_the_configurations():
    for name, settings in LAYOUT["settings"].items():
        config = CONFIGS[name]
        assert settings == {
            "vision_patch_size": config.patch_size,
            "vision_downsample_ratio": config.downsample_ratio,
            "vision_max_n_token": config.max_image_tokens,
            "vision_min_pixels": config.min_pixels,
            "vision_max_wh_ratio": config.max_wh_ratio,
        }


@pytest.mark.parametrize("entry", layout_entries())
def test_plan_equals_golden(entry):
    plan = plan_image(entry["width"], entry["height"], CONFIGS[entry["settings"]])
    assert plan.tokens == entry["num_tokens"]
    assert plan.token_grid == (entry["n_llm_h"], entry["n_llm_w"])
    assert (plan.canvas_height, plan.canvas_width) == (entry["best_height"], entry["best_width"])
    if "n_vit_h" in entry:
        assert plan.patch_grid == (entry["n_vit_h"], entry["n_vit_w"])


@every_config
@given(width=sides, height=sides)
def test_plan_stays_within_the_limits(config, width, height):
    plan = plan_image(width, height, config)
    rows, columns = plan.patch_grid
    assert min(rows, columns) >= 1
    assert (plan.canvas_height, plan.canvas_width) == (rows * config.patch_size, columns * config.patch_size)
    assert plan.token_grid == (-(-rows // config.downsample_ratio), -(-columns // config.downsample_ratio))
    assert plan.tokens <= config.max_image_tokens
    assert 1 <= plan.resized_width <= plan.canvas_width
    assert 1 <= plan.resized_height <= plan.canvas_height
    assert plan.resized_width == plan.canvas_width or plan.resized_height == plan.canvas_height


@given(limit=st.integers(4, 40), width=sides, height=sides)
def test_small_limits_hold_too(limit, width, height):
    plan = plan_image(width, height, dataclasses.replace(TINY, max_image_tokens=limit))
    assert min(plan.token_grid) >= 1
    assert plan.tokens <= limit


@pytest.mark.parametrize(("size", "canvas"), [((9, 5), (112, 70)), ((5, 9), (70, 112))])
def test_enlarged_size_is_truncated(size, canvas):
    """9 x 5 pixels become 112.7 x 62.6, of which 112 pixels fill exactly 8 patches."""
    plan = plan_image(*size, TINY)
    assert (plan.canvas_width, plan.canvas_height) == canvas


@pytest.mark.parametrize("side", [1, 2, 5, 31, 100])
def test_limit_that_a_square_uses_up_is_used_up(side):
    plan = plan_image(5000, 5000, dataclasses.replace(RELEASED, max_image_tokens=side * (side + 1) + 2))
    assert plan.token_grid == (side, side)


@given(height=st.integers(300, 840), widths=st.tuples(st.integers(990, 2100), st.integers(990, 2100)))
def test_between_the_limits_a_wider_image_has_no_fewer_columns(height, widths):
    """These sizes have at least ``min_pixels`` pixels and at most 20 x 50 tokens."""
    narrow, wide = (plan_image(width, height, RELEASED) for width in sorted(widths))
    assert narrow.token_grid[0] == wide.token_grid[0] == -(-height // 42)
    assert narrow.token_grid[1] <= wide.token_grid[1]
    assert narrow.tokens <= wide.tokens


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (-3, 5)])
def test_image_without_pixels_is_refused(width, height):
    with pytest.raises(InputError, match=rf"'image size' is '{width} x {height}'; accepted: at least 1 x 1 pixels"):
        plan_image(width, height, RELEASED)


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_image_of_too_many_tokens_is_refused(limit):
    with pytest.raises(InputError, match=f"'30 x 30'.*the smallest takes 4 tokens, max_image_tokens is {limit}"):
        plan_image(30, 30, dataclasses.replace(TINY, max_image_tokens=limit))


def pixel_cases():
    return sorted({name.rsplit(".", 1)[0] for name in PIXELS})


@pytest.mark.parametrize("case", pixel_cases())
def test_patches_equal_golden(case):
    _, config, size = case.split(".")
    width, height = map(int, size.split("x"))
    image = synthetic_image(width, height)
    plan = plan_image(width, height, CONFIGS[config])
    assert [*plan.patch_grid, *plan.token_grid] == PIXELS[f"{case}.grid"].tolist()
    assert np.array_equal(resize_image(image, plan), PIXELS[f"{case}.resized_rgb"])
    patches = image_patches(image, plan)
    digest = hashlib.sha256(patches.astype("<f4").tobytes()).digest()
    assert digest == PIXELS[f"{case}.patches_f32_sha256"].tobytes()
    if f"{case}.patches_f32" in PIXELS:
        assert np.array_equal(patches, PIXELS[f"{case}.patches_f32"])


def test_golden_cases_cover_what_they_should():
    assert len(pixel_cases()) == 7
    assert sum(name.endswith(".patches_f32") for name in PIXELS) == 2


def random_image(width, height, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@given(
    width=st.integers(1, 400), height=st.integers(1, 400), ratio=st.sampled_from([None, 0.5, 2.0]), seed=st.integers(0)
)
def test_resizing_equals_pillow(width, height, ratio, seed):
    plan = plan_image(width, height, dataclasses.replace(TINY, max_wh_ratio=ratio))
    picture = Image.fromarray(random_image(width, height, seed))
    canvas = (plan.canvas_width, plan.canvas_height)
    if ratio is not None and width >= ratio * height:
        expected = picture.resize(canvas)
    else:
        expected = ImageOps.pad(picture, canvas, color=(127, 127, 127))
    assert np.array_equal(resize_image(picture, plan), np.asarray(expected))


@pytest.mark.parametrize("size", [(8000, 1), (1, 8000)], ids=str)
def test_strip_whose_short_side_would_vanish_is_stretched(size):
    """Pillow's ``ImageOps`` raises here or leaves the canvas empty, depending on its version."""
    plan = plan_image(*size, TINY)
    canvas = (plan.canvas_width, plan.canvas_height)
    assert max(canvas) / 8000 < 0.5
    picture = Image.fromarray(random_image(*size))
    assert np.array_equal(resize_image(picture, plan), np.asarray(picture.resize(canvas)))


@pytest.mark.parametrize(("height", "margins"), [(25, [0, 1, 27]), (23, [0, 1, 25, 26, 27])])
def test_odd_margin_is_split_with_halves_to_even(height, margins):
    plan = dataclasses.replace(
        plan_image(42, 42, TINY),
        source_width=28,
        source_height=height,
        resized_width=28,
        resized_height=height,
        canvas_width=28,
        canvas_height=28,
        patch_grid=(2, 2),
        token_grid=(1, 1),
    )
    canvas = resize_image(np.zeros((height, 28, 3), np.uint8), plan)
    assert np.flatnonzero(canvas[:, 0, 0]).tolist() == margins
    assert np.all(canvas[margins] == 127)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_images_of_other_modes_are_converted(mode):
    picture = Image.fromarray(random_image(90, 60)).convert(mode)
    plan = plan_image(90, 60, TINY)
    assert np.array_equal(image_patches(picture, plan), image_patches(np.asarray(picture.convert("RGB")), plan))


def test_image_of_another_size_than_planned_is_refused():
    with pytest.raises(InputError, match="'image size' is '60 x 90'; accepted: the planned 90 x 60 pixels"):
        image_patches(random_image(60, 90), plan_image(90, 60, TINY))


def golden_prompt():
    """Token ids with one placeholder, and the plan of its image."""
    ids, types = PROMPT["input_ids"], PROMPT["token_types"]
    height, width, _ = PROMPT["image_rgb"].shape
    text_and_start = (types == TokenType.TEXT) | (types == TokenType.START)
    return ids[text_and_start].tolist(), plan_image(width, height, TINY)


def test_golden_prompt_image():
    _, plan = golden_prompt()
    assert plan.patch_grid == tuple(PROMPT["grid_vit"])
    assert plan.token_grid == tuple(PROMPT["grid_llm"])
    assert np.array_equal(resize_image(PROMPT["image_rgb"], plan), PROMPT["resized_rgb"])
    assert np.array_equal(image_patches(PROMPT["image_rgb"], plan), PROMPT["patches"])


def test_golden_prompt_span():
    token_ids, plan = golden_prompt()
    spliced = splice_spans(token_ids, IMAGE_TOKEN_ID, [plan])
    types = PROMPT["token_types"]
    assert spliced.token_ids == tuple(PROMPT["input_ids"].tolist())
    assert np.array_equal(spliced.image, types != TokenType.TEXT)
    (offset,) = spliced.offsets
    assert offset == 9
    assert np.array_equal(span_tokens(plan), types[offset : offset + plan.tokens])


@given(width=sides, height=sides)
def test_span_shape(width, height):
    plan = plan_image(width, height, RELEASED)
    types = span_tokens(plan)
    rows, columns = plan.token_grid
    assert types.shape == (plan.tokens,)
    assert (types[0], types[-1]) == (TokenType.START, TokenType.END)
    lines = types[1:-1].reshape(rows, columns + 1)
    assert np.all(lines[:, :-1] == TokenType.IMAGE)
    assert np.all(lines[:, -1] == TokenType.NEWLINE)


@given(st.lists(st.one_of(st.integers(0, 510), st.tuples(sides, sides)), max_size=12))
def test_spans_replace_placeholders_and_nothing_else(pieces):
    plans = [plan_image(*piece, TINY) for piece in pieces if isinstance(piece, tuple)]
    token_ids = [IMAGE_TOKEN_ID if isinstance(piece, tuple) else piece for piece in pieces]
    spliced = splice_spans(token_ids, IMAGE_TOKEN_ID, plans)
    text = [token for token in token_ids if token != IMAGE_TOKEN_ID]
    assert np.array(spliced.token_ids, np.int64)[~spliced.image].tolist() == text
    assert len(spliced.token_ids) == len(text) + sum(plan.tokens for plan in plans)
    expected = []
    for piece in pieces:
        expected += [piece] if isinstance(piece, int) else [IMAGE_TOKEN_ID] * plan_image(*piece, TINY).tokens
    assert list(spliced.token_ids) == expected
    assert len(spliced.offsets) == len(plans)
    marked = np.zeros(len(expected), bool)
    for offset, plan in zip(spliced.offsets, plans, strict=True):
        assert not marked[offset : offset + plan.tokens].any()
        marked[offset : offset + plan.tokens] = True
    assert np.array_equal(marked, spliced.image)


@pytest.mark.parametrize(("placeholders", "images"), [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_other_number_of_images_than_placeholders_is_refused(placeholders, images):
    plan = plan_image(90, 60, TINY)
    sentence = f"'number of images' is {images}; accepted: {placeholders}, one for each image placeholder 511"
    with pytest.raises(InputError, match=sentence):
        splice_spans([1, *[IMAGE_TOKEN_ID] * placeholders, 2], IMAGE_TOKEN_ID, [plan] * images)
