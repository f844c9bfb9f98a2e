"""mHC mix: the per-token mixing weights of the residual streams (model specification, 3.1 and 3.2)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.implementation import choose
from pallas_kernels.product import Weight, product


class Mix(NamedTuple):
    """Weights of one sub-layer, float32.

    ``pre`` ``[rows streams]`` collapses the streams (of the *next* sub-layer, in single-pass form); ``post``
    ``[rows streams]`` spreads the sub-layer's output; ``comb`` ``[rows source destination]`` mixes the streams.
    """

    pre: Float[Array, "rows streams"]
    post: Float[Array, "rows streams"]
    comb: Float[Array, "rows source destination"]


def hyper_connection_mix(
    streams: Float[Array, "rows streams hidden"],
    projection: Weight,
    base: Float[Array, " mixes"],
    scale: Float[Array, " 3"],
    *,
    iterations: int,
    epsilon: float,
    norm_epsilon: float,
    implementation: str | None = None,
) -> Mix:
    """Project the streams to mixing weights and make ``comb`` nearly doubly stochastic.

    Args:
      streams: residual streams; the projection reads them stream-major, in float32.
      projection: ``fn``, ``[(2 + streams) * streams, streams * hidden]``.
      base, scale: offsets of every mix, and one scale each for pre, post and comb.
      iterations: row and column steps of the Sinkhorn normalisation; the last step is a column step.
      epsilon: added to ``pre`` and inside the normalisation (``hc_eps``).
      norm_epsilon: epsilon of the RMS factor applied after the projection.
      implementation: "reference" (jnp, every platform) or None.
    """
    return choose("hyper_connection_mix", implementation, {"reference": _reference}, "reference")(
        streams, projection, base, scale, iterations, epsilon, norm_epsilon
    )


def split_mixes(
    mixes: Float[Array, "rows mixes"],
    base: Float[Array, " mixes"],
    scale: Float[Array, " 3"],
    *,
    streams: int,
    iterations: int,
    epsilon: float,
) -> Mix:
    """Turn normalised projections into pre, post and comb: sigmoids, and Sinkhorn over ``[source destination]``."""
    pre, post, comb = jnp.split(mixes, (streams, 2 * streams), axis=-1)
    base_pre, base_post, base_comb = jnp.split(base, (streams, 2 * streams))
    logits = (comb * scale[2] + base_comb[None]).reshape(-1, streams, streams)
    return Mix(
        pre=jax.nn.sigmoid(pre * scale[0] + base_pre[None]) + epsilon,
        post=2.0 * jax.nn.sigmoid(post * scale[1] + base_post[None]),
        comb=_sinkhorn(logits, iterations, epsilon),
    )


def _sinkhorn(
    logits: Float[Array, "rows source destination"], iterations: int, epsilon: float
) -> Float[Array, "rows source destination"]:
    # Rows stand last and sums are written out, so that each step is one pass of full-width vector operations.
    streams = logits.shape[1]

    def normalise_rows(values: Float[Array, "source destination rows"]) -> Array:
        total = functools.reduce(jnp.add, (values[:, one] for one in range(streams)))
        return values / (total + epsilon)[:, None]

    def normalise_columns(values: Float[Array, "source destination rows"]) -> Array:
        total = functools.reduce(jnp.add, (values[one] for one in range(streams)))
        return values / (total + epsilon)[None]

    def both(_: Array | int, values: Array) -> Array:
        return normalise_columns(normalise_rows(values))

    rows_done = jnp.moveaxis(jax.nn.softmax(logits, axis=2) + epsilon, 0, -1)
    done = jax.lax.fori_loop(1, iterations, both, normalise_columns(rows_done))
    return jnp.moveaxis(done, -1, 0)


def _reference(
    streams: Float[Array, "rows streams hidden"],
    projection: Weight,
    base: Float[Array, " mixes"],
    scale: Float[Array, " 3"],
    iterations: int,
    epsilon: float,
    norm_epsilon: float,
) -> Mix:
    rows, count, hidden = streams.shape
    flat = streams.reshape(rows, count * hidden).astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.mean(jnp.square(flat), axis=-1, keepdims=True) + norm_epsilon)
    mixes = product(flat, projection) * factor
    return split_mixes(mixes, base, scale, streams=count, iterations=iterations, epsilon=epsilon)
