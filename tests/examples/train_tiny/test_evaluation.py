"""Figures on held-out text, against golden logits and against counting by hand. Numerics f32, replay exact."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.attention import project_queries
from deepinfer_jax.model.engram import read_memory, table_sizes
from deepinfer_jax.model.params import initialise
from deepinfer_jax.model.rope import rotation
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import F32
from examples.train_tiny.batches import scoring_windows
from examples.train_tiny.evaluation import evaluate, held_out_loss, selection_shares
from examples.train_tiny.losses import next_token_losses, run_windows, with_memory
from tests.checkpoints import golden_model, prompts
from tests.engines import tiny_configuration
from tests.golden import tensors

pytestmark = pytest.mark.usefixtures("quickly_compiled")

LENGTH, TOP_K = 48, 8
# Window only, ratio 2, candidate source, selection inside its candidates, and a layer that reuses that selection.
KV_SOURCE = {1: 1, 2: 2, 3: 2, 4: 2}
INDEX_SOURCE = {1: 1, 2: 2, 3: 3, 4: 3}
RATIO = {1: 2, 2: 1, 3: 1, 4: 1}


def configuration():
    """Five layers with Engram; window 16."""
    raw = tiny_configuration()
    raw["text_config"] |= {
        "num_hidden_layers": 5,
        "compress_ratios": [0, 2, 1, 1, 1],
        "index_source_layer_ids": [1, 2, 3],
        "candidate_topk_blocks": 3,
        "candidate_block_size": 4,
        "index_topk": TOP_K,
        "engram_layer_ids": [1],
        "engram_num_embeddings": [1],
        "engram_max_ngram_size": 3,
        "engram_vocab_size": 31,
        "engram_n_heads": 1,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 50,
    }
    sizes = table_sizes(ModelConfig.from_dict(raw).engram)
    raw["text_config"]["engram_num_embeddings"] = list(sizes)
    return ModelConfig.from_dict(raw)


CONFIG = configuration()


def random_model():
    drawn = initialise(Model.describe(CONFIG), jax.random.key(0), F32)
    return dataclasses.replace(drawn, token_map=jnp.arange(CONFIG.vocab_size, dtype=jnp.int32) % 50)


@pytest.fixture(scope="module")
def params():
    return random_model()


@pytest.fixture(scope="module")
def scored():
    random = np.random.default_rng(3)
    return scoring_windows([random.integers(4, 96, length, np.int32) for length in (97, 30, 49)], LENGTH, 2)


@pytest.fixture(scope="module")
def evaluation(params, scored):
    return evaluate(params, CONFIG, scored, batch=2)


@pytest.fixture(scope="module")
def alone(params, scored):
    """Taps, next-token losses and entries seen, window by window."""
    run = jax.jit(lambda windows: run_windows(params, windows[:, :-1], CONFIG))
    found = []
    for window in scored.windows:
        output, rows = run(window[None])
        found.append((output.taps, next_token_losses(params, output, window[None, 1:])[0], rows))
    return found


def test_a_golden_models_loss_is_that_of_its_golden_logits():
    """A model as ``load_model`` reads it."""
    config, params = golden_model("quant", "f32")
    tokens = np.asarray(prompts()["p3w_plus1"], np.int32)
    wanted = tensors("tiny-a/logits_f32.safetensors")["p3w_plus1"][:-1].astype(np.float64)
    likelihood = np.exp(wanted)[np.arange(len(wanted)), tokens[1:]] / np.exp(wanted).sum(axis=1)
    loss = held_out_loss(params, config, scoring_windows([tokens], len(tokens) - 1, 2), batch=1)
    assert loss == pytest.approx(-np.log(likelihood).mean(), abs=1e-5)


def test_the_loss_is_the_mean_over_counted_targets(evaluation, alone, scored):
    counted = np.concatenate([losses[mask] for (_, losses, _), mask in zip(alone, scored.counted, strict=True)])
    assert evaluation.tokens == len(counted) == 97 + 30 + 49 - 3
    assert evaluation.loss == pytest.approx(counted.mean(), abs=1e-5)


def test_windows_that_fill_up_a_batch_count_nothing(params, scored, evaluation):
    assert len(scored.windows) % 2 == 1
    whole = evaluate(params, CONFIG, scored, batch=len(scored.windows))
    assert (whole.tokens, whole.expert_load) == (evaluation.tokens, evaluation.expert_load)
    assert whole.loss == pytest.approx(evaluation.loss, abs=1e-5)
    for one, other in zip(whole.index_recall, evaluation.index_recall, strict=True):
        assert dataclasses.asdict(one) == pytest.approx(dataclasses.asdict(other), abs=1e-5)


def test_experts_are_counted_over_the_whole_text(evaluation, alone, scored):
    for layer, load in enumerate(evaluation.expert_load):
        chosen = [
            np.asarray(taps[f"layers.{layer}.router_indices"])[mask]
            for (taps, _, _), mask in zip(alone, scored.counted, strict=True)
        ]
        counts = np.bincount(np.concatenate(chosen).reshape(-1), minlength=CONFIG.n_routed_experts)
        assert load == pytest.approx(counts.max() / counts.mean())
    assert evaluation.mean_expert_load == pytest.approx(np.mean(evaluation.expert_load))
    assert min(evaluation.expert_load) > 1


def shares_by_hand(params, layer, taps, rows, counted):
    """One row ``[selection, random, newest, best]`` for every query that counts."""
    ratio = RATIO[layer]
    inputs = taps[f"layers.{layer}.attn_in"]
    attention = params.layers.layers[layer].attention
    _, queries = project_queries(attention, inputs, rotation(CONFIG, True, rows.positions), CONFIG)
    entries = np.asarray(taps[f"layers.{KV_SOURCE[layer]}.compress_kv"], np.float64)[ratio - 1 :: ratio]
    found = []
    for row in np.flatnonzero(counted):
        visible = (row + 1) // ratio
        if visible <= TOP_K:
            continue
        weights = np.exp(np.asarray(queries[row], np.float64) @ entries[:visible].T / CONFIG.head_dim**0.5)
        mass = (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
        picks = np.asarray(taps[f"layers.{INDEX_SOURCE[layer]}.topk_compressed"][row])
        assert (picks >= 0).all()
        found.append([mass[picks].sum(), TOP_K / visible, mass[-TOP_K:].sum(), np.sort(mass)[-TOP_K:].sum()])
    return found


def test_recall_is_the_share_of_mass_inside_the_selection(params, evaluation, alone, scored):
    assert [recall.layer for recall in evaluation.index_recall] == list(INDEX_SOURCE)
    for recall in evaluation.index_recall:
        shares = [
            row
            for (taps, _, rows), mask in zip(alone, scored.counted, strict=True)
            for row in shares_by_hand(params, recall.layer, taps, rows, mask)
        ]
        assert recall.index_source == INDEX_SOURCE[recall.layer]
        assert recall.queries == len(shares) > 0
        got = (recall.selection, recall.random, recall.newest, recall.best)
        np.testing.assert_allclose(got, np.mean(shares, axis=0), atol=1e-5)


def test_shares_of_a_query_that_looks_at_one_entry():
    """Mass of almost 1 on entry 2 of the five visible ones; entry 5, which would have more, is not visible."""
    entries = 30.0 * jnp.eye(6, 4)[None].at[0, 5, 0].set(2.0).at[0, 0, 0].set(0.0)
    query = jnp.asarray([0.0, 0.0, 1.0, 0.0])[None, None, None]
    visible = jnp.asarray([[5]], jnp.int32)
    for selection, wanted in (
        ([0, 2, -1], [1.0, 2 / 5, 0.0, 1.0]),
        ([0, 2, 3], [1.0, 3 / 5, 1.0, 1.0]),
        ([2, -1, -1], [1.0, 1 / 5, 0.0, 1.0]),
        ([0, 1, -1], [0.0, 2 / 5, 0.0, 1.0]),
    ):
        shares = selection_shares(query, entries, jnp.asarray(selection, jnp.int32)[None, None], visible)
        np.testing.assert_allclose(shares[0, 0], wanted, atol=1e-5)


def test_without_engram_memories_contribute_exactly_nothing(params, scored, evaluation):
    """The same to the last bit as a model that has none, which is not the same as with them."""
    never = dataclasses.replace(CONFIG, engram=None)
    without = held_out_loss(dataclasses.replace(params, engrams=(), token_map=None), never, scored, batch=2)
    assert evaluation.loss_without_engram == without
    assert abs(evaluation.loss - without) > 1e-3


def test_reading_a_silenced_memory_changes_no_stream(params):
    streams = jax.random.normal(jax.random.key(1), (6, CONFIG.hc_mult, CONFIG.hidden_size))
    columns = jnp.arange(12, dtype=jnp.int32).reshape(6, 2)
    text = jnp.zeros((6,), bool)
    read, _ = read_memory(params.engrams[0], streams, columns, text, CONFIG)
    silenced, _ = read_memory(with_memory(params, 0.0, CONFIG).engrams[0], streams, columns, text, CONFIG)
    np.testing.assert_array_equal(silenced, streams)
    assert np.abs(read - streams).max() > 0.1


def test_a_model_without_engram_has_one_loss(params, scored):
    never = dataclasses.replace(CONFIG, engram=None)
    bare = dataclasses.replace(params, engrams=(), token_map=None)
    assert evaluate(bare, never, scored, batch=2).loss_without_engram is None


def test_a_text_without_long_queries_has_no_recall(params):
    short = scoring_windows([np.arange(4, 4 + TOP_K, dtype=np.int32)], LENGTH, 2)
    evaluation = evaluate(params, CONFIG, short, batch=2)
    assert [recall.queries for recall in evaluation.index_recall] == [0] * 4
    assert all(np.isnan(recall.selection) for recall in evaluation.index_recall)


def test_the_json_form_holds_everything(evaluation):
    document = json.loads(json.dumps(dataclasses.asdict(evaluation)))
    assert document["loss"] == evaluation.loss
    assert document["expert_load"] == list(evaluation.expert_load)
    assert document["index_recall"][3]["selection"] == evaluation.index_recall[3].selection
