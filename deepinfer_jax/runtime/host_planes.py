"""From the planes of a snapshot to those that a device takes: same rows, in its own dtypes and a transfer's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from deepinfer_jax.cache import records
from deepinfer_jax.runtime.transfer import BLOCKS_AT_ONCE, BlockPlanes, SlotPlanes, batches


def block_planes(
    blocks: Sequence[int], planes: records.BlockPlanes, like: BlockPlanes
) -> Iterator[tuple[Int32[np.ndarray, " {BLOCKS_AT_ONCE}"], BlockPlanes]]:
    """Block numbers and planes for every call of :meth:`deepinfer_jax.runtime.transfer.Transfer.write_blocks`.

    All arrays are new, since a device on the host's memory keeps what it is given.

    Args:
      blocks: where each of the blocks goes, numbered over all shards.
      planes: their content, in the same order.
      like: the transfer's abstract ``block_planes``.
    """

    def fixed(start: int, leaf: np.ndarray, wanted: Any) -> np.ndarray:
        part = leaf[start : start + BLOCKS_AT_ONCE]
        padded = np.zeros(wanted.shape, wanted.dtype)
        padded[: len(part)] = _stored(part, wanted)
        return padded

    leaves, structure = jax.tree.flatten(like)
    for call, numbers in enumerate(batches(blocks)):
        parts = [
            fixed(call * BLOCKS_AT_ONCE, leaf, wanted)
            for leaf, wanted in zip(jax.tree.leaves(planes), leaves, strict=True)
        ]
        yield numbers, jax.tree.unflatten(structure, parts)


def slot_planes(planes: records.SlotPlanes, like: SlotPlanes) -> SlotPlanes:
    """Planes for :meth:`deepinfer_jax.runtime.transfer.Transfer.write_slot`, in new arrays.

    ``like``: the transfer's abstract ``slot_planes``.
    """
    leaves, structure = jax.tree.flatten(like)
    found = jax.tree.leaves(planes)
    if [leaf.shape for leaf in found] != [wanted.shape for wanted in leaves]:
        raise ValueError(f"rings of shapes {[leaf.shape for leaf in found]} for a slot of {like}")
    return jax.tree.unflatten(
        structure, [_stored(leaf, wanted).copy() for leaf, wanted in zip(found, leaves, strict=True)]
    )


def _stored(leaf: np.ndarray, wanted: Any) -> np.ndarray:
    """bfloat16 as its bits where the device keeps it so."""
    if leaf.dtype == wanted.dtype:
        return leaf
    if leaf.dtype.name == "bfloat16" and wanted.dtype == np.uint16:
        return leaf.view(np.uint16)
    raise ValueError(f"rows of {leaf.dtype} for a cache of {wanted.dtype}")
