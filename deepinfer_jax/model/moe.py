"""Mixture of experts: sqrt-softplus router with a selection bias, routed experts and one shared expert.

Model specification, section 9. Every layer and draft stage has one; there is no dense layer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.exchange import LOCAL, Exchange
from deepinfer_jax.model.hyper_connections import Taps
from deepinfer_jax.model.linear import linear_float32
from deepinfer_jax.model.params import Leaf, Parameter, Stored, matrix, single
from pallas_kernels import clamped_swiglu


@struct.dataclass
class MixtureOfExperts:
    """Router and experts. ``gate_up`` stacks w1 above w3.

    ``layer`` is set inside a loop over stacked layers only: ``gate_up`` and ``down`` then hold the experts of several
    layers, ``[layers experts ...]``, and this is the number of the layer among them.
    """

    router: Leaf
    text_bias: Leaf
    image_bias: Leaf
    gate_up: Leaf
    down: Leaf
    shared_gate_up: Leaf
    shared_down: Leaf
    layer: Leaf = None

    @classmethod
    def describe(cls, config: ModelConfig, prefix: str, experts: int) -> MixtureOfExperts:
        """``prefix`` is the feed-forward's released prefix, ``layers.N.ffn`` or ``mtp.N.ffn``."""
        hidden, width = config.hidden_size, config.moe_intermediate_size

        def expert(index: int, part: str) -> str:
            return f"{prefix}.experts.{index}.{part}.weight"

        return cls(
            router=matrix(f"{prefix}.gate.weight", (experts, hidden), (None, None)),
            text_bias=single(f"{prefix}.gate.bias", (experts,), (None,), Stored.F32, "small"),
            image_bias=single(f"{prefix}.gate.bias_vl", (experts,), (None,), Stored.F32, "small"),
            gate_up=Parameter(
                shape=(experts, 2 * width, hidden),
                axes=("experts", None, None),
                stored=Stored.FP4_ROWS,
                released=tuple((expert(index, "w1"), expert(index, "w3")) for index in range(experts)),
                stacked=True,
                multiplied=True,
            ),
            down=Parameter(
                shape=(experts, hidden, width),
                axes=("experts", None, None),
                stored=Stored.FP4_ROWS,
                released=tuple((expert(index, "w2"),) for index in range(experts)),
                stacked=True,
                multiplied=True,
            ),
            shared_gate_up=Parameter(
                shape=(2 * width, hidden),
                axes=(None, None),
                stored=Stored.FP8_BLOCKS,
                released=((f"{prefix}.shared_experts.w1.weight", f"{prefix}.shared_experts.w3.weight"),),
                multiplied=True,
            ),
            shared_down=matrix(f"{prefix}.shared_experts.w2.weight", (hidden, width), (None, None), Stored.FP8_BLOCKS),
        )


def route(
    params: MixtureOfExperts,
    inputs: Float[Array, "rows hidden"],
    image: Bool[Array, " rows"],
    chosen: int,
    config: ModelConfig,
) -> tuple[Int[Array, "rows chosen"], Float[Array, "rows chosen"], Float[Array, "rows experts"]]:
    """Choose experts: ids (best first; the lower id among equals), weights, and the biased scores that decided.

    The bias, of text or of image-type tokens, enters the choice but not the weights.
    """
    logits = linear_float32(inputs.astype(jnp.float32), params.router) / config.gate_temperature
    scores = jnp.sqrt(jax.nn.softplus(logits))
    biased = scores + jnp.where(image[:, None], params.image_bias[None], params.text_bias[None])
    experts = jax.lax.top_k(biased, chosen)[1].astype(jnp.int32)
    picked = jnp.take_along_axis(scores, experts, axis=-1)
    weights = picked / (picked.sum(axis=-1, keepdims=True) + 1e-20) * config.routed_scaling_factor
    return experts, weights, biased


def mixture_of_experts(
    params: MixtureOfExperts,
    inputs: Float[Array, "rows hidden"],
    image: Bool[Array, " rows"],
    valid: Bool[Array, " rows"],
    chosen: int,
    config: ModelConfig,
    exchange: Exchange = LOCAL,
) -> tuple[Float[Array, "rows hidden"], Taps]:
    """Routed experts plus the shared expert, summed in float32 and rounded once. Padding rows use no routed expert.

    ``exchange`` reaches the routed experts; ``LocalExchange("dense")`` is differentiable.
    """
    experts, weights, biased = route(params, inputs, image, chosen, config)
    routed = exchange.experts(
        inputs,
        jnp.where(valid[:, None], experts, -1),
        weights,
        params.gate_up,
        params.down,
        limit=config.swiglu_limit,
        layer=params.layer,
    )
    hidden = clamped_swiglu(linear_float32(inputs, params.shared_gate_up), config.swiglu_limit)
    shared = linear_float32(hidden.astype(inputs.dtype), params.shared_down)
    taps = {"router_biased_scores": biased, "router_indices": experts, "router_weights": weights}
    return (routed + shared).astype(inputs.dtype), taps
