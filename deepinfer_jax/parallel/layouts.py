"""Layouts: which logical axis of parameters, state and step input lies along which mesh axis.

A layout is a small table. Shapes, shardings and the split of every array follow from it and from the logical axes that
each array is described with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.cache.state import State
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.layer import Layer, StackedLayers, UnrolledLayers
from deepinfer_jax.model.params import Parameter, map_parameters
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.topology import topology

# Logical axes that belong to a row's own request: whoever owns the row owns its slot and its pages.
ROW_AXES = ("rows", "slots", "pages")


@dataclasses.dataclass(frozen=True)
class Layout:
    """``sizes``: devices along each mesh axis, in mesh order. ``placed``: mesh axis of each logical axis that is split.

    Raises:
      ConfigError: a logical axis is placed on a mesh axis that does not exist.
    """

    sizes: Mapping[str, int]
    placed: Mapping[str, str]

    def __post_init__(self) -> None:
        for logical, axis in self.placed.items():
            if axis not in self.sizes:
                raise ConfigError(f"layout.{logical}", axis, f"a mesh axis, one of {', '.join(self.sizes)}")

    def parts(self, logical: str | None) -> int:
        """Into how many parts a logical axis is split."""
        axis = self.placed.get(logical) if logical else None
        return self.sizes[axis] if axis else 1

    def spec(self, axes: tuple[str | None, ...]) -> P:
        """The partition of an array with these logical axes."""
        return P(*(self.placed.get(axis) if axis else None for axis in axes))


def expert_and_data_parallel(devices: int) -> Layout:
    """One axis ``data``: every device has its own rows, slots and pages, and a part of the experts and of the tables.

    Everything else is replicated. This is the provisional layout that proves the compiled step; searching for better
    ones comes later.
    """
    spread = (*ROW_AXES, "experts", "engram_rows", "vocabulary")
    return Layout(MappingProxyType({"data": devices}), MappingProxyType(dict.fromkeys(spread, "data")))


def padded(described: Model, layout: Layout) -> Model:
    """The described tree with every split axis rounded up to whole parts; nothing ever reads the rows added.

    The release's Engram tables need it: their row counts are sums of primes.
    """

    def one(item: Parameter) -> Parameter:
        whole = (
            -(-size // parts) * parts for size, parts in zip(item.shape, map(layout.parts, item.axes), strict=True)
        )
        return dataclasses.replace(item, shape=tuple(whole))

    return map_parameters(one, described)


def parameter_specs(described: Model, layout: Layout, config: ModelConfig, numerics: Numerics) -> Model:
    """Partition of every parameter, for stacked layers. ``described`` is the unrolled description."""

    def one(item: Parameter) -> Any:
        spec = layout.spec(item.axes)
        # A scale has the axes of its weight; a split through a tile of rows that share a scale is refused.
        if not item.packed(numerics):
            return spec
        if item.scale_rows > 1 and layout.parts(item.axes[-2]) > 1:
            raise ConfigError(
                f"layout.{item.axes[-2]}", item.released[0][0], "an axis whose rows have scales of their own"
            )
        return item.pack(spec, spec, numerics)

    specs = map_parameters(one, described)
    return dataclasses.replace(specs, layers=_stacked_specs(specs, config))


def _stacked_specs(specs: Model, config: ModelConfig) -> StackedLayers:
    """All layers of a run are of one kind, so that the first one's partitions serve the whole stack."""
    unrolled = specs.layers
    assert isinstance(unrolled, UnrolledLayers)

    def stacked(layer: int) -> Layer:
        return jax.tree.map(lambda spec: P(None, None, *spec), unrolled.layers[layer], is_leaf=_is_spec)

    return StackedLayers(
        tuple(
            tuple(stacked(segment.run_layers(run)[0][0]) for run in range(len(segment.runs)))
            for segment in topology(config).segments
        )
    )


def state_specs(state: State, layout: Layout) -> State:
    """Partition of the state: each device has its own slots and its own pools, addressed by device-local numbers."""

    def planes(cache: Any, *axes: str | None) -> Any:
        return jax.tree.map(lambda _: layout.spec(axes), cache)

    return State(
        main=planes(state.main, "pages", None),
        index=planes(state.index, "pages", None),
        window=planes(state.window, None, "slots", None, None),
        pending=layout.spec((None, "slots", None, None)),
        history=layout.spec(("slots", None)),
        layout=state.layout,
    )


def shardings(specs: Any, mesh: Mesh) -> Any:
    """The named sharding of every partition of a tree."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)


def placed(abstract: Any, specs: Any, mesh: Mesh) -> Any:
    """Abstract arrays with the sharding that their partition gives them on a mesh."""

    def one(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(one, abstract, shardings(specs, mesh))


def _is_spec(item: object) -> bool:
    return isinstance(item, P)
