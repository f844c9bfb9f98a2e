"""Parameters, each described once.

A :class:`Parameter` says everything about one array of a parameter tree: shape, logical axes, how the release stores it
and under which names, and how to draw it at random. Trees of Parameters have the structure of the trees of arrays, so
abstract shapes, random weights, checkpoint reading, counts and (later) shardings all follow from the same description.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deepinfer_jax.numerics import Numerics
from pallas_kernels import PackedWeight, TransposedWeight, pack_weight

Tree = TypeVar("Tree")
# A leaf of a parameter tree: an array, an abstract array, a Parameter, or None where a layer lacks the mechanism.
Leaf = Any


SCALE_COLUMNS = 32
"""Columns of a quantised weight that share a scale."""


class Stored(enum.Enum):
    """How the released checkpoint stores an array (model specification, 15.2). All but F32 and BF16 carry a scale."""

    BF16 = "bf16"
    F32 = "f32"
    FP8_BLOCKS = "fp8 e4m3, one ue8m0 scale per 32 x 32 tile"
    FP8_ROWS = "fp8 e4m3, one ue8m0 scale per 32 columns of a row"
    FP4_ROWS = "packed fp4 e2m1, one ue8m0 scale per 32 columns of a row"
    DERIVED = "not stored: computed from the tokenizer"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of a parameter tree.

    ``shape`` and ``axes`` (logical axis names, or None) describe the array as the model uses it. ``released`` names the
    checkpoint tensors it is made of: the inner tuple is concatenated along axis 0 (w1 above w3), the outer tuple is
    stacked along a new leading axis when ``stacked`` (experts). ``init`` is a rule of :func:`draw`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    stored: Stored
    released: tuple[tuple[str, ...], ...]
    stacked: bool = False
    init: str = "normal"
    classes: int = 0  # of a derived map: its values lie below this
    multiplied: bool = False  # nothing but pallas_kernels.product reads it
    exact_inputs: bool = False  # the reference does not round this quantised weight's inputs to fp8

    @property
    def size(self) -> int:
        """Number of parameters; 0 for derived arrays, which are not parameters."""
        return 0 if self.stored is Stored.DERIVED else math.prod(self.shape)

    @property
    def has_scale(self) -> bool:
        """Whether each released tensor has a scale tensor beside it."""
        return self.stored in (Stored.FP8_BLOCKS, Stored.FP8_ROWS, Stored.FP4_ROWS)

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Logical (unpacked) shape of each released tensor."""
        shape = self.shape[1:] if self.stacked else self.shape
        parts = len(self.released[0])
        return (shape[0] // parts, *shape[1:]) if parts > 1 else shape

    def tensor_names(self) -> list[str]:
        """Every released tensor this parameter reads, scales included."""
        names = [name for piece in self.released for name in piece]
        return names + [scale_name(name) for name in names] if self.has_scale else names

    def packed(self, numerics: Numerics) -> bool:
        """Whether the array stays packed on the device."""
        return numerics.packed_weights and self.has_scale

    def pack(self, data: Leaf, scale: Leaf, numerics: Numerics) -> PackedWeight:
        """The packed array of this parameter from its bytes and scales."""
        rounds = numerics.output_down_inputs_fp8 if self.exact_inputs else numerics.linear_inputs_fp8
        return PackedWeight(data, scale, self.stored is Stored.FP4_ROWS, self.scale_rows, rounds)

    @property
    def scale_rows(self) -> int:
        """Rows that share a scale: 32 in tiles, 1 in rows."""
        return SCALE_COLUMNS if self.stored is Stored.FP8_BLOCKS else 1

    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the stored bytes of an array or piece of logical ``shape``."""
        return (*shape[:-1], shape[-1] // 2) if self.stored is Stored.FP4_ROWS else shape

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of an array or piece of logical ``shape``."""
        *batch, rows, columns = shape
        return (*batch, -(-rows // self.scale_rows), -(-columns // SCALE_COLUMNS))

    def dtype(self, numerics: Numerics) -> jnp.dtype:
        """Dtype on the device: what the release keeps in float32 stays so, the rest follows the numerics."""
        if self.stored is Stored.DERIVED:
            return jnp.dtype(jnp.int32)
        return jnp.dtype(jnp.float32) if self.stored is Stored.F32 else numerics.dtype


def scale_name(weight_name: str) -> str:
    """Released name of the scale that belongs to a quantised weight."""
    return weight_name.removesuffix(".weight") + ".scale"


def single(
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    stored: Stored = Stored.BF16,
    init: str = "normal",
) -> Parameter:
    """A parameter that is exactly one released tensor."""
    return Parameter(shape, axes, stored, ((name,),), init=init)


def matrix(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], stored: Stored = Stored.BF16) -> Parameter:
    """A :func:`single` weight that rows are multiplied with, and that serves nothing else."""
    return dataclasses.replace(single(name, shape, axes, stored), multiplied=True)


def norm(name: str, width: int, axis: str | None = None) -> Parameter:
    """An RMSNorm weight."""
    return single(name, (width,), (axis,), init="norm")


def parameters(tree: Any) -> list[Parameter]:
    """The descriptions of a described tree, in tree order."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_parameter) if _is_parameter(leaf)]


def count(tree: Any) -> int:
    """Number of parameters described by a tree."""
    return sum(parameter.size for parameter in parameters(tree))


def abstract(described: Tree, numerics: Numerics) -> Tree:
    """What a described tree loads as: jax.ShapeDtypeStruct leaves, inside PackedWeight where weights stay packed."""

    def one(item: Parameter) -> Leaf:
        if not item.packed(numerics):
            return jax.ShapeDtypeStruct(item.shape, item.dtype(numerics))
        data, scale = item.data_shape(item.shape), item.scale_shape(item.shape)
        return item.pack(jax.ShapeDtypeStruct(data, jnp.uint8), jax.ShapeDtypeStruct(scale, jnp.uint8), numerics)

    return map_parameters(one, described)


def initialise(described: Tree, key: Array, numerics: Numerics) -> Tree:
    """Random arrays for a described tree. A parameter's values depend on the key and its position in the tree only."""
    leaves, structure = jax.tree.flatten(described, is_leaf=_is_parameter)
    drawn = [draw(item, jax.random.fold_in(key, index), numerics) for index, item in enumerate(leaves)]
    return jax.tree.unflatten(structure, drawn)


def map_parameters(function: Any, described: Tree) -> Tree:
    """Map a function over the Parameters of a described tree."""
    return jax.tree.map(function, described, is_leaf=_is_parameter)


def draw(item: Parameter, key: Array, numerics: Numerics) -> Array | PackedWeight:
    """Draw one parameter by its ``init`` rule, scaled so that activations keep unit size through the layers."""
    if item.packed(numerics):
        values = draw(item, key, dataclasses.replace(numerics, packed_weights=False))
        assert isinstance(values, Array)
        packed = pack_weight(values, fp4=item.stored is Stored.FP4_ROWS, scale_rows=item.scale_rows)
        return item.pack(packed.data, packed.scale, numerics)
    dtype = item.dtype(numerics)
    if item.stored is Stored.DERIVED:
        return jnp.arange(item.shape[0], dtype=dtype) % item.classes
    return from_noise(item, jax.random.normal(key, item.shape, jnp.float32)).astype(dtype)


def from_noise(item: Parameter, noise: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The values of a parameter, or of some of its rows, from standard normal noise by its ``init`` rule; float32."""
    rules = {
        "normal": lambda: noise * noise.shape[-1] ** -0.5,
        "unit": lambda: noise,
        "small": lambda: noise * 0.1,
        "norm": lambda: 1.0 + 0.1 * noise,
        "mix_scale": lambda: 0.3 + 0.05 * noise,
        "mix_base": lambda: _mix_base(noise.shape[0]) + 0.1 * noise,
    }
    return rules[item.init]()


def backend_form(item: Parameter, weight: Leaf) -> Leaf:
    """An array of unrolled parameters in the form that suits the default backend.

    On a CPU multiplied weights lie transposed, ``[in out]``, and every expert's in an array of its own: its products
    then read them in place. Packed weights are not transposed.
    """
    if jax.default_backend() != "cpu":
        return weight
    if item.stacked:
        return tuple(_cpu_form(item, weight[expert]) for expert in range(item.shape[0]))
    return _cpu_form(item, weight)


def _cpu_form(item: Parameter, weight: Leaf) -> Leaf:
    return TransposedWeight(weight.T) if item.multiplied and not isinstance(weight, PackedWeight) else weight


def _mix_base(mixes: int) -> Array:
    """Offsets of an mHC mix with ``(2 + M) M`` values: collapse mostly one stream, keep the streams mostly apart."""
    streams = next(count for count in range(1, mixes) if (2 + count) * count == mixes)
    pre = jnp.full((streams,), -1.0).at[0].set(1.0)
    comb = jnp.where(jnp.eye(streams, dtype=bool), 1.5, -1.5).reshape(-1)
    return jnp.concatenate([pre, jnp.zeros((streams,)), comb])


def _is_parameter(item: object) -> bool:
    return isinstance(item, Parameter)
