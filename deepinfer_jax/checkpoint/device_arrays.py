"""Making device arrays of any size block by block, with host memory bounded by a block."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding
from jaxtyping import Array

from deepinfer_jax.checkpoint.pieces import Bounds, lengths, whole

BLOCK_BYTES = 1 << 25
"""Bytes on the host of an array that is under way to a device."""

# XLA aligns its buffers to this many bytes, and takes over host memory that is aligned alike instead of copying it.
_ALIGNMENT = 64
_ROW_MULTIPLE = 32  # rows of a block, so that the tiles of a quantised weight are decoded once

Fill = Callable[[np.ndarray, Bounds], None]
"""Writes the block with these bounds of an array into the first argument."""


def place(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding | None, fill: Fill) -> Array:
    """An array whose blocks are written by ``fill``; every device gets its own slice and nothing else is asked for.

    ``sharding`` None means the default device, uncommitted. Slices that several devices hold are read once.
    """
    if sharding is None:
        return _copies(whole(shape), dtype, (None,), fill)[0]
    held: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(part.indices(length)[:2] for part, length in zip(index, shape, strict=True))
        held.setdefault(bounds, []).append(device)
    slices = [copy for bounds, devices in held.items() for copy in _copies(bounds, dtype, tuple(devices), fill)]
    return jax.make_array_from_single_device_arrays(shape, sharding, slices)


def blocks(bounds: Bounds, item_bytes: int, limit: int) -> Iterator[Bounds]:
    """Cut a block into blocks of at most ``limit`` bytes (or one row), each contiguous in the larger one's order."""
    sizes = lengths(bounds)
    axis, inner = len(sizes) - 1, item_bytes
    while axis > 0 and inner * sizes[axis] <= limit:
        inner *= sizes[axis]
        axis -= 1
    step = max(1, limit // inner)
    if step > _ROW_MULTIPLE:
        step -= step % _ROW_MULTIPLE
    leading = itertools.product(*(range(*one) for one in bounds[:axis]))
    for index in leading:
        for start in range(*bounds[axis], step):
            stop = min(start + step, bounds[axis][1])
            yield (*((place, place + 1) for place in index), (start, stop), *bounds[axis + 1 :])


def _copies(bounds: Bounds, dtype: np.dtype, devices: Sequence[jax.Device | None], fill: Fill) -> list[Array]:
    platform = devices[0].platform if devices[0] is not None else jax.default_backend()
    if platform == "cpu":
        return host_copies(bounds, dtype, devices, fill)
    return uploaded_copies(bounds, dtype, devices, fill)


def host_copies(bounds: Bounds, dtype: np.dtype, devices: Sequence[jax.Device | None], fill: Fill) -> list[Array]:
    """Copies of a block on CPU devices, which take over the host memory that was filled; nothing is held twice."""
    host = _aligned(lengths(bounds), dtype)
    for block in blocks(bounds, dtype.itemsize, BLOCK_BYTES):
        inside = tuple(
            slice(start - first, stop - first) for (start, stop), (first, _) in zip(block, bounds, strict=True)
        )
        fill(host[inside], block)
    return [jax.device_put(host, device) for device in devices]


def uploaded_copies(bounds: Bounds, dtype: np.dtype, devices: Sequence[jax.Device | None], fill: Fill) -> list[Array]:
    """Copies of a block on devices with memory of their own, written there one host block at a time."""
    copies: list[Array] = []
    for block in blocks(bounds, dtype.itemsize, BLOCK_BYTES):
        host = np.empty(lengths(block), dtype)
        fill(host, block)
        if block == bounds:
            return [jax.device_put(host, device) for device in devices]
        if not copies:
            copies = [_empty(lengths(bounds), dtype, device) for device in devices]
        corner = tuple(np.int32(start - first) for (start, _), (first, _) in zip(block, bounds, strict=True))
        copies = [
            _write(copy, jax.device_put(host, device), corner) for copy, device in zip(copies, devices, strict=True)
        ]
        # Dispatch runs ahead of transfers; waiting keeps one block on the host.
        jax.block_until_ready(copies)
    return copies


@functools.partial(jax.jit, donate_argnums=0)
def _write(array: Array, block: Array, corner: tuple[Array, ...]) -> Array:
    return lax.dynamic_update_slice(array, block, corner)


def _empty(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device | None) -> Array:
    return jnp.empty(shape, dtype, device=device)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size].view(dtype).reshape(shape)
