"""Meshes: the devices of a layout, as named axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.parallel.layouts import Layout


def layout_mesh(layout: Layout, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of a layout over exactly these devices, in the order given.

    Raises:
      ConfigError: the layout needs another number of devices.
    """
    needed = math.prod(layout.sizes.values())
    if len(devices) != needed:
        raise ConfigError("layout.sizes", dict(layout.sizes), f"sizes whose product is the {len(devices)} devices")
    shape = tuple(layout.sizes.values())
    # Steps say themselves what moves between devices (shard_map), so no axis takes part in sharding by type.
    return Mesh(np.array(devices).reshape(shape), tuple(layout.sizes), axis_types=(AxisType.Auto,) * len(shape))
