"""An image's pixels as patches for the vision tower (model specification, 14.2)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from deepinfer_jax.errors import InputError
from deepinfer_jax.images.plan import ImagePlan

CANVAS_VALUE = 127  # mid grey, int(0.5 * 255)


def image_patches(
    image: Image.Image | UInt8[np.ndarray, "height width 3"], plan: ImagePlan
) -> Float[np.ndarray, "patches 3 patch patch"]:
    """The patches of an image in raster order, channel first.

    The values are ``(u / 255 - 0.5) / 0.5`` rounded to bfloat16, held in float32. Images with other modes than RGB are
    converted; transparency is dropped, and a rotation in the metadata is not applied.

    Raises:
      InputError: the image is not of the size that was planned.
    """
    canvas = resize_image(image, plan)
    rows, columns = plan.patch_grid
    patch = plan.canvas_height // rows
    tiles = _pixel_values()[canvas].reshape(rows, patch, columns, patch, 3)
    return np.ascontiguousarray(tiles.transpose(0, 2, 4, 1, 3)).reshape(rows * columns, 3, patch, patch)


def resize_image(
    image: Image.Image | UInt8[np.ndarray, "height width 3"], plan: ImagePlan
) -> UInt8[np.ndarray, "canvas_height canvas_width 3"]:
    """The image as RGB, resized bicubically and centred on the planned canvas.

    Raises:
      InputError: the image is not of the size that was planned.
    """
    picture = image.convert("RGB") if isinstance(image, Image.Image) else Image.fromarray(image)
    if picture.size != (plan.source_width, plan.source_height):
        accepted = f"the planned {plan.source_width} x {plan.source_height} pixels"
        raise InputError("image size", "{} x {}".format(*picture.size), accepted, "declare the size of the image sent")
    width, height = plan.resized_width, plan.resized_height
    resized = picture.resize((width, height), Image.Resampling.BICUBIC)
    # Halves round to even, as in the reference: a margin of 5 pixels puts 2 before and 3 behind the image.
    left, top = round((plan.canvas_width - width) / 2), round((plan.canvas_height - height) / 2)
    canvas = np.full((plan.canvas_height, plan.canvas_width, 3), CANVAS_VALUE, np.uint8)
    canvas[top : top + height, left : left + width] = np.asarray(resized)
    return canvas


def _pixel_values() -> Float[np.ndarray, " 256"]:
    """The patch value of every 8-bit intensity."""
    unit = np.arange(256, dtype=np.float32) / np.float32(255)
    centred = (unit - np.float32(0.5)) / np.float32(0.5)
    return centred.astype(ml_dtypes.bfloat16).astype(np.float32)
