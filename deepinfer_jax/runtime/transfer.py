"""Moving blocks and slots between the device state and the host, in fixed shapes that compile once.

Everything stays on the device here: what is read are new device arrays, which nothing in this module looks at. Numbers
of blocks and slots are global: where the state is split over devices along pool rows and slots, each device reads and
writes what lies on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int32

from deepinfer_jax.cache.state import State
from pallas_kernels import CachedRows
from pallas_kernels.row_formats import ROW_FORMATS

BLOCKS_AT_ONCE = 8
UNUSED = -1
"""Number of no block: reading it gives anything, writing it is dropped, like any number out of range."""

_BFLOAT16_NAN = 0x7FC0
_POOL_AXIS, _SLOT_AXIS, _HISTORY_AXIS = 0, 1, 0


@struct.dataclass
class BlockPlanes:
    """Content of some blocks, as it is stored; leaves of ``main`` and ``index`` are ``[blocks rows_per_block ...]``.

    Leaves are host arrays, device arrays, or abstract arrays of the same shapes.
    """

    main: Any
    index: Any


@struct.dataclass
class SlotPlanes:
    """Content of one slot, as it is stored, over host, device or abstract arrays.

    ``window`` ``[layers window_ring ...]``, ``pending`` ``[groups pending_ring 2 * head_dim]`` and ``history``
    ``[history_ring]``; rows stand at their position modulo the ring's length.
    """

    window: Any
    pending: Any
    history: Any


class Transfer:
    """The compiled transfers of one state: :data:`BLOCKS_AT_ONCE` blocks, or one slot, a call.

    ``block_planes`` and ``slot_planes`` are the abstract planes that its functions take and return.
    """

    def __init__(self, state: State) -> None:
        """Compile for states like this one.

        Args:
          state: arrays, or abstract arrays; transfers keep the shardings that its leaves have.
        """
        self._place = place = _Placement.of(state)
        abstract = jax.tree.map(_abstract, state)
        blocks = place.replicate(jax.ShapeDtypeStruct((BLOCKS_AT_ONCE,), jnp.int32))
        slot = place.replicate(jax.ShapeDtypeStruct((1,), jnp.int32))
        read_blocks, read_slot = place.on_devices(_read_blocks), place.on_devices(_read_slot)
        self.block_planes = place.replicate(jax.eval_shape(read_blocks, abstract, blocks))
        self.slot_planes = place.replicate(jax.eval_shape(read_slot, abstract, slot))
        self._read_blocks = jax.jit(read_blocks).lower(abstract, blocks).compile()
        self._read_slot = jax.jit(read_slot).lower(abstract, slot).compile()
        self._write_blocks = self._writer(_write_blocks, abstract, blocks, self.block_planes)
        self._write_slot = self._writer(_write_slot, abstract, slot, self.slot_planes)

    def read_blocks(self, state: State, blocks: Int32[np.ndarray, " blocks"]) -> BlockPlanes:
        """The content of some blocks; see :func:`batches`. The state stays usable."""
        return self._read_blocks(state, blocks)

    def write_blocks(self, state: State, blocks: Int32[np.ndarray, " blocks"], planes: BlockPlanes) -> State:
        """The state with this content in some blocks. Donates the state.

        ``planes`` come from :meth:`read_blocks`, or are host arrays that nobody writes to any more.
        """
        return self._write_blocks(state, blocks, planes)

    def read_slot(self, state: State, slot: int | np.integer) -> SlotPlanes:
        """The content of a slot. The state stays usable."""
        return self._read_slot(state, np.full(1, slot, np.int32))

    def write_slot(self, state: State, slot: int | np.integer, planes: SlotPlanes) -> State:
        """The state with this content in a slot. Donates the state; ``planes`` as in :meth:`write_blocks`."""
        return self._write_slot(state, np.full(1, slot, np.int32), planes)

    def poison_blocks(self, state: State, blocks: Int32[np.ndarray, " blocks"]) -> State:
        """The state with NaN in some blocks, for tests. Donates the state."""
        return self.write_blocks(state, blocks, jax.tree.map(_poisoned, self.block_planes, is_leaf=_is_cache))

    def poison_slot(self, state: State, slot: int | np.integer) -> State:
        """The state with NaN in a slot, and a history of no tokens, for tests. Donates the state."""
        return self.write_slot(state, slot, jax.tree.map(_poisoned, self.slot_planes, is_leaf=_is_cache))

    def compiled_text(self) -> dict[str, str]:
        """The compiled modules by name, to read what they copy."""
        names = ("read_blocks", "write_blocks", "read_slot", "write_slot")
        return {name: getattr(self, f"_{name}").as_text() for name in names}

    def _writer(self, function: Callable[..., State], state: State, numbers: Any, planes: Any) -> Any:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        kept = None if self._place.mesh is None else shardings
        writes = jax.jit(self._place.on_devices(function, state), donate_argnums=0, out_shardings=kept)
        return writes.lower(state, numbers, planes).compile()


def batches(blocks: Sequence[int]) -> list[Int32[np.ndarray, " blocks"]]:
    """Block numbers in fresh arrays of :data:`BLOCKS_AT_ONCE`, the last one filled up with :data:`UNUSED`."""
    padded = np.full(-(-len(blocks) // BLOCKS_AT_ONCE) * BLOCKS_AT_ONCE, UNUSED, np.int32)
    padded[: len(blocks)] = blocks
    return [part.copy() for part in padded.reshape(-1, BLOCKS_AT_ONCE)]


@dataclasses.dataclass(frozen=True)
class _Placement:
    """How a state lies on devices: all of it on one, or split along pool rows and slots over axes of ``mesh``.

    ``specs`` are the partitions of the state's leaves; ``pages`` and ``slots`` the mesh axes that split them.
    """

    mesh: Mesh | None
    specs: Any
    pages: Any
    slots: Any

    @classmethod
    def of(cls, state: State) -> _Placement:
        found = [leaf.sharding for leaf in jax.tree.leaves(state)]
        if not all(isinstance(sharding, NamedSharding) for sharding in found):
            return cls(None, None, None, None)
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
        return cls(found[0].mesh, specs, _axes(state.main, _POOL_AXIS), _axes(state.window, _SLOT_AXIS))

    def on_devices(self, function: Callable[..., Any], successor: State | None = None) -> Callable[..., Any]:
        """``function(placement, state, ...)`` as each device runs it; it returns a state where ``successor`` is one."""

        def placed(*arguments: Any) -> Any:
            return function(self, *arguments)

        if self.mesh is None:
            return placed

        def split(state: State, *others: Any) -> Any:
            return jax.shard_map(
                placed,
                mesh=self.mesh,
                in_specs=(self.specs, *(P() for _ in others)),
                out_specs=P() if successor is None else self.specs,
                check_vma=False,
            )(state, *others)

        return split

    def replicate(self, abstract: Any) -> Any:
        """Abstract arrays as every device has them."""
        if self.mesh is None:
            return abstract
        sharding = NamedSharding(self.mesh, P())
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract)


def _read_blocks(place: _Placement, state: State, blocks: Array) -> BlockPlanes:
    def read(pool: Any) -> Any:
        return jax.tree.map(
            lambda plane: _taken(plane, blocks, state.layout.rows_per_block, _POOL_AXIS, place.pages), pool
        )

    return BlockPlanes(read(state.main), read(state.index))


def _write_blocks(place: _Placement, state: State, blocks: Array, planes: BlockPlanes) -> State:
    def write(pool: Any, content: Any) -> Any:
        return jax.tree.map(
            lambda plane, values: _replaced(plane, blocks, values, _POOL_AXIS, place.pages), pool, content
        )

    return dataclasses.replace(state, main=write(state.main, planes.main), index=write(state.index, planes.index))


def _read_slot(place: _Placement, state: State, slot: Array) -> SlotPlanes:
    def read(rings: Any, axis: int) -> Any:
        return jax.tree.map(lambda ring: _taken(ring, slot, 1, axis, place.slots)[0].squeeze(axis), rings)

    return SlotPlanes(
        read(state.window, _SLOT_AXIS), read(state.pending, _SLOT_AXIS), read(state.history, _HISTORY_AXIS)
    )


def _write_slot(place: _Placement, state: State, slot: Array, planes: SlotPlanes) -> State:
    def write(rings: Any, content: Any, axis: int) -> Any:
        def one(ring: Array, values: Array) -> Array:
            return _replaced(ring, slot, jnp.expand_dims(values, (0, axis + 1)), axis, place.slots)

        return jax.tree.map(one, rings, content)

    return dataclasses.replace(
        state,
        window=write(state.window, planes.window, _SLOT_AXIS),
        pending=write(state.pending, planes.pending, _SLOT_AXIS),
        history=write(state.history, planes.history, _HISTORY_AXIS),
    )


def _taken(plane: Array, numbers: Int32[Array, " parts"], size: int, axis: int, names: Any) -> Array:
    """Parts ``[parts ...]`` of a plane: ``size`` rows of ``axis`` from ``number * size`` on."""
    if plane.shape[axis] < size or not size:
        return jnp.zeros((numbers.shape[0], *plane.shape[:axis], size, *plane.shape[axis + 1 :]), plane.dtype)
    local, inside = _local(plane, numbers, size, axis, names)
    starts = jnp.where(inside, local, 0) * size
    parts = jax.vmap(lambda start: lax.dynamic_slice_in_dim(plane, start, size, axis))(starts)
    if names is None:
        return parts
    # Summed as integers: adding 0.0 would turn -0.0 into 0.0. Not every device adds 16-bit integers of others.
    bits = lax.bitcast_convert_type(parts, jnp.dtype(f"uint{8 * parts.dtype.itemsize}"))
    own = jnp.where(jnp.expand_dims(inside, tuple(range(1, bits.ndim))), bits.astype(jnp.uint32), jnp.uint32(0))
    return lax.bitcast_convert_type(lax.psum(own, names).astype(bits.dtype), parts.dtype)


def _replaced(plane: Array, numbers: Int32[Array, " parts"], values: Array, axis: int, names: Any) -> Array:
    """The plane with ``values`` ``[parts ...]`` at the places of :func:`_taken`; what lies elsewhere is dropped."""
    size = values.shape[axis + 1]
    if plane.shape[axis] < size or not size:
        return plane
    local, inside = _local(plane, numbers, size, axis, names)
    starts = jnp.where(inside, local * size, plane.shape[axis])
    windows = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, values.ndim)), inserted_window_dims=(), scatter_dims_to_operand_dims=(axis,)
    )
    return lax.scatter(plane, starts[:, None], values, windows, mode=lax.GatherScatterMode.FILL_OR_DROP)


def _local(plane: Array, numbers: Array, size: int, axis: int, names: Any) -> tuple[Array, Array]:
    """Numbers counted from this device's first part on, and whether this device holds them."""
    count = plane.shape[axis] // size
    local = numbers if names is None else numbers - lax.axis_index(names) * count
    return local, (local >= 0) & (local < count)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    # The place of an uncommitted array stays open: a state would otherwise come back committed, which recompiles steps.
    committed = leaf.committed if isinstance(leaf, jax.Array) else True
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if committed else None)


def _axes(cache: Any, axis: int) -> Any:
    spec = jax.tree.leaves(cache)[0].sharding.spec
    return spec[axis] if axis < len(spec) else None


def _is_cache(item: object) -> bool:
    return isinstance(item, CachedRows)


def _poisoned(cache: Any) -> Any:
    if isinstance(cache, CachedRows):
        scale = np.full(cache.scale.shape, ROW_FORMATS[cache.name].nan_scale, np.uint8)
        return CachedRows(np.zeros(cache.data.shape, np.uint8), scale, cache.name)
    if cache.dtype == np.uint16:
        return np.full(cache.shape, _BFLOAT16_NAN, np.uint16)
    return np.full(cache.shape, -1 if cache.dtype == np.int32 else np.nan, cache.dtype)
