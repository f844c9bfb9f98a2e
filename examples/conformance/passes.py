"""One pass over a prompt, with what every layer computed: free, or with every layer's input set to a recorded one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from deepinfer_jax.checkpoint.reader import load_model
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.engram import compressed_ids, read_memory, table_rows
from deepinfer_jax.model.hyper_connections import Taps, collapse, initial_streams
from deepinfer_jax.model.indexer import Selected
from deepinfer_jax.model.layer import Carry, LayerNumbers, UnrolledLayers, run_layer
from deepinfer_jax.model.linear import rms_norm
from deepinfer_jax.model.params import backend_form
from deepinfer_jax.model.rows import Rows, padded_sequence_rows
from deepinfer_jax.model.source import SequenceSource
from deepinfer_jax.model.transformer import Model, embed, forward, logits
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.topology import topology
from examples.conformance.selections import Arrays, layer_selections

TILE_ROWS = 128
# Arrays of the kit that are taps of a layer; the others are those of its selections.
LAYER_TAPS = ("attn_in", "window_kv", "compress_kv", "index_k", "attn_out", "ffn_in", "ffn_out")


@struct.dataclass
class LayerInputs:
    """Inputs of every layer but the first: the streams and collapse weights that the layer before it left.

    Where a layer has an Engram memory before it, the memory reads these streams.
    """

    streams: Float[Array, "layers rows streams hidden"]
    pre: Float[Array, "layers rows streams"]


@dataclasses.dataclass(frozen=True)
class TracedModel:
    """A model in one numerics. Its passes have ``rows`` rows, a multiple of ``TILE_ROWS``, and one compilation."""

    params: Model
    config: ModelConfig
    numerics: Numerics
    rows: int

    @classmethod
    def load(cls, directory: Path, numerics: str, longest: int) -> TracedModel:
        """Read a checkpoint for prompts of at most ``longest`` tokens."""
        chosen = Numerics.preset(numerics)
        config, params = load_model(directory, chosen, form=backend_form)
        return cls(params, config, chosen, -(-longest // TILE_ROWS) * TILE_ROWS)

    def taps(self, tokens: Sequence[int], inputs: LayerInputs | None = None) -> Arrays:
        """Everything that a pass over a prompt computes, row t for position t, without caches.

        Args:
          tokens: the prompt.
          inputs: what layers read instead of what the layers before them computed; as long as the prompt.
        """
        length = len(tokens)
        rows = np.zeros(self.rows, np.int32)
        rows[:length] = tokens
        if inputs is not None:
            inputs = jax.tree.map(self._padded, inputs)
        taps = _pass(self.params, rows, np.int32(length), inputs, config=self.config, numerics=self.numerics)
        return {name: np.asarray(value)[:length] for name, value in taps.items()}

    def arrays(self, tokens: Sequence[int], inputs: LayerInputs | None = None) -> Arrays:
        """:meth:`taps` as they stand in a kit, but every row."""
        return self.kit_arrays(self.taps(tokens, inputs))

    def kit_arrays(self, taps: Arrays) -> Arrays:
        """The arrays of a kit, taken from taps."""
        found: Arrays = {}
        for plan in topology(self.config).layers:
            prefix = f"layers.{plan.layer}."
            layer = {name: taps[prefix + name] for name in LAYER_TAPS if prefix + name in taps}
            layer |= layer_selections(taps, plan, self.config)
            found |= {prefix + name: value for name, value in layer.items()}
        return found | {"logits": taps["logits"]}

    def _padded(self, leaf: Array) -> Array:
        return jnp.pad(leaf, [(0, 0), (0, self.rows - leaf.shape[1]), *[(0, 0)] * (leaf.ndim - 2)])


@functools.partial(jax.jit, static_argnames=("config", "numerics"))
def _pass(
    params: Model,
    tokens: Int[Array, " rows"],
    length: Int[Array, ""],
    inputs: LayerInputs | None,
    *,
    config: ModelConfig,
    numerics: Numerics,
) -> Taps:
    count = tokens.shape[0]
    rows = padded_sequence_rows(tokens, length, TILE_ROWS)
    source = SequenceSource.empty(count, count, config.head_dim, config.index_head_dim, numerics.dtype)
    if inputs is None:
        output = forward(params, rows, source, config, numerics)
        return output.taps | {"logits": logits(params, output.hidden)}
    return _forced(params, rows, source, inputs, config, numerics)


def _forced(
    params: Model, rows: Rows, source: SequenceSource, inputs: LayerInputs, config: ModelConfig, numerics: Numerics
) -> Taps:
    """The backbone, every layer of which reads recorded streams; keys and selections are its own."""
    assert isinstance(params.layers, UnrolledLayers)
    columns = None
    if config.engram is not None:
        ids = compressed_ids(params.token_map, rows)
        columns = table_rows(ids, rows, source, params.token_map, config.engram)
    streams, pre = initial_streams(embed(params, rows, numerics), config.hc_mult)
    count = rows.tokens.shape[0]
    draft_taps = jnp.zeros((0, count, config.hidden_size), numerics.dtype)
    carry = Carry(streams, pre, Selected.empty(count, config), source, draft_taps)
    taps: Taps = {}
    for plan in topology(config).layers:
        if plan.layer > 0:
            streams, pre = inputs.streams[plan.layer - 1], inputs.pre[plan.layer - 1]
            carry = dataclasses.replace(carry, streams=streams, pre=pre)
        if plan.engram is not None:
            assert columns is not None
            memory = params.engrams[plan.engram]
            streams, _ = read_memory(memory, carry.streams, columns[:, plan.engram], rows.image, config)
            carry = dataclasses.replace(carry, streams=streams)
        numbers = LayerNumbers.of(topology(config), plan.layer, 0)
        layer = params.layers.layers[plan.layer]
        carry, found = run_layer(layer, plan.kind, numbers, carry, rows, config, numerics)
        taps |= {f"layers.{plan.layer}.{name}": value for name, value in found.items()}
    hidden = rms_norm(collapse(carry.streams, carry.pre), params.norm, config.rms_norm_eps)
    return taps | {"logits": logits(params, hidden)}
