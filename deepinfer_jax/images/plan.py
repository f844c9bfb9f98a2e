"""The plan of one image: pixels, patches and tokens, computed from its size alone (model specification, 14.1).

The arithmetic, floating point included, follows the released image processor step by step: the number of tokens must
come out the same wherever a request is counted, billed or computed. Pixel sizes are (width, height) as in imaging
libraries, grids are (rows, columns) as in arrays.
"""

from __future__ import annotations

import dataclasses
import math

from deepinfer_jax.config import VisionConfig
from deepinfer_jax.errors import InputError

# One row of one token: start, image, newline, end.
SMALLEST_SPAN = 4


@dataclasses.dataclass(frozen=True)
class ImagePlan:
    """What becomes of an image of ``source_width`` x ``source_height`` pixels.

    It is resized to ``resized_width`` x ``resized_height`` pixels and centred on a canvas of ``canvas_width`` x
    ``canvas_height``, which holds exactly ``patch_grid`` patches; the aligner makes ``token_grid`` tokens of them. The
    patch grid need not be a multiple of the aligner's reach.
    """

    source_width: int
    source_height: int
    resized_width: int
    resized_height: int
    canvas_width: int
    canvas_height: int
    patch_grid: tuple[int, int]
    token_grid: tuple[int, int]

    @property
    def tokens(self) -> int:
        """Prompt positions of the image span, start, newlines and end included."""
        return span_length(*self.token_grid)


def span_length(rows: int, columns: int) -> int:
    """Prompt positions of an image of ``rows`` x ``columns`` tokens: a newline ends each row, start and end enclose."""
    return rows * (columns + 1) + 2


def plan_image(width: int, height: int, config: VisionConfig) -> ImagePlan:
    """Plan an image of ``width`` x ``height`` pixels.

    Raises:
      InputError: the image has no pixels, or any image has more tokens than ``max_image_tokens`` allows.
    """
    if width < 1 or height < 1:
        raise InputError("image size", f"{width} x {height}", "at least 1 x 1 pixels")
    if config.max_image_tokens < SMALLEST_SPAN:
        accepted = f"no image: the smallest takes {SMALLEST_SPAN} tokens, max_image_tokens is {config.max_image_tokens}"
        raise InputError("image size", f"{width} x {height}", accepted, "raise max_image_tokens in the configuration")
    canvas_width, canvas_height = _canvas(width, height, config)
    resized_width, resized_height = _resized(width, height, canvas_width, canvas_height, config)
    return ImagePlan(
        source_width=width,
        source_height=height,
        resized_width=resized_width,
        resized_height=resized_height,
        canvas_width=canvas_width,
        canvas_height=canvas_height,
        patch_grid=(canvas_height // config.patch_size, canvas_width // config.patch_size),
        token_grid=_token_grid(canvas_width, canvas_height, config),
    )


def _canvas(width: int | float, height: int | float, config: VisionConfig) -> tuple[int, int]:
    """Canvas pixels: the size rounded up to whole patches, after enlarging or shrinking it into the limits."""
    patch = config.patch_size
    if config.max_wh_ratio is not None:
        width = min(width, height * config.max_wh_ratio)
    if width * height < config.min_pixels:
        enlargement = (config.min_pixels / (width * height)) ** 0.5
        width, height = int(width * enlargement), int(height * enlargement)
    canvas = math.ceil(width / patch) * patch, math.ceil(height / patch) * patch
    if span_length(*_token_grid(*canvas, config)) <= config.max_image_tokens:
        return canvas
    return _shrunk_canvas(width, height, config)


def _shrunk_canvas(width: int | float, height: int | float, config: VisionConfig) -> tuple[int, int]:
    """The largest canvas of about the same shape whose tokens stay within ``max_image_tokens``."""
    patch, token_pixels = config.patch_size, config.patch_size * config.downsample_ratio
    aspect = height / width
    # Real-valued columns c of a grid with c * aspect rows that uses the limit up: (c * aspect) (c + 1) + 2 = limit.
    columns = math.sqrt((config.max_image_tokens - 2) / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1:
        return token_pixels, (config.max_image_tokens - 2) // 2 * token_pixels
    if rows < 1:
        return (config.max_image_tokens - 3) * token_pixels, token_pixels
    scale = min(math.floor(columns) * token_pixels / width, math.floor(rows) * token_pixels / height)
    return math.floor(width * scale / patch) * patch, math.floor(height * scale / patch) * patch


def _token_grid(canvas_width: int, canvas_height: int, config: VisionConfig) -> tuple[int, int]:
    patch, ratio = config.patch_size, config.downsample_ratio
    return math.ceil(canvas_height // patch / ratio), math.ceil(canvas_width // patch / ratio)


def _resized(width: int, height: int, canvas_width: int, canvas_height: int, config: VisionConfig) -> tuple[int, int]:
    """The largest size of the image's shape inside the canvas, rounded as Pillow's ``ImageOps.contain`` does.

    An image as wide as ``max_wh_ratio`` allows or wider, or so long that its other side would vanish, is stretched over
    the whole canvas.
    """
    if config.max_wh_ratio is not None and width >= config.max_wh_ratio * height:
        return canvas_width, canvas_height
    if width * canvas_height > height * canvas_width:
        resized = canvas_width, round(height / width * canvas_width)
    else:
        resized = round(width / height * canvas_height), canvas_height
    return resized if min(resized) > 0 else (canvas_width, canvas_height)
