"""Single layers fed with recorded golden inputs: quantised caches (f32q) and bfloat16 beside float32.

Quantised modes are compared layer by layer, because a rounding-bin flip is amplified from layer to layer. Full-sequence
pass, not deterministic.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.engram import read_memory
from deepinfer_jax.model.indexer import Selected
from deepinfer_jax.model.layer import Carry, LayerNumbers, run_layer
from deepinfer_jax.model.rows import sequence_rows
from deepinfer_jax.model.source import SequenceSource
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.topology import LayerPlan, topology
from tests.checkpoints import golden_model, prompts
from tests.golden import tensors

pytestmark = pytest.mark.usefixtures("quickly_compiled")

TOKENS = prompts()["p3w_plus1"]
LENGTH = len(TOKENS)
LAYERS = range(11)
# A pick that differs must be a near tie: within this share of the standard deviation of its row's scores.
NEAR_TIE = 1e-2


@functools.cache
def recorded(numerics: str) -> dict[str, np.ndarray]:
    return tensors(f"tiny-a/taps_{numerics}_p3w_plus1.safetensors")


@functools.partial(jax.jit, static_argnames=("layer", "config", "numerics"))
def one_layer(params: Model, carry: Carry, layer: int, config: ModelConfig, numerics: Numerics) -> dict[str, Array]:
    plan = topology(config).layers[layer]
    rows = sequence_rows(jnp.asarray([TOKENS], jnp.int32), LENGTH)
    if plan.engram is not None:
        columns = jnp.asarray(recorded("f32")["engram_hash_ids"][:, plan.engram])
        streams, _ = read_memory(params.engrams[plan.engram], carry.streams, columns, rows.image, config)
        carry = carry.replace(streams=streams)
    numbers = LayerNumbers.of(topology(config), layer, carry.draft_taps.shape[0])
    assert hasattr(params.layers, "layers")
    return run_layer(params.layers.layers[layer], plan.kind, numbers, carry, rows, config, numerics)[1]


def recorded_inputs(config: ModelConfig, plan: LayerPlan, taps: dict[str, np.ndarray], dtype: jnp.dtype) -> Carry:
    """A layer's inputs as recorded: streams and mix of the layer before it, and its sources' shared tensors."""
    before = f"layers.{plan.layer - 1}"
    if plan.layer == 0:
        streams = np.repeat(taps["embed_out"][:, None], config.hc_mult, axis=1)
        pre = np.eye(1, config.hc_mult, dtype=np.float32).repeat(LENGTH, axis=0)
    else:
        streams, pre = taps[f"{before}.streams_out"], taps[f"{before}.next_pre_mix"]
    entries = np.zeros((LENGTH, config.head_dim), np.float32)
    keys = np.zeros((LENGTH, config.index_head_dim), np.float32)
    selected = Selected.empty(LENGTH, config)
    if plan.kv_source is not None and plan.kv_source < plan.layer:
        ratio = plan.kind.ratio
        entries[ratio - 1 :: ratio] = taps[f"layers.{plan.kv_source}.compress_kv"]
        keys[ratio - 1 :: ratio] = taps[f"layers.{plan.kv_source}.index_k"]
    if plan.index_source is not None and plan.index_source < plan.layer:
        selected = selected.replace(entries=jnp.asarray(taps[f"layers.{plan.index_source}.topk_compressed"]))
    if config.candidates and config.candidates.source_layer_id < plan.layer:
        selected = selected.replace(candidates=jnp.asarray(recorded_candidates(config, taps)))
    source = SequenceSource(jnp.asarray(entries, dtype), jnp.asarray(keys, dtype), LENGTH)
    targets = jnp.zeros((0, LENGTH, config.hidden_size), dtype)
    return Carry(jnp.asarray(streams, dtype), jnp.asarray(pre), selected, source, targets)


def recorded_candidates(config: ModelConfig, taps: dict[str, np.ndarray]) -> np.ndarray:
    """The golden 0/1 mask over entries as ascending block numbers, -1 for none."""
    level = config.candidates
    assert level is not None
    blocks = np.full((LENGTH, level.topk_blocks), -1, np.int32)
    for row, mask in zip(blocks, taps[f"layers.{level.source_layer_id}.candidates"], strict=True):
        kept = np.unique(np.flatnonzero(mask) // level.block_size)
        row[: len(kept)] = kept
    return blocks


def differing_rows(got: np.ndarray, want: np.ndarray, scores: np.ndarray) -> list[int]:
    """Rows whose selections differ; asserts that every differing pick is a near tie with the K-th."""
    rows = []
    for row in range(LENGTH):
        ours, theirs = set(got[row]) - {-1}, set(want[row]) - {-1}
        if ours == theirs:
            continue
        rows.append(row)
        visible = scores[row][np.isfinite(scores[row])]
        kth = min(scores[row][pick] for pick in theirs)
        for pick in ours ^ theirs:
            assert abs(scores[row][pick] - kth) <= NEAR_TIE * visible.std(), (row, pick)
    return rows


def visible_scores(taps: dict[str, Array], plan: LayerPlan) -> np.ndarray:
    scores = np.asarray(taps["index_score"]).copy()
    visible = (np.arange(LENGTH) + 1) // plan.kind.ratio
    scores[np.arange(scores.shape[1])[None] >= visible[:, None]] = -np.inf
    return scores


def test_f32q_layers_reproduce_recorded_outputs() -> None:
    """At least 99 % of the rows of every layer within 1e-3; selections differ on at most 1 % of rows, in near ties."""
    numerics = Numerics.preset("f32q")
    config, params = golden_model("quant", "f32q")
    want = recorded("f32q")
    differing, compared = 0, 0
    for layer in LAYERS:
        plan = topology(config).layers[layer]
        got = one_layer(params, recorded_inputs(config, plan, want, numerics.dtype), layer, config, numerics)
        name = f"layers.{layer}"
        for tap in ("streams_out", "next_pre_mix", "window_kv"):
            error = np.abs(np.asarray(got[tap]) - want[f"{name}.{tap}"]).reshape(LENGTH, -1).max(axis=1)
            assert (error <= 1e-3).mean() >= 0.99, (layer, tap)
        for tap in ("compress_kv", "index_k"):
            if f"{name}.{tap}" in want:
                ratio = plan.kind.ratio
                ours = np.asarray(got[tap])[ratio - 1 :: ratio]
                error = np.abs(ours - want[f"{name}.{tap}"]).max(axis=1)
                assert (error <= 1e-3).mean() >= 0.99, (layer, tap)
        if plan.kind.selects:
            picks = np.asarray(got["topk_compressed"])
            differing += len(differing_rows(picks, want[f"{name}.topk_compressed"], visible_scores(got, plan)))
            compared += LENGTH
    assert compared == 6 * LENGTH
    assert differing <= 0.01 * compared


@pytest.mark.parametrize("switch", ["window_keys_fp8", "main_entries_fp4", "index_queries_fp4", "index_keys_fp4"])
def test_every_quantisation_switch_changes_what_it_names(switch: str) -> None:
    """Layer 6 owns everything that is quantised; with one switch alone exactly its tensor changes first."""
    config, params = golden_model("quant", "f32")
    plain = Numerics.preset("f32")
    plan = topology(config).layers[6]
    carry = recorded_inputs(config, plan, recorded("f32"), plain.dtype)
    without = one_layer(params, carry, 6, config, plain)
    switched = one_layer(params, carry, 6, config, Numerics(switch, **{switch: True}))
    named = {
        "window_keys_fp8": "window_kv",
        "main_entries_fp4": "compress_kv",
        "index_keys_fp4": "index_k",
        "index_queries_fp4": "index_score",
    }
    for other, tap in named.items():
        same = np.array_equal(np.asarray(without[tap]), np.asarray(switched[tap]))
        follows = other == switch or (switch == "index_keys_fp4" and tap == "index_score")
        assert same != follows, tap


def test_bf16_layers_stay_close_to_float32_ones() -> None:
    """Relative RMS of every layer's change to the streams at most 2e-2 on rows with equal picks."""
    numerics = Numerics.preset("bf16")
    config, params = golden_model("bf16", "bf16")
    want = recorded("f32")
    equal_rows = 0
    for layer in LAYERS:
        plan = topology(config).layers[layer]
        got = one_layer(params, recorded_inputs(config, plan, want, numerics.dtype), layer, config, numerics)
        name = f"layers.{layer}"
        same = (np.sort(got["router_indices"]) == np.sort(want[f"{name}.router_indices"])).all(axis=1)
        if plan.kind.selects:
            same &= (np.asarray(got["topk_compressed"]) == want[f"{name}.topk_compressed"]).all(axis=1)
        for tap in ("attn_out", "streams_out"):
            error = np.asarray(got[tap], np.float32)[same] - want[f"{name}.{tap}"][same]
            assert np.sqrt(np.mean(error**2)) <= 2e-2 * np.sqrt(np.mean(want[f"{name}.{tap}"][same] ** 2)), layer
        equal_rows += int(same.sum())
    assert equal_rows >= 0.9 * len(LAYERS) * LENGTH


def test_released_layers_reproduce_recorded_bf16() -> None:
    """Relative RMS at most 1e-2 on rows with equal picks; picks differ on at most 5 % of rows, in near ties."""
    numerics = Numerics.preset("released")
    config, params = golden_model("quant", "released")
    want = recorded("bf16")
    differing, compared = 0, 0
    for layer in LAYERS:
        plan = topology(config).layers[layer]
        got = one_layer(params, recorded_inputs(config, plan, want, numerics.dtype), layer, config, numerics)
        name = f"layers.{layer}"
        picks, scores = np.asarray(got["router_indices"]), np.asarray(got["router_biased_scores"])
        rows = set(differing_rows(picks, want[f"{name}.router_indices"], scores))
        if plan.kind.selects:
            picks = np.asarray(got["topk_compressed"])
            rows |= set(differing_rows(picks, want[f"{name}.topk_compressed"], visible_scores(got, plan)))
        differing, compared = differing + len(rows), compared + LENGTH
        same = [row for row in range(LENGTH) if row not in rows]
        for tap in ("streams_out", "window_kv", "next_pre_mix"):
            expected = want[f"{name}.{tap}"][same]
            error = np.asarray(got[tap], np.float32)[same] - expected
            assert np.sqrt(np.mean(error**2)) <= 1e-2 * np.sqrt(np.mean(expected**2)), (layer, tap)
    assert differing <= 0.05 * compared
