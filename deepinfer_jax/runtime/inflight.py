"""Results of dispatched work that the device may still be computing."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


class InFlight:
    """Device arrays that nobody looks into before :meth:`read`, the only place where the host waits for the device."""

    __slots__ = ("_arrays",)

    def __init__(self, arrays: Any) -> None:
        """``arrays``: a tree of device arrays; their way to the host begins now, behind whatever computes them."""
        self._arrays = arrays
        for leaf in jax.tree.leaves(arrays):
            leaf.copy_to_host_async()

    @property
    def on_device(self) -> Any:
        """The tree itself, to be handed to further device work."""
        return self._arrays

    def read(self) -> Any:
        """Wait, and return the tree with host arrays."""
        return jax.tree.map(np.asarray, self._arrays)
