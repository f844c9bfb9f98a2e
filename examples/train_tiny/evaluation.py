"""What a model is worth on held-out text: its loss, the balance of its experts, and what its selections find."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.attention import project_queries
from deepinfer_jax.model.hyper_connections import Taps
from deepinfer_jax.model.layer import UnrolledLayers
from deepinfer_jax.model.rope import rotation
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.topology import LayerPlan, topology
from examples.train_tiny.batches import Scored
from examples.train_tiny.losses import next_token_losses, run_windows, with_memory

# Windows in one pass.
BATCH = 2
Sums = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Recall:
    """How much of what a layer would look at its selection holds.

    A query's attention mass is the softmax of its scores over all compressed entries that it sees, averaged over the
    heads; window and sink have no part in it. The figures are shares of it, means over the ``queries`` that see more
    entries than a selection takes. ``layer`` attends the ``selection`` that layer ``index_source`` made. Of as many
    entries, ``random`` is what to expect of a random draw, ``newest`` the share of the newest, and ``best`` that of the
    ones with the most mass, which no selection exceeds.
    """

    layer: int
    index_source: int
    queries: int
    selection: float
    random: float
    newest: float
    best: float


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Figures of one model on held-out text; ``dataclasses.asdict`` is their JSON form.

    ``loss`` and ``loss_without_engram`` (None for a model without Engram): nats a token, means over ``tokens``
    predicted tokens. ``expert_load``: per layer, tokens of the busiest expert over the mean of all, counted over the
    whole text; ``mean_expert_load`` is its mean over layers. ``index_recall``: every layer that reads a selection.
    """

    tokens: int
    loss: float
    loss_without_engram: float | None
    expert_load: tuple[float, ...]
    mean_expert_load: float
    index_recall: tuple[Recall, ...]


def evaluate(params: Model, config: ModelConfig, scored: Scored, batch: int = BATCH) -> Evaluation:
    """Measure a model on windows of held-out text.

    Args:
      params: unrolled float32 parameters with routed experts in one stack, as training has them and ``load_model``
        reads them with numerics f32. A model with Engram needs its token map.
      config: the model's configuration.
      scored: windows and the targets that count (:func:`examples.train_tiny.batches.scoring_windows`); what a counted
        target's row chooses and looks at counts too, so that every token does once.
      batch: windows in one pass.
    """
    sums = _sums_of_windows(params, config, scored, batch, everything=True)
    tokens, loads = int(sums["tokens"]), sums["choices"]
    busiest = loads.max(axis=1) / loads.mean(axis=1)
    bare = None if config.engram is None else held_out_loss(with_memory(params, 0.0, config), config, scored, batch)
    return Evaluation(
        tokens=tokens,
        loss=float(sums["loss"] / tokens),
        loss_without_engram=bare,
        expert_load=tuple(busiest.tolist()),
        mean_expert_load=float(busiest.mean()),
        index_recall=tuple(
            _recall(plan, queries, shares)
            for plan, queries, shares in zip(_readers(config), sums["queries"], sums["shares"], strict=True)
        ),
    )


def held_out_loss(params: Model, config: ModelConfig, scored: Scored, batch: int = BATCH) -> float:
    """Mean loss of all counted targets, in nats a token; arguments as of :func:`evaluate`."""
    sums = _sums_of_windows(params, config, scored, batch, everything=False)
    return float(sums["loss"] / sums["tokens"])


def selection_shares(
    queries: Float[Array, "windows length heads head_dim"],
    entries: Float[Array, "windows entries head_dim"],
    selection: Int[Array, "windows length top_k"],
    visible: Int[Array, "windows length"],
) -> Float[Array, "windows length kinds"]:
    """Share of every query's attention mass in its selection, and in as many random, newest and best entries.

    ``selection`` has -1 in unused places; ``visible`` counts the entries that a query sees.
    """
    numbers = jnp.arange(entries.shape[1], dtype=jnp.int32)[None, None]
    seen = numbers < visible[..., None]
    scores = jnp.einsum("wthd,wed->wthe", queries, entries) * queries.shape[-1] ** -0.5
    mass = jax.nn.softmax(jnp.where(seen[:, :, None], scores, -jnp.inf), axis=-1).mean(axis=2)
    mass = jnp.where(seen, mass, 0.0)
    used = selection >= 0
    taken = used.sum(axis=-1)
    picked = jnp.where(used, jnp.take_along_axis(mass, jnp.maximum(selection, 0), axis=-1), 0.0).sum(axis=-1)
    newest = jnp.where(numbers >= (visible - taken)[..., None], mass, 0.0).sum(axis=-1)
    expected = taken.astype(jnp.float32) / jnp.maximum(visible, 1).astype(jnp.float32)
    places = min(selection.shape[-1], entries.shape[1])
    largest = jnp.where(jnp.arange(places)[None, None] < taken[..., None], jax.lax.top_k(mass, places)[0], 0.0)
    return jnp.stack([picked, expected, newest, largest.sum(axis=-1)], axis=-1)


def _recall(plan: LayerPlan, queries: np.ndarray, shares: np.ndarray) -> Recall:
    """``shares`` are sums over ``queries``; a text too short for any such query gives NaN."""
    assert plan.index_source is not None
    means = (shares / queries if queries else np.full(4, np.nan)).tolist()
    return Recall(plan.layer, plan.index_source, int(queries), *means)


def _readers(config: ModelConfig) -> list[LayerPlan]:
    """The layers that attend a selection, their own or another layer's."""
    return [plan for plan in topology(config).layers if plan.index_source is not None]


def _sums_of_windows(params: Model, config: ModelConfig, scored: Scored, batch: int, *, everything: bool) -> Sums:
    """The figures of :func:`_sums`, summed over all windows in float64."""
    totals: Sums = {}
    for windows, counted in _batches(scored, batch):
        sums = jax.device_get(_sums(params, windows, counted, config=config, everything=everything))
        totals = {name: totals.get(name, 0.0) + np.asarray(value, np.float64) for name, value in sums.items()}
    return totals


def _batches(scored: Scored, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All windows, ``size`` at a time; the last batch is filled with windows in which nothing counts."""
    missing = -len(scored.windows) % size
    windows = np.concatenate([scored.windows, np.repeat(scored.windows[:1], missing, axis=0)])
    counted = np.pad(scored.counted, ((0, missing), (0, 0)))
    for start in range(0, len(windows), size):
        yield windows[start : start + size], counted[start : start + size]


@functools.partial(jax.jit, static_argnames=("config", "everything"))
def _sums(
    params: Model,
    windows: Int[Array, "windows window"],
    counted: Bool[Array, "windows length"],
    *,
    config: ModelConfig,
    everything: bool,
) -> dict[str, Array]:
    """Sums over the counted targets of some windows.

    ``tokens``, ``loss`` in nats, and with ``everything`` also ``choices`` ``[layers experts]``, and per layer that
    reads a selection ``queries`` ``[readers]`` and their ``shares`` ``[readers kinds]``.
    """
    output, rows = run_windows(params, windows[:, :-1], config)
    losses = next_token_losses(params, output, windows[:, 1:])
    sums = {"tokens": counted.sum(), "loss": jnp.where(counted, losses, 0.0).sum()}
    if everything:
        sums["choices"] = _expert_choices(output.taps, counted, config)
        readers = [_layer_shares(params, output.taps, plan, rows, counted, config) for plan in _readers(config)]
        sums["queries"] = jnp.stack([queries for queries, _ in readers])
        sums["shares"] = jnp.stack([shares for _, shares in readers])
    return sums


def _expert_choices(
    taps: Taps, counted: Bool[Array, "windows length"], config: ModelConfig
) -> Float[Array, "layers experts"]:
    """How often counted rows chose each expert, per layer."""
    chosen = jnp.stack([taps[f"layers.{layer}.router_indices"] for layer in range(config.num_hidden_layers)])
    choices = jax.nn.one_hot(chosen, config.n_routed_experts).sum(axis=2)
    return jnp.where(counted.reshape(1, -1, 1), choices, 0.0).sum(axis=1)


def _layer_shares(
    params: Model, taps: Taps, plan: LayerPlan, rows: Rows, counted: Bool[Array, "windows length"], config: ModelConfig
) -> tuple[Int[Array, ""], Float[Array, " kinds"]]:
    """Number of a layer's counted queries that see more entries than a selection takes, and the sum of their shares."""
    assert isinstance(params.layers, UnrolledLayers)

    def by_window(values: Array) -> Array:
        return values.reshape(*counted.shape, *values.shape[1:])

    ratio = plan.kind.ratio
    inputs, entries = taps[f"layers.{plan.layer}.attn_in"], by_window(taps[f"layers.{plan.kv_source}.compress_kv"])
    selection = by_window(taps[f"layers.{plan.index_source}.topk_compressed"])
    turn = rotation(config, True, rows.positions)
    _, queries = project_queries(params.layers.layers[plan.layer].attention, inputs, turn, config)
    visible = by_window(rows.visible_entries(ratio))
    shares = selection_shares(by_window(queries), entries[:, ratio - 1 :: ratio], selection, visible)
    asking = counted & (visible > config.index_topk)
    return asking.sum(), jnp.where(asking[..., None], shares, 0.0).sum(axis=(0, 1))
