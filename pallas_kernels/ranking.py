"""Rankings: the best of many scored items, built up part by part.

The order is total: a larger score first, the lower number among equals. So the best of a whole are the best of the
parts' best, however it was cut.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_NO_NUMBER = jnp.iinfo(jnp.int32).max


class Ranking(NamedTuple):
    """The best items so far, best first. ``scores``: float32, -inf in unused places. ``numbers``: int32, the items'."""

    scores: Float[Array, "*batch count"]
    numbers: Int[Array, "*batch count"]

    @classmethod
    def empty(cls, *shape: int) -> Ranking:
        """Rankings of nothing; the last axis is the number of places."""
        return cls(jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32))

    @classmethod
    def of(cls, scores: Float[Array, "*batch items"], count: int) -> Ranking:
        """The ``count`` best of the items along the last axis, numbered by their position."""
        # top_k orders -0 below 0, but they are equal scores.
        unsigned = jnp.where(scores == 0.0, 0.0, scores)
        values, indices = jax.lax.top_k(unsigned, min(count, scores.shape[-1]))
        padding = [(0, 0)] * (scores.ndim - 1) + [(0, count - values.shape[-1])]
        return cls(jnp.pad(values, padding, constant_values=-jnp.inf), jnp.pad(indices.astype(jnp.int32), padding))

    def joined(self, scores: Float[Array, "*batch items"], numbers: Int[Array, "*batch items"]) -> Ranking:
        """The best of these and of further items, as many as before.

        Every further number is above all earlier ones, and among equal scores the further numbers ascend.
        """
        best = Ranking.of(jnp.concatenate([self.scores, scores], axis=-1), self.scores.shape[-1])
        together = jnp.concatenate([self.numbers, numbers], axis=-1)
        return Ranking(best.scores, jnp.take_along_axis(together, best.numbers, axis=-1))

    def ascending(self) -> Int[Array, "*batch count"]:
        """The numbers alone, ascending, -1 in unused places at the end."""
        found = jnp.sort(jnp.where(self.scores > -jnp.inf, self.numbers, _NO_NUMBER), axis=-1)
        return jnp.where(found < _NO_NUMBER, found, -1)
