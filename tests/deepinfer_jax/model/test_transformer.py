"""The whole backbone against golden logits, and its two physical forms against each other.

Numerics f32, replay exact, not deterministic, unless a test says otherwise.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.exchange import LOCAL, Exchange, LocalExchange
from deepinfer_jax.model.params import Parameter, abstract, backend_form, initialise, parameters
from deepinfer_jax.model.rows import Rows, sequence_rows
from deepinfer_jax.model.transformer import Model, forward, logits
from deepinfer_jax.model.vision import align, image_span_embeddings, vision_tower
from deepinfer_jax.numerics import F32, Numerics
from pallas_kernels import TransposedWeight
from tests.checkpoints import golden_model, prompt_batch, prompts, sequence_source
from tests.golden import document, tensors

pytestmark = pytest.mark.usefixtures("quickly_compiled")

LENGTH = 208
TILE_ROWS = 16
LOGIT_TOLERANCE = 2e-4


@functools.partial(jax.jit, static_argnames=("config", "numerics", "exchange"))
def full_pass(
    params: Model, tokens: Array, config: ModelConfig, numerics: Numerics = F32, exchange: Exchange = LOCAL
) -> Array:
    """Logits ``[sequences length vocabulary]`` of one stateless pass."""
    sequences, length = tokens.shape
    rows = sequence_rows(tokens, TILE_ROWS)
    source = sequence_source(config, numerics, rows, length)
    output = forward(params, rows, source, config, numerics, exchange)
    return logits(params, output.hidden).reshape(sequences, -1, config.vocab_size)[:, :length]


@pytest.mark.parametrize(
    "numerics",
    ["f32", pytest.param("bf16", marks=pytest.mark.slow), pytest.param("released", marks=pytest.mark.slow)],
)
def test_the_form_for_a_cpu_changes_rounding_only(numerics: str) -> None:
    """Transposed weights and experts of their own, on the shortest prompt and on one of many tiles."""
    chosen = Numerics.preset(numerics)
    config, params = golden_model("quant", numerics)
    described = Model.describe(config)
    formed = jax.tree.map(backend_form, described, params, is_leaf=lambda item: isinstance(item, Parameter))
    assert isinstance(formed.layers.layers[0].feed_forward.down, tuple)
    assert isinstance(formed.head, TransposedWeight)
    assert isinstance(formed.embedding, Array)
    _, batch = prompt_batch(LENGTH)
    plain, other = (np.asarray(full_pass(tree, batch[-1:], config, chosen)) for tree in (params, formed))
    scale = np.abs(plain).max()
    assert np.abs(plain - other).max() <= (1e-5 if numerics == "f32" else 0.1) * scale


def test_golden_prompts_have_clear_selections() -> None:
    """Without clear gaps a rounding difference could flip a pick, and the comparisons below would prove nothing."""
    gaps = document("tiny-a/selection_gaps.json")["f32"]
    assert min(gap for layers in gaps.values() for gap in layers.values()) >= 5e-5
    assert min(margin for chain in document("tiny-a/greedy_f32.json").values() for margin in chain["margins"]) >= 1e-3


@pytest.mark.parametrize("checkpoint", ["bf16", "quant"])
def test_logits_equal_the_golden_ones_at_every_position(checkpoint: str) -> None:
    config, params = golden_model(checkpoint, "f32")
    names, batch = prompt_batch(LENGTH)
    computed = np.asarray(full_pass(params, batch, config))
    golden = tensors("tiny-a/logits_f32.safetensors")
    for name, rows in zip(names, computed, strict=True):
        want = golden[name]
        got = rows[: len(want)]
        assert np.abs(got - want).max() <= LOGIT_TOLERANCE, name
        np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1))


def test_both_checkpoints_hold_the_same_weights() -> None:
    """The quantised file dequantises to the bfloat16 one bit for bit."""
    plain, quantised = (jax.tree.leaves(golden_model(checkpoint, "f32")[1]) for checkpoint in ("bf16", "quant"))
    for one, other in zip(plain, quantised, strict=True):
        np.testing.assert_array_equal(one, other)


def test_dense_experts_agree_with_grouped_ones() -> None:
    config, params = golden_model("bf16", "f32")
    _, batch = prompt_batch(LENGTH)
    grouped = full_pass(params, batch, config)
    difference = np.abs(grouped - full_pass(params, batch, config, exchange=LocalExchange("dense")))
    assert difference.max() <= LOGIT_TOLERANCE


def test_dense_pass_is_differentiable() -> None:
    """Training needs finite gradients through the stateless source, for every parameter the text path uses."""
    config, params = golden_model("bf16", "f32")
    tokens = jnp.asarray([prompts()["p3w_plus1"]], jnp.int32)

    def loss(params: Model) -> Array:
        scores = jax.nn.log_softmax(full_pass(params, tokens, config, exchange=LocalExchange("dense")))
        return -jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], -1).mean()

    floats = jax.tree.map(lambda leaf: leaf if leaf.dtype == jnp.float32 else None, params)
    rest = jax.tree.map(lambda leaf: None if leaf.dtype == jnp.float32 else leaf, params)

    def merged(part: Model) -> Array:
        whole = jax.tree.map(lambda a, b: b if a is None else a, part, rest, is_leaf=lambda leaf: leaf is None)
        return loss(whole)

    gradients = jax.grad(merged)(floats)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradients))
    described = Model.describe(config)
    silent = {
        item.released[0][0]
        for item, leaf in zip(
            (item for item in parameters(described) if item.released), jax.tree.leaves(gradients), strict=True
        )
        if not bool(jnp.any(leaf != 0))
    }
    # Selections pass no gradient (an index loss trains them); draft head and vision take no part in text logits.
    backbone = [name for name in silent if not name.startswith(("mtp.", "vision.", "aligner.", "image_"))]
    assert all(".indexer." in name or name.endswith((".gate.bias", ".gate.bias_vl")) for name in backbone), backbone


def test_stacking_and_unrolling_are_exact() -> None:
    config = ModelConfig.preset("mini-40")
    params = initialise(Model.describe(config), jax.random.key(0), F32)
    for one, other in zip(
        jax.tree.leaves(params), jax.tree.leaves(params.stacked(config).unrolled(config)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_stacked_layers_equal_unrolled_ones() -> None:
    """mini-40 has the release's schedule, so that scans really repeat."""
    config = ModelConfig.preset("mini-40")
    params = initialise(Model.describe(config), jax.random.key(0), F32)
    stacked = params.stacked(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, 48)).astype(np.int32)
    difference = np.abs(full_pass(params, tokens, config) - full_pass(stacked, tokens, config))
    assert difference.max() <= LOGIT_TOLERANCE


def test_released_size_by_abstract_evaluation() -> None:
    """The stacked released model traces to logits without one weight in memory."""
    config = ModelConfig.preset("v4.1-flash")
    params = jax.eval_shape(lambda tree: tree.stacked(config), abstract(Model.describe(config), F32))
    shape = jax.eval_shape(
        functools.partial(full_pass, config=config), params, jax.ShapeDtypeStruct((1, 32), jnp.int32)
    ).shape
    assert shape == (1, 32, 129280)


def multimodal_rows() -> tuple[Rows, np.ndarray]:
    """The golden multimodal prompt with image embeddings computed from its patches, and the embeddings."""
    config, params = golden_model("bf16", "f32")
    golden = tensors("tiny-a/multimodal.safetensors")
    assert config.vision is not None
    assert params.vision is not None
    patch_grid, token_grid = (tuple(int(n) for n in golden[name]) for name in ("grid_vit", "grid_llm"))
    features = vision_tower(params.vision, jnp.asarray(golden["patches"]), patch_grid, config.vision)
    span = image_span_embeddings(params.vision, align(params.vision, features, patch_grid, config.vision), token_grid)
    image = golden["token_types"] >= 0
    embeddings = np.zeros((len(image), config.hidden_size), np.float32)
    embeddings[image] = span
    count = len(image)
    rows = Rows.of(
        jnp.asarray(golden["input_ids"]),
        jnp.zeros(count, jnp.int32),
        jnp.arange(count, dtype=jnp.int32),
        ((1, count),),
        image=jnp.asarray(image),
        image_embeddings=jnp.asarray(embeddings),
    )
    return rows, embeddings


def test_multimodal_logits_equal_the_golden_ones() -> None:
    config, params = golden_model("bf16", "f32")
    rows, _ = multimodal_rows()
    golden = tensors("tiny-a/multimodal.safetensors")

    @jax.jit
    def run(params: Model, rows: Rows) -> tuple[Array, dict[str, Array]]:
        source = sequence_source(config, F32, rows, rows.tokens.shape[0])
        output = forward(params, rows, source, config, F32)
        return logits(params, output.hidden), output.taps

    got, taps = run(params, rows)
    assert np.abs(got - golden["logits_f32"]).max() <= LOGIT_TOLERANCE
    np.testing.assert_allclose(taps["embed_out"], golden["embeds_f32"], atol=1e-5)
    np.testing.assert_array_equal(taps["engram_hash_ids"], golden["engram_hash_ids"])
    for layer in range(config.num_hidden_layers):
        picks = np.sort(taps[f"layers.{layer}.router_indices"])
        np.testing.assert_array_equal(picks, np.sort(golden[f"layers.{layer}.router_indices_f32"]))
