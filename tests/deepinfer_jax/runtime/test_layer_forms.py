"""Both physical forms of the layers over paged state: golden logits, golden inputs of the draft head, equal states.

Inside a scan over stacked layers the numbers of layer, page group and draft tap are traced; a stateless pass reads none
of them, so only steps over pages show that each layer finds its own rings and pages. Numerics f32, replay exact, not
deterministic.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import State, initial_state
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.indexer import Selected
from deepinfer_jax.model.layer import (
    Carry,
    Layer,
    LayerNumbers,
    UnrolledLayers,
    run_layer,
    run_segment,
    stack_layers,
)
from deepinfer_jax.model.params import initialise
from deepinfer_jax.model.source import PagedSource
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import F32
from deepinfer_jax.runtime.advance import advance
from deepinfer_jax.runtime.batch import Batch, Chunk, StepShape, pack
from deepinfer_jax.runtime.step import row_logits
from deepinfer_jax.topology import LayerKind, topology
from tests.checkpoints import golden_model
from tests.golden import tensors

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SHAPE = StepShape(decode_rows=0, prefill_tiles=1, tile_rows=16)
TOLERANCE = 2e-4


@functools.partial(jax.jit, donate_argnames="state")
def step(params: Model, state: State, batch: Batch, tables: Array) -> tuple[State, Array, Array]:
    config, _ = golden_model("bf16", "f32")
    advanced = advance(params, state, batch.to_rows(), tables, config, F32)
    return advanced.state, row_logits(params, advanced.hidden), advanced.draft_taps


@pytest.mark.parametrize("form", ["unrolled", "stacked"])
def test_logits_and_draft_inputs_are_the_golden_ones(form: str) -> None:
    """31 tokens in two steps, the second full of entries, keys and look-back of the first; caches start as NaN."""
    config, params = golden_model("bf16", "f32")
    golden = tensors("dspark/dspark_f32.safetensors")
    tokens = np.concatenate([golden["wrap.prompt_ids"], golden["wrap.step.fed_token"]]).tolist()
    state = initial_state(config, F32, slots=2, blocks=8, layout=PageLayout.of(config, 8), fill=np.nan)
    tables = jnp.asarray([[7, 0, 3, 5], [1, 6, 2, 4]], jnp.int32)
    params = getattr(params, form)(config)
    logits, draft_inputs = [], []
    for start in (0, 15):
        chunk = Chunk(1, start, tokens[start : start + 16][: 15 if start == 0 else 16])
        batch, *_ = pack([chunk], SHAPE)
        state, rows, taps = step(params, state, batch, tables)
        logits.append(np.asarray(rows)[: len(chunk.tokens)])
        draft_inputs.append(np.moveaxis(np.asarray(taps), 0, 1).reshape(SHAPE.rows, -1)[: len(chunk.tokens)])
    want = np.concatenate([golden["wrap.prompt_main_hidden"], golden["wrap.step.main_hidden"]])
    assert np.abs(np.concatenate(draft_inputs) - want).max() <= TOLERANCE
    whole = tensors("tiny-a/logits_f32.safetensors")["p200"][: len(tokens)]
    assert np.abs(np.concatenate(logits) - whole).max() <= TOLERANCE


def random_carry(config: ModelConfig, rows: int) -> Carry:
    """What a segment may find: every ring and page full of values of its own."""
    random = np.random.default_rng(0)
    state = initial_state(config, F32, slots=2, blocks=4, layout=PageLayout.of(config, 16))
    filled = {
        name: jnp.asarray(random.standard_normal(getattr(state, name).shape), jnp.float32)
        for name in ("main", "index", "window", "pending")
    }
    assert config.draft is not None
    blocks = np.tile(np.arange(Selected.empty(1, config).candidates.shape[1], dtype=np.int32), (rows, 1))
    targets = (len(config.draft.target_layer_ids), rows, config.hidden_size)
    return Carry(
        streams=jnp.asarray(random.standard_normal((rows, config.hc_mult, config.hidden_size)), jnp.float32),
        pre=jnp.asarray(random.random((rows, config.hc_mult)), jnp.float32),
        selected=dataclasses.replace(Selected.empty(rows, config), candidates=jnp.asarray(blocks)),
        source=PagedSource(state.replace(**filled), jnp.asarray([[3, 0], [1, 2]], jnp.int32)),
        draft_taps=jnp.zeros(targets, jnp.float32),
    )


def test_a_scanned_segment_leaves_the_state_of_its_layers_one_by_one() -> None:
    """The last segment of the release's schedule, four repeats of one layer and three; random weights and caches.

    Rings, pages and draft inputs are compared, so that a scan which takes its layers in another order, or gives them
    each other's numbers, shows. Draft inputs are the mean of the streams that enter the target layers.
    """
    config = ModelConfig.preset("mini-40")
    plan = topology(config)
    segment = plan.segments[-1]
    assert (segment.repeats, [count for _, count in segment.runs]) == (4, [1, 3])
    drawn = {
        layer: initialise(
            Layer.describe(config, f"layers.{layer}", plan.layers[layer].kind, config.n_routed_experts),
            jax.random.key(layer),
            F32,
        )
        for layer in segment.layers
    }
    unrolled = UnrolledLayers(tuple(drawn.get(layer, drawn[segment.first_layer]) for layer in range(len(plan.layers))))
    (runs,) = stack_layers(unrolled, dataclasses.replace(plan, segments=(segment,))).segments
    rows = pack([Chunk(1, 20, [1] * 7), Chunk(0, 9, [1])], StepShape(1, 1, 8))[0].to_rows()

    @functools.partial(jax.jit, static_argnames="kind")
    def one_layer(params: Layer, numbers: LayerNumbers, carry: Carry, kind: LayerKind) -> Carry:
        return run_layer(params, kind, numbers, carry, rows, config, F32)[0]

    @jax.jit
    def scanned(runs: tuple[Layer, ...], carry: Carry) -> Carry:
        return run_segment(runs, segment, plan, carry, rows, config, F32)

    carry = random_carry(config, rows.tokens.shape[0])
    got = scanned(runs, carry)
    targets = carry.draft_taps.shape[0]
    draft_inputs = {}
    for layer in segment.layers:
        numbers = jax.tree.map(jnp.asarray, LayerNumbers.of(plan, layer, targets))
        draft_inputs[plan.layers[layer].draft_tap] = np.asarray(carry.streams.mean(axis=1))
        carry = one_layer(drawn[layer], numbers, carry, plan.layers[layer].kind)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(carry), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-3)
    for tap in range(targets):
        np.testing.assert_allclose(got.draft_taps[tap], draft_inputs[tap], rtol=1e-3, atol=1e-3)
