"""Manifold-constrained hyper-connections (mHC), single-pass form: several residual streams, mixed per token.

Model specification, section 3. The collapse weights computed in one sub-layer are used by the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.linear import rms_norm
from deepinfer_jax.model.params import Leaf, Stored, matrix, norm, single
from pallas_kernels import Mix, hyper_connection_mix

Taps = dict[str, Array]
Extra = TypeVar("Extra")


@struct.dataclass
class SubLayer:
    """mHC mix and input norm of one sub-layer (attention or feed-forward)."""

    projection: Leaf
    base: Leaf
    scale: Leaf
    norm: Leaf

    @classmethod
    def describe(cls, config: ModelConfig, prefix: str, short: str) -> SubLayer:
        """``prefix`` is the layer's released prefix, ``short`` is "attn" or "ffn"."""
        streams = config.hc_mult
        mixes = (2 + streams) * streams
        return cls(
            projection=matrix(
                f"{prefix}.hc_{short}_fn", (mixes, streams * config.hidden_size), (None, None), Stored.F32
            ),
            base=single(f"{prefix}.hc_{short}_base", (mixes,), (None,), Stored.F32, "mix_base"),
            scale=single(f"{prefix}.hc_{short}_scale", (3,), (None,), Stored.F32, "mix_scale"),
            norm=norm(f"{prefix}.{short}_norm.weight", config.hidden_size),
        )

    def mix(self, streams: Float[Array, "rows streams hidden"], config: ModelConfig) -> Mix:
        """The sub-layer's mixing weights."""
        return hyper_connection_mix(
            streams,
            self.projection,
            self.base,
            self.scale,
            iterations=config.hc_sinkhorn_iters,
            epsilon=config.hc_eps,
            norm_epsilon=config.rms_norm_eps,
        )


def initial_streams(
    embeddings: Float[Array, "rows hidden"], streams: int
) -> tuple[Float[Array, "rows streams hidden"], Float[Array, "rows streams"]]:
    """The embedding copied to every stream, and the first collapse weights: one-hot on stream 0."""
    rows, hidden = embeddings.shape
    copied = jnp.broadcast_to(embeddings[:, None, :], (rows, streams, hidden))
    return copied, jnp.zeros((rows, streams), jnp.float32).at[:, 0].set(1.0)


@jax.custom_vjp
def collapse(
    streams: Float[Array, "rows streams hidden"], pre: Float[Array, "rows streams"]
) -> Float[Array, "rows hidden"]:
    """Weighted sum over the streams; the weights are not normalised."""
    # Written out per stream: one fused pass over memory, where a reduction would make several.
    parts = (pre[:, stream, None] * streams[:, stream].astype(jnp.float32) for stream in range(streams.shape[1]))
    return functools.reduce(jnp.add, parts).astype(streams.dtype)


@jax.custom_vjp
def expand(
    output: Float[Array, "rows hidden"], streams: Float[Array, "rows streams hidden"], mix: Mix
) -> Float[Array, "rows streams hidden"]:
    """Spread a sub-layer's output over the streams and mix them: sums over the *first* index of ``comb``."""
    exact = streams.astype(jnp.float32)
    parts = (mix.comb[:, source, :, None] * exact[:, source, None, :] for source in range(streams.shape[1]))
    spread = mix.post[:, :, None] * output.astype(jnp.float32)[:, None, :]
    return functools.reduce(jnp.add, parts, spread).astype(streams.dtype)


# The gradients of written-out sums would be as many passes over broadcast copies; these are one product and one sum.
def _collapse_forward(streams: Array, pre: Array) -> tuple[Array, tuple[Array, Array]]:
    return collapse(streams, pre), (streams, pre)


def _collapse_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    streams, pre = saved
    exact, gradient = streams.astype(jnp.float32), gradient.astype(jnp.float32)
    return (pre[:, :, None] * gradient[:, None, :]).astype(streams.dtype), jnp.einsum("rsh,rh->rs", exact, gradient)


def _expand_forward(output: Array, streams: Array, mix: Mix) -> tuple[Array, tuple[Array, Array, Mix]]:
    return expand(output, streams, mix), (output, streams, mix)


def _expand_backward(saved: tuple[Array, Array, Mix], gradient: Array) -> tuple[Array, Array, Mix]:
    output, streams, mix = saved
    gradient, count = gradient.astype(jnp.float32), streams.shape[1]
    both = jnp.concatenate([streams, output[:, None]], axis=1).astype(jnp.float32)
    weights = jnp.einsum("rsh,rdh->rsd", both, gradient)
    spread = jnp.concatenate([mix.comb, mix.post[:, None]], axis=1)
    parts = (spread[:, :, place, None] * gradient[:, place, None, :] for place in range(count))
    inputs = functools.reduce(jnp.add, parts)
    to_mix = Mix(jnp.zeros_like(mix.pre), weights[:, count], weights[:, :count])
    return inputs[:, count].astype(output.dtype), inputs[:, :count].astype(streams.dtype), to_mix


collapse.defvjp(_collapse_forward, _collapse_backward)
expand.defvjp(_expand_forward, _expand_backward)


def run_sub_layer(
    params: SubLayer,
    streams: Float[Array, "rows streams hidden"],
    pre: Float[Array, "rows streams"],
    function: Callable[[Array], tuple[Array, Extra]],
    config: ModelConfig,
) -> tuple[Float[Array, "rows streams hidden"], Float[Array, "rows streams"], Extra, Taps]:
    """Collapse with the previous sub-layer's weights, normalise, apply ``function``, expand with this one's.

    Returns the new streams, the collapse weights for the next sub-layer, whatever ``function`` returned beside its
    output, and named intermediates.
    """
    mix = params.mix(streams, config)
    inputs = rms_norm(collapse(streams, pre), params.norm, config.rms_norm_eps)
    output, extra = function(inputs)
    taps = {"in": inputs, "out": output, "pre": mix.pre, "post": mix.post, "comb": mix.comb}
    return expand(output, streams, mix), mix.pre, extra, taps
