"""Parameters to begin training with: sub-layers that add nothing yet, and small tables.

The project's own random parameters keep activations busy from the first layer on, which suits tests; training from
them starts with noise that it has to unlearn.
"""

from __future__ import annotations

import jax
from jaxtyping import Array

from deepinfer_jax.model.params import Parameter, Tree, initialise
from deepinfer_jax.numerics import F32

TABLE_SCALE = 0.05
HEAD_SCALE = 0.3
# The last matrix of attention and of every expert, and the offsets that balancing moves.
ZERO = (".wo_b.weight", ".w2.weight", ".gate.bias", ".gate.bias_vl", ".confidence_head.proj.weight")


def first_parameters(described: Tree, seed: int) -> Tree:
    """Float32 parameters of a described tree, a function of the seed."""
    drawn = initialise(described, jax.random.key(seed), F32)
    return jax.tree.map(_scaled, described, drawn, is_leaf=lambda item: isinstance(item, Parameter))


def _scaled(item: Parameter, values: Array) -> Array:
    name = item.released[0][0]
    if name.endswith(ZERO):
        return 0.0 * values
    if name.endswith("head.weight"):
        return HEAD_SCALE * values
    return TABLE_SCALE * values if _is_table(item) else values


def _is_table(item: Parameter) -> bool:
    return item.init == "unit" and item.axes[0] in ("vocabulary", "engram_rows")
