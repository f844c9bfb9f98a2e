"""The draft head against golden drafts: greedy tokens, logits and raw confidences; numerics f32 and f32q, exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import State, initial_state
from deepinfer_jax.model.draft import (
    DraftHead,
    acceptance,
    chain_drafts,
    context_keys,
    context_windows,
    draft_block,
    store_context,
)
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.source import PagedSource
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from tests.checkpoints import golden_model
from tests.golden import tensors

pytestmark = pytest.mark.usefixtures("quickly_compiled")

TOLERANCE = {"f32": 2e-4, "f32q": 1e-3}


def context_rows(positions: Array) -> Rows:
    count = positions.shape[0]
    zeros = jnp.zeros(count, jnp.int32)
    return Rows.of(zeros, zeros, positions, ((1, count),))


@functools.partial(jax.jit, static_argnames="numerics")
def seed_context(params: Model, state: State, hidden: Array, positions: Array, numerics: Numerics) -> State:
    config, _ = golden_model("quant", numerics.name)
    assert params.draft is not None
    rows = context_rows(positions)
    taps = jnp.moveaxis(hidden.reshape(hidden.shape[0], 3, -1), 1, 0)
    keys = context_keys(params.draft, taps, rows, config, numerics)
    source = store_context(keys, rows, PagedSource(state, jnp.zeros((1, 1), jnp.int32)), config)
    assert isinstance(source, PagedSource)
    return source.state


@functools.partial(jax.jit, static_argnames="numerics")
def one_step(
    params: Model, state: State, hidden: Array, position: Array, anchor: Array, numerics: Numerics
) -> tuple[State, tuple[Array, ...]]:
    """Store the context key of one position, then draft behind it."""
    config, _ = golden_model("quant", numerics.name)
    draft = params.draft
    assert isinstance(draft, DraftHead)
    rows = context_rows(position[None])
    taps = hidden.reshape(3, 1, -1)
    keys = context_keys(draft, taps, rows, config, numerics)
    source = PagedSource(state, jnp.zeros((1, 1), jnp.int32))
    request = jnp.zeros(1, jnp.int32)
    windows = context_windows(keys, rows, source, request, position[None], config)
    block = draft_block(draft, params.embedding, params.head, anchor[None], position[None], windows, config, numerics)
    drafts = chain_drafts(draft, block, anchor[None])
    stored = store_context(keys, rows, source, config)
    assert isinstance(stored, PagedSource)
    return stored.state, (drafts.tokens[0], block.base_logits[0], drafts.logits[0], drafts.confidence[0])


@pytest.mark.parametrize("name", ["f32", "f32q"])
@pytest.mark.parametrize("case", ["first", "short", "wrap"])
def test_drafts_equal_the_golden_ones(name: str, case: str) -> None:
    numerics = Numerics.preset(name)
    config, params = golden_model("quant", name)
    golden = tensors(f"dspark/dspark_{name}.safetensors")
    state = initial_state(config, numerics, slots=1, blocks=1, layout=PageLayout.of(config, 8), fill=np.nan)
    prompt = golden[f"{case}.prompt_main_hidden"]
    state = seed_context(params, state, prompt, np.arange(len(prompt), dtype=np.int32), numerics)
    step = {
        key.removeprefix(f"{case}.step."): value for key, value in golden.items() if key.startswith(f"{case}.step.")
    }
    for number, position in enumerate(step["pos"]):
        state, (tokens, base, logits, confidence) = one_step(
            params, state, step["main_hidden"][number], position, step["anchor_token"][number], numerics
        )
        np.testing.assert_array_equal(tokens, step["draft_ids"][number][1:])
        assert np.abs(logits - step["logits"][number]).max() <= TOLERANCE[name]
        assert np.abs(confidence - step["confidence"][number]).max() <= TOLERANCE[name]
        if "base_logits" in step:
            assert np.abs(base - step["base_logits"][number]).max() <= TOLERANCE[name]


def test_acceptance_is_a_tempered_sigmoid() -> None:
    confidence = jnp.asarray([[0.0, 2.0, -1000.0, 1000.0]])
    temperature = jnp.asarray([1.0, 2.0, 1.0, 0.5])
    want = [0.5, 1 / (1 + np.exp(-1.0)), 1 / (1 + np.exp(60.0)), 1.0]
    np.testing.assert_allclose(acceptance(confidence, temperature)[0], want, rtol=1e-6)
