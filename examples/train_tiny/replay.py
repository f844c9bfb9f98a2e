"""``python -m examples.train_tiny.replay``: what bounded replay costs in perplexity on held-out text.

Bounded replay (model specification, section 17) leaves out computation at two places. After a prefix hit, whose
compressed entries are held but whose window keys are not, it computes one window of tokens again and starts from an
empty window: *encoder replay*. Of a prompt, it sends only the last tokens through the decoder layers: *decoder replay*.
Here whole texts are computed at once. A row that replay would leave out exists, but no row that counts reads it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array, Float, Int

from deepinfer_jax.checkpoint.reader import load_model
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.engram import compressed_ids, read_memory, table_rows
from deepinfer_jax.model.hyper_connections import collapse, initial_streams
from deepinfer_jax.model.indexer import Selected
from deepinfer_jax.model.layer import Carry, LayerNumbers, UnrolledLayers, run_layer
from deepinfer_jax.model.linear import rms_norm
from deepinfer_jax.model.rows import Rows, sequence_rows
from deepinfer_jax.model.source import Number, SequenceSource
from deepinfer_jax.model.transformer import Model, embed, logits
from deepinfer_jax.numerics import F32
from deepinfer_jax.text.tokenizer import Tokenizer
from deepinfer_jax.topology import topology
from examples.train_tiny.batches import Tokens, encode_documents
from examples.train_tiny.corpus import read_corpus
from examples.train_tiny.losses import DENSE, TILE_ROWS

PROMPTS = (64, 128, 256, 512, 768)
# Tokens behind a prompt that are scored, and the first of them, which are reported apart too.
SCORED, FIRST = 128, 32
BATCH = 2
# DeepInfer's recommended number of kept prompt tokens, for a window of 128, and drafts that it may roll back.
RECOMMENDED_KEEP, RECOMMENDED_WINDOW, ROLLED_BACK = 140, 128, 6


@dataclasses.dataclass(frozen=True)
class Replay:
    """How a prompt is computed.

    ``hit``: leading tokens whose entries are held, so that encoder replay starts one window before; 0 computes the
    encoder layers exactly. ``keep``: last tokens of the prompt that run through the decoder layers; None for all.
    """

    hit: int = 0
    keep: int | None = None

    def cuts(self, prompt: int, window: int) -> Cuts:
        """Where replay cuts, for a prompt of so many tokens and a window of so many.

        Raises:
          ValueError: fewer kept tokens than a window, which the tokens behind the prompt would miss.
        """
        if self.keep is not None and self.keep < window:
            raise ValueError(f"{self.keep} kept tokens; accepted: at least a window, {window}")
        floor = max(0, self.hit - window)
        decoder_floor = floor if self.keep is None else max(floor, prompt - self.keep)
        return Cuts(*(jnp.asarray(number, jnp.int32) for number in (self.hit, floor, decoder_floor)))


EXACT = Replay()


@struct.dataclass
class Cuts:
    """Positions, in tokens: entries of earlier tokens are held; earlier window keys do not exist, per kind of layer."""

    hit: Int[Array, ""]
    floor: Int[Array, ""]
    decoder_floor: Int[Array, ""]


@struct.dataclass
class Held:
    """Entries and index keys of one page group, each at the row that completed it."""

    entries: Float[Array, "rows head_dim"]
    keys: Float[Array, "rows index_dim"]


@struct.dataclass
class HeldSource(SequenceSource):
    """Whole sequences of which an earlier pass computed the first ``hit`` tokens; its entries are never rewritten.

    ``held``: per page group, the entries of that pass. ``used``: the same for this pass, of the groups so far.
    """

    hit: Int[Array, ""]
    held: tuple[Held, ...]
    used: tuple[Held, ...]

    def store_entries(self, group: Number, ratio: int, entries: Array, index_keys: Array, rows: Rows) -> HeldSource:
        del ratio
        earlier = self.held[group]
        # An entry stands at its last token's row, so that this is g < floor(hit / ratio).
        is_held = (rows.positions < self.hit)[:, None]
        entries = jnp.where(is_held, earlier.entries, entries)
        index_keys = jnp.where(is_held, earlier.keys, index_keys)
        return dataclasses.replace(self, entries=entries, keys=index_keys, used=(*self.used, Held(entries, index_keys)))


def nothing_held(tokens: Int[Array, "sequences length"], config: ModelConfig) -> tuple[Held, ...]:
    """What stands for the entries of an earlier pass where there was none, per page group."""
    rows = _rows(tokens).tokens.shape[0]
    shapes = (rows, config.head_dim), (rows, config.index_head_dim)
    return tuple(Held(*(jnp.zeros(shape, jnp.float32) for shape in shapes)) for _ in topology(config).groups)


def replay_pass(
    params: Model, tokens: Int[Array, "sequences length"], held: tuple[Held, ...], cuts: Cuts, config: ModelConfig
) -> tuple[Float[Array, "sequences length hidden"], tuple[Held, ...]]:
    """One pass over whole sequences with the same cuts; rows below a cut carry values of no meaning.

    ``held`` are entries of an earlier pass over the same tokens. The layers run one by one, because those of the
    decoder side see other windows.

    Returns the hidden states that the output head takes, and the entries that this pass read.
    """
    assert isinstance(params.layers, UnrolledLayers)
    rows, plan = _rows(tokens), topology(config)
    source = _source(rows, tokens.shape[1], held, cuts, config)
    columns = None
    if config.engram is not None:
        ids = compressed_ids(params.token_map, rows)
        columns = table_rows(ids, rows, source, params.token_map, config.engram)
    floors = {"encoder": cuts.floor, "decoder": cuts.decoder_floor}
    sides = {
        side: dataclasses.replace(rows, floors=jnp.full_like(rows.floors, floor)) for side, floor in floors.items()
    }
    streams, pre = initial_streams(embed(params, rows, F32, DENSE), config.hc_mult)
    count, targets = streams.shape[0], 0
    no_taps = jnp.zeros((targets, count, config.hidden_size), jnp.float32)
    carry = Carry(streams, pre, Selected.empty(count, config), source, no_taps)
    for layer in plan.layers:
        if layer.engram is not None:
            assert columns is not None
            memory = params.engrams[layer.engram]
            streams, _ = read_memory(memory, carry.streams, columns[:, layer.engram], rows.image, config, DENSE)
            carry = dataclasses.replace(carry, streams=streams)
        numbers = LayerNumbers.of(plan, layer.layer, targets)
        weights = params.layers.layers[layer.layer]
        carry, _ = run_layer(weights, layer.kind, numbers, carry, sides[layer.side], config, F32, DENSE)
    hidden = rms_norm(collapse(carry.streams, carry.pre), params.norm, config.rms_norm_eps)
    assert isinstance(carry.source, HeldSource)
    return hidden.reshape(len(tokens), -1, config.hidden_size)[:, : tokens.shape[1]], carry.source.used


def _rows(tokens: Int[Array, "sequences length"]) -> Rows:
    return sequence_rows(tokens, min(TILE_ROWS, tokens.shape[1]))


def _source(rows: Rows, length: int, held: tuple[Held, ...], cuts: Cuts, config: ModelConfig) -> HeldSource:
    dims = config.head_dim, config.index_head_dim
    empty = SequenceSource.empty(rows.tokens.shape[0], length, *dims, jnp.dtype(jnp.float32))
    return HeldSource(empty.entries, empty.keys, empty.length, hit=cuts.hit, held=held, used=())


@functools.partial(jax.jit, static_argnames=("prompt", "config"))
def losses_behind(
    params: Model,
    tokens: Int[Array, "sequences tokens"],
    held: tuple[Held, ...],
    cuts: Cuts,
    *,
    prompt: int,
    config: ModelConfig,
) -> tuple[Float[Array, "sequences scored"], tuple[Held, ...]]:
    """Losses of the tokens behind a prompt of ``prompt`` tokens, in nats, and the entries that the pass read."""
    hidden, used = replay_pass(params, tokens[:, :-1], held, cuts, config)
    hidden, targets = hidden[:, prompt - 1 :], tokens[:, prompt:]
    scores = logits(params, hidden.reshape(-1, config.hidden_size)).reshape(*targets.shape, -1)
    return optax.softmax_cross_entropy_with_integer_labels(scores, targets), used


def compared_replays(prompt: int, window: int) -> list[Replay]:
    """What is measured beside the exact model: each replay alone, and both together."""
    keeps = (math.ceil(RECOMMENDED_KEEP / RECOMMENDED_WINDOW * window), window + ROLLED_BACK)
    hits = (prompt, prompt - window)
    alone = [*(Replay(hit=hit) for hit in hits), *(Replay(keep=keep) for keep in keeps)]
    return [*alone, *(Replay(hits[1], keep) for keep in keeps)]


@dataclasses.dataclass(frozen=True)
class Behind:
    """Perplexity of the first ``tokens`` tokens behind prompts; ``change``: loss above the exact model's, nats a token.

    ``error`` is the standard error of ``change`` over windows of text.
    """

    tokens: int
    perplexity: float
    change: float
    error: float

    @classmethod
    def of(cls, losses: np.ndarray, exact: np.ndarray, tokens: int) -> Behind:
        """From the losses ``[windows scored]`` of a replay and of the exact model, in nats."""
        changes = (losses - exact)[:, :tokens].mean(axis=1, dtype=np.float64)
        error = changes.std(ddof=1) / len(changes) ** 0.5 if len(changes) > 1 else float("nan")
        perplexity = np.exp(losses[:, :tokens].mean(dtype=np.float64))
        return cls(tokens, float(perplexity), float(changes.mean()), float(error))


@dataclasses.dataclass(frozen=True)
class Measured:
    """One replay (:data:`EXACT` among them) behind prompts of one length: the first scored tokens, and all of them."""

    prompt: int
    replay: Replay
    first: Behind
    scored: Behind


def measure(
    params: Model,
    config: ModelConfig,
    windows: Int[np.ndarray, "windows tokens"],
    prompts: Sequence[int] = PROMPTS,
    batch: int = BATCH,
) -> list[Measured]:
    """Measure all replays behind the first ``prompt`` tokens of windows of text, for each of ``prompts``.

    Windows hold ``SCORED`` tokens more than the longest prompt, and run ``batch`` at a time. Parameters are as
    :func:`examples.train_tiny.evaluation.evaluate` takes them.
    """
    measured = []
    for prompt in prompts:
        replays = compared_replays(prompt, config.sliding_window)
        texts = windows[:, : prompt + SCORED]
        groups = [
            _losses_of_batch(params, config, texts[start : start + batch], prompt, replays)
            for start in range(0, len(texts), batch)
        ]
        losses = [np.concatenate(parts) for parts in zip(*groups, strict=True)]
        for replay, of_replay in zip([EXACT, *replays], losses, strict=True):
            first, scored = (Behind.of(of_replay, losses[0], tokens) for tokens in (FIRST, SCORED))
            measured.append(Measured(prompt, replay, first, scored))
    return measured


def _losses_of_batch(
    params: Model, config: ModelConfig, tokens: Int[np.ndarray, "batch tokens"], prompt: int, replays: list[Replay]
) -> list[np.ndarray]:
    """Losses ``[batch scored]`` of the exact model, and of every replay, which holds entries of the exact one."""

    def run(replay: Replay, held: tuple[Held, ...]) -> tuple[np.ndarray, tuple[Held, ...]]:
        cuts = replay.cuts(prompt, config.sliding_window)
        losses, used = losses_behind(params, tokens, held, cuts, prompt=prompt, config=config)
        return np.asarray(losses), used

    exact, held = run(EXACT, nothing_held(jnp.asarray(tokens[:, :-1]), config))
    return [exact, *(run(replay, held)[0] for replay in replays)]


def cut_windows(documents: Sequence[Tokens], length: int, count: int) -> Int[np.ndarray, "windows length"]:
    """``count`` windows spread evenly over those that documents hold end to end, or all where there are fewer."""
    windows = [
        document[start : start + length]
        for document in documents
        for start in range(0, len(document) - length + 1, length)
    ]
    if not windows:
        raise ValueError(f"no document of {length} tokens")
    places = np.linspace(0, len(windows) - 1, min(count, len(windows))).round().astype(int)
    return np.stack([windows[place] for place in places])


def markdown(measured: Sequence[Measured], part: str) -> str:
    """A table of the ``first`` or of all ``scored`` tokens: the exact perplexity, and its change in percent."""
    prompts = list(dict.fromkeys(item.prompt for item in measured))
    lines = {"prompt, tokens": [str(prompt) for prompt in prompts], "---": ["---:"] * len(prompts)}
    for item in measured:
        behind = getattr(item, part)
        factor = math.exp(behind.change)
        change = f"{100 * (factor - 1):+.2f} ± {100 * factor * behind.error:.2f} %"
        cell = f"{behind.perplexity:.3f}" if item.replay == EXACT else change
        lines.setdefault(_label(item), []).append(cell)
    return "".join(f"| {name} | {' | '.join(cells)} |\n" for name, cells in lines.items())


def _label(item: Measured) -> str:
    """The same for replays that differ in the length of the prompt alone."""
    replay, fresh = item.replay, item.prompt - item.replay.hit
    if replay == EXACT:
        return "exact, perplexity"
    hit = f"hit of all but {fresh}" if fresh else "hit of the whole prompt"
    if replay.keep is None:
        return f"encoder: {hit}"
    return f"both: {hit}, keep {replay.keep}" if replay.hit else f"decoder: keep {replay.keep}"


def document(measured: Sequence[Measured], config: ModelConfig, windows: int, digest: str) -> dict[str, Any]:
    """The JSON form; ``digest`` is the corpus's."""
    circumstances = {"corpus": digest, "windows": windows, "sliding_window": config.sliding_window, "numerics": "f32"}
    return circumstances | {"measured": [dataclasses.asdict(item) for item in measured]}


@click.command()
@click.option(
    "--model",
    "directory",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Checkpoint directory with config.json and tokenizer.json: of the released layout, or converted.",
)
@click.option("--windows", default=64, show_default=True, help="Windows of text, each of which holds every prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def main(directory: Path, windows: int, as_json: bool) -> None:
    """Measure what bounded replay costs a model of this recipe on text that its training never saw."""
    config, params = load_model(directory, F32)
    corpus = read_corpus()
    documents = encode_documents(corpus.held_out, Tokenizer.from_directory(directory), config)
    texts = cut_windows(documents, max(PROMPTS) + SCORED, windows)
    measured = measure(params, config, texts)
    if as_json:
        click.echo(json.dumps(document(measured, config, len(texts), corpus.digest), indent=1))
        return
    for part, tokens in (("first", FIRST), ("scored", SCORED)):
        click.echo(f"The {tokens} tokens behind a prompt, {len(texts)} windows of text\n\n{markdown(measured, part)}")


if __name__ == "__main__":
    main()
