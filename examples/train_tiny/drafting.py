"""Training the draft head on outputs of the frozen backbone: drafts, Markov term and confidences."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.draft import DraftHead, Drafts, chain_drafts, context_keys, context_windows, draft_block
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.transformer import Model, Output, logits
from deepinfer_jax.numerics import F32
from examples.train_tiny.losses import DENSE, empty_source, run_windows
from examples.train_tiny.optimisation import Figures, Progress, Schedule, first_progress, muon_and_adam, train
from examples.train_tiny.own_text import DraftWindows
from examples.train_tiny.storage import as_stored

ANCHORS = 256  # places in a window of text where a block is drafted; as many a step in windows of own text
CONFIDENCE_WEIGHT = 0.2


@dataclasses.dataclass(frozen=True)
class Emphasis:
    """What drafts are trained towards.

    ``place_decay``: weight of a draft against the one before it; a later draft counts only if all before it were
    accepted. ``sharp``: how much of the target is the backbone's likeliest token, rather than its distribution.
    """

    place_decay: float
    sharp: float


DISTRIBUTION = Emphasis(place_decay=0.8, sharp=0.5)
AGREEMENT = Emphasis(place_decay=0.6, sharp=0.8)


def train_draft_head(
    backbone: Model,
    config: ModelConfig,
    batches: DraftWindows,
    schedule: Schedule,
    directory: Path,
    report: Callable[[dict[str, float]], None] = lambda line: None,
    *,
    emphasis: Emphasis = DISTRIBUTION,
    begin: DraftHead | None = None,
) -> DraftHead:
    """Train from where ``directory`` left off. ``backbone`` has its token map and stays as it is.

    ``begin``: the head before the first step; None draws one.
    """
    optimiser = _optimiser(config, schedule)

    def step(progress: Progress, number: int) -> tuple[Progress, Figures]:
        windows, first = batches.batch(number, schedule.batch)
        random = np.random.default_rng((schedule.seed, number))
        shape = len(windows), schedule.batch * ANCHORS // len(windows)
        places = random.integers(first, last_anchor(windows, config) + 1, shape, dtype=np.int32)
        return update(
            progress,
            backbone,
            windows,
            places,
            config=config,
            emphasis=emphasis,
            stored=schedule.stored(number),
            optimiser=optimiser,
        )

    first = first_progress(DraftHead.describe(config), optimiser, schedule)
    if begin is not None:
        first = dataclasses.replace(first, params=begin, optimiser=optimiser.init(begin))
    head: DraftHead = train(first, step, schedule, directory, report).params
    return head


def last_anchor(windows: Int[np.ndarray, "windows window"], config: ModelConfig) -> int:
    """The last place behind which a window still has the anchor and a token for every draft."""
    assert config.draft is not None
    return windows.shape[1] - 2 - config.draft.block_size


@functools.partial(
    jax.jit, static_argnames=("config", "emphasis", "stored", "optimiser"), donate_argnames=("progress",)
)
def update(
    progress: Progress,
    backbone: Model,
    windows: Int[Array, "windows window"],
    places: Int[Array, "windows anchors"],
    *,
    config: ModelConfig,
    emphasis: Emphasis,
    stored: bool,
    optimiser: optax.GradientTransformation,
) -> tuple[Progress, Figures]:
    """One optimiser step on blocks drafted behind ``places``; donates the progress."""
    output, rows = run_windows(backbone, windows[:, :-1], config)
    following = tokens_behind(windows, places, config)
    target = jax.lax.stop_gradient(target_logits(backbone, output, windows, places, config))

    def total(head: DraftHead) -> tuple[Array, Figures]:
        if stored:
            head = as_stored(DraftHead.describe(config), head)
        drafts = drafts_behind(
            head, backbone, output, rows, windows, places, config, lambda _, step: following[:, step + 1]
        )
        return draft_losses(drafts, target, emphasis)

    gradients, figures = jax.grad(total, has_aux=True)(progress.params)
    changes, state = optimiser.update(gradients, progress.optimiser, progress.params)
    return Progress(optax.apply_updates(progress.params, changes), state, progress.step + 1), figures


def tokens_behind(
    windows: Int[Array, "windows window"], places: Int[Array, "windows anchors"], config: ModelConfig
) -> Int[Array, "blocks tokens"]:
    """The anchor behind every place and the tokens behind it, one for each draft."""
    assert config.draft is not None
    wanted = places[:, :, None] + jnp.arange(1, config.draft.block_size + 2)[None, None]
    return jnp.take_along_axis(windows[:, None], wanted, axis=2).reshape(-1, wanted.shape[2])


def target_logits(
    backbone: Model,
    output: Output,
    windows: Int[Array, "windows window"],
    places: Int[Array, "windows anchors"],
    config: ModelConfig,
) -> Float[Array, "blocks drafts vocabulary"]:
    """What the backbone says at the place of every draft, with the window's own tokens before it."""
    assert config.draft is not None
    rows = _rows_of(windows, places)[:, None] + jnp.arange(1, config.draft.block_size + 1)[None]
    return logits(backbone, output.hidden[rows.reshape(-1)]).reshape(*rows.shape, -1)


def drafts_behind(
    head: DraftHead,
    backbone: Model,
    output: Output,
    rows: Rows,
    windows: Int[Array, "windows window"],
    places: Int[Array, "windows anchors"],
    config: ModelConfig,
    choose: Callable[[Array, int], Array],
) -> Drafts:
    """The block drafted behind every place of the windows, window by window; ``choose`` as in chain_drafts."""
    source = empty_source(rows, windows.shape[1] - 1, config)
    request = _rows_of(windows, places)
    keys = context_keys(head, output.draft_taps, rows, config, F32)
    contexts = context_windows(keys, rows, source, request, places.reshape(-1), config)
    anchors = tokens_behind(windows, places, config)[:, 0]
    block = draft_block(
        head, backbone.embedding, backbone.head, anchors, places.reshape(-1), contexts, config, F32, DENSE
    )
    return chain_drafts(head, block, anchors, choose)


def draft_losses(
    drafts: Drafts, target: Float[Array, "blocks drafts vocabulary"], emphasis: Emphasis
) -> tuple[Array, Figures]:
    """Distance of drafts from the backbone, and of confidences from whether the backbone would agree at temperature 0.

    A confidence is conditional: it is trained where all earlier drafts were agreed with.
    """
    likeliest, count = target.argmax(axis=-1), target.shape[1]
    sharp = emphasis.sharp
    wanted = sharp * jax.nn.one_hot(likeliest, target.shape[-1]) + (1 - sharp) * jax.nn.softmax(target)
    distances = optax.softmax_cross_entropy(drafts.logits, wanted).mean(axis=0)
    places = emphasis.place_decay ** jnp.arange(count)
    agreed = (drafts.logits.argmax(axis=-1) == likeliest).astype(jnp.float32)
    survived = jnp.cumprod(agreed, axis=1)
    reached = jnp.concatenate([jnp.ones_like(survived[:, :1]), survived[:, :-1]], axis=1)
    doubts = (optax.sigmoid_binary_cross_entropy(drafts.confidence, agreed) * reached).sum() / reached.sum()
    distance = (distances * places).sum() / places.sum()
    figures = {"loss": distance, "confidence_loss": doubts, "emitted": 1.0 + survived.sum(axis=1).mean()}
    return distance + CONFIDENCE_WEIGHT * doubts, figures


def _rows_of(windows: Int[Array, "windows window"], places: Int[Array, "windows anchors"]) -> Int[Array, " blocks"]:
    """The step row of every place."""
    length = windows.shape[1] - 1
    return (jnp.arange(windows.shape[0])[:, None] * length + places).reshape(-1)


@functools.lru_cache
def _optimiser(config: ModelConfig, schedule: Schedule) -> optax.GradientTransformation:
    return muon_and_adam(DraftHead.describe(config), schedule)
