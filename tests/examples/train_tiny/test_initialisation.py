"""The parameters that training begins with: a model whose sub-layers add nothing yet. Numerics f32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.params import Parameter
from deepinfer_jax.model.transformer import Model
from examples.train_tiny.initialisation import TABLE_SCALE, ZERO, first_parameters
from examples.train_tiny.losses import run_windows
from tests.engines import tiny_drafting_configuration

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CONFIG = ModelConfig.from_dict(tiny_drafting_configuration())
DESCRIBED = dataclasses.replace(Model.describe(CONFIG), token_map=None)


def test_sub_layers_add_nothing_at_first():
    params = first_parameters(DESCRIBED, 0)
    params = dataclasses.replace(params, token_map=jnp.arange(CONFIG.vocab_size, dtype=jnp.int32))
    tokens = jnp.asarray(np.random.default_rng(0).integers(4, CONFIG.vocab_size, (1, 32), np.int32))
    taps = jax.jit(lambda params: run_windows(params, tokens, CONFIG)[0].taps)(params)
    added = {
        name: float(jnp.abs(value).max()) for name, value in taps.items() if name.endswith(("attn_out", "ffn_out"))
    }
    assert len(added) == 2 * CONFIG.num_hidden_layers
    assert set(added.values()) == {0.0}
    assert float(jnp.abs(taps["collapsed"]).max()) > 0


def test_everything_else_is_drawn_and_tables_are_small():
    params = first_parameters(DESCRIBED, 0)
    items = jax.tree.leaves(DESCRIBED, is_leaf=lambda leaf: isinstance(leaf, Parameter))
    zero = []
    for item, values in zip(items, jax.tree.leaves(params), strict=True):
        name = item.released[0][0]
        zero.append(name.endswith(ZERO))
        assert bool((values == 0).all()) == zero[-1], name
        if item.init == "unit" and item.axes[0] in ("vocabulary", "engram_rows"):
            np.testing.assert_allclose(jnp.std(values), TABLE_SCALE, rtol=0.1)
    assert any(zero)
    assert not all(zero)


def test_the_seed_decides():
    first, again, other = (first_parameters(DESCRIBED, seed) for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first.embedding, other.embedding)
