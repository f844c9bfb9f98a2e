"""Both physical forms of the layers over paged state: golden logits, and golden inputs of the draft head.

Inside a scan over stacked layers the numbers of layer, page group and draft tap are traced; a stateless pass reads none
of them, so only steps over pages show that each layer finds its own rings and pages. Numerics f32, replay exact, not
deterministic.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import State, initial_state
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import F32
from deepinfer_jax.runtime.batch import Batch, Chunk, StepShape, pack
from deepinfer_jax.runtime.step import advance, row_logits
from tests.checkpoints import golden_model
from tests.golden import tensors

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
        batch, _ = pack([chunk], SHAPE)
        state, rows, taps = step(params, state, batch, tables)
        logits.append(np.asarray(rows)[: len(chunk.tokens)])
        draft_inputs.append(np.moveaxis(np.asarray(taps), 0, 1).reshape(SHAPE.rows, -1)[: len(chunk.tokens)])
    want = np.concatenate([golden["wrap.prompt_main_hidden"], golden["wrap.step.main_hidden"]])
    assert np.abs(np.concatenate(draft_inputs) - want).max() <= TOLERANCE
    whole = tensors("tiny-a/logits_f32.safetensors")["p200"][: len(tokens)]
    assert np.abs(np.concatenate(logits) - whole).max() <= TOLERANCE
