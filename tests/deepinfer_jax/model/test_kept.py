"""Decoder layers on kept rows alone: decoder-side replay, model specification 17.2.

The golden checkpoint has window 16, six encoder and five decoder layers. A request runs in three ways: "off", all rows
through all layers; "mask", the same with windows of the decoder layers cut at the decoder floor; "compact", rows from
the floor on alone. Numerics f32, not deterministic, encoder-side replay exact, unless a test says otherwise. All caches
start as NaN: nothing may read what was not written.
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import State, initial_state, read_rows
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.rows import Kept
from deepinfer_jax.model.source import PagedSource
from deepinfer_jax.model.transformer import Model, forward, logits
from deepinfer_jax.numerics import F32, Numerics
from deepinfer_jax.runtime.advance import advance
from deepinfer_jax.runtime.batch import Batch, Chunk, StepShape, kept_tokens, pack
from deepinfer_jax.runtime.step import row_logits
from tests.checkpoints import golden_model, prompts
from tests.golden import document, tensors

SLOTS, BLOCK_TOKENS, BLOCKS_PER_SLOT = 2, 8, 20
ALL = StepShape(decode_rows=2, prefill_tiles=4, tile_rows=16)
SHAPES = {"off": ALL, "mask": ALL, "compact": dataclasses.replace(ALL, kept_tiles=2)}
LOGIT_TOLERANCE, ROUNDING = 2e-4, 1e-5
NEIGHBOUR = "p200"  # golden prompt of the second request
CASES = document("replay/replay_tiny_a.json")["cases"]


class Ran(NamedTuple):
    """What a step gives for the kept rows of one chunk."""

    hidden: np.ndarray
    logits: np.ndarray
    draft_taps: np.ndarray


@jax.jit
def step(params: Model, state: State, batch: Batch, tables: Array) -> tuple[State, Array, Array, Array]:
    config, rows = golden_model("quant", "f32")[0], batch.to_rows()
    output = forward(params, rows, PagedSource(state, tables), config, F32, kept=batch.to_kept(rows))
    assert isinstance(output.source, PagedSource)
    return output.source.state, output.hidden, logits(params, output.hidden), output.draft_taps


@functools.partial(jax.jit, static_argnames=("config", "numerics"))
def deterministic_step(
    params: Model, state: State, batch: Batch, tables: Array, *, config: ModelConfig, numerics: Numerics
) -> tuple[State, Array, Array, Array]:
    rows = batch.to_rows()
    kept = batch.to_kept(rows)
    done = advance(params, state, rows, tables, config, numerics, kept=kept, deterministic=True)
    return done.state, done.hidden, row_logits(params, done.hidden, deterministic=True), done.draft_taps


class Runner:
    """Two requests over one state of their own; ``replay`` is "off", "mask" or "compact"."""

    def __init__(self, replay: str, form: str = "unrolled", deterministic: str = "") -> None:
        """``deterministic`` names the numerics of deterministic execution."""
        numerics = Numerics.preset(deterministic or "f32")
        self.config, params = golden_model("quant", numerics.name)
        self.params = getattr(params, form)(self.config)
        self.replay, self.step = replay, step
        if deterministic:
            self.step = functools.partial(deterministic_step, config=self.config, numerics=numerics)
        tables = np.random.default_rng(0).permutation(SLOTS * BLOCKS_PER_SLOT).astype(np.int32)
        self.tables = jnp.asarray(tables.reshape(SLOTS, BLOCKS_PER_SLOT))
        layout = PageLayout.of(self.config, BLOCK_TOKENS)
        sizes = {"slots": SLOTS, "blocks": tables.size, "layout": layout}
        self.fresh = functools.partial(initial_state, self.config, numerics, **sizes, fill=np.nan)
        self.state = self.fresh()

    def run(self, *chunks: Chunk) -> list[Ran]:
        """Run a step; the last rows of each chunk, as many as its decoder floor keeps, in whatever way they ran."""
        batch, _, ends = pack(chunks, SHAPES[self.replay], narrowed=self.replay != "off")
        self.state, *outputs = self.step(self.params, self.state, batch, self.tables)
        hidden, scores, taps = (np.asarray(output) for output in outputs)
        kept = [slice(end + 1 - kept_tokens(chunk), end + 1) for chunk, end in zip(chunks, ends, strict=True)]
        return [Ran(hidden[rows], scores[rows], taps[:, rows]) for rows in kept]

    def prefill(self, tokens: list[int], keep: int, cuts: tuple[int, ...] = (), hit: int = 0) -> Ran:
        """Run a prompt in slot 0, cut before the given positions; its kept rows. Beside it slot 1 decodes.

        With a ``hit`` computing begins one window before it, and the pages of the hit stay as they are.
        """
        floor, neighbour = max(0, hit - self.config.sliding_window), prompts()[NEIGHBOUR]
        bounds, parts = (floor, *cuts, len(tokens)), []
        for turn, (start, stop) in enumerate(itertools.pairwise(bounds)):
            fields = {"floor": floor, "held": hit, "decoder_floor": max(floor, len(tokens) - keep)}
            part, _ = self.run(Chunk(0, start, tokens[start:stop], **fields), Chunk(1, turn, [neighbour[turn]]))
            parts.append(part)
        hidden, scores, taps = zip(*parts, strict=True)
        return Ran(np.concatenate(hidden), np.concatenate(scores), np.concatenate(taps, axis=1))

    def forget(self, tokens: list[int], hit: int) -> None:
        """Leave what a prefix hit leaves: pages. The look-back of slot 0 is that of the true tokens before the hit."""
        fresh, ring = self.fresh(), self.state.history.shape[1]
        start = max(0, hit - self.config.sliding_window)
        positions = np.arange(max(0, start - ring), start)
        ids = self.params.token_map[jnp.asarray([tokens[position] for position in positions], jnp.int32)]
        history = fresh.history.at[0, positions % ring].set(ids)
        self.state = dataclasses.replace(fresh, main=self.state.main, index=self.state.index, history=history)

    def ring(self, slot: int, layers: slice, positions: np.ndarray) -> np.ndarray:
        """Per layer and position, what the window ring holds at its place."""
        window = np.asarray(read_rows(self.state.window, jnp.float32))
        return window[layers, slot][:, positions % window.shape[2]]

    def written(self, slot: int, layers: slice, positions: np.ndarray) -> np.ndarray:
        """Per layer and position, whether the window ring holds anything at its place."""
        return ~np.isnan(self.ring(slot, layers, positions)).any(axis=-1)


def bits(cache) -> np.ndarray:
    return np.concatenate([np.ascontiguousarray(leaf).view(np.uint8).reshape(-1) for leaf in jax.tree.leaves(cache)])


def assert_close(got, want, tolerance=ROUNDING) -> None:
    """Leaf by leaf; NaN stands where NaN does."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=0)


def assert_same_but_decoder_rings(got: Runner, want: Runner) -> None:
    """Pages, pending rings, look-back and rings of encoder layers have the same bits."""
    encoder = got.config.encoder_layers
    for name in ("main", "index", "pending", "history"):
        np.testing.assert_array_equal(bits(getattr(got.state, name)), bits(getattr(want.state, name)), name)
    np.testing.assert_array_equal(bits(got.state.window[:encoder]), bits(want.state.window[:encoder]))


def distance(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max())


@pytest.mark.parametrize(("replay", "form"), [("mask", "unrolled"), ("compact", "unrolled"), ("compact", "stacked")])
def test_all_rows_kept_are_the_whole_pass(replay, form):
    """Logits, draft inputs and all of the state, over steps that cut a pair of ratio 2 and begin inside a window."""
    tokens = prompts()["p3w_plus1"]
    whole, kept = Runner("off", form), Runner(replay, form)
    want, got = (runner.prefill(tokens, len(tokens), cuts=(25,)) for runner in (whole, kept))
    assert_close(got, want)
    assert_close(kept.state, whole.state)


@pytest.mark.parametrize("keep", [16, 18, 23, 32])
@pytest.mark.parametrize("cuts", [(), (16, 40)], ids=["at once", "in chunks"])
def test_kept_rows_alone_are_what_they_are_among_masked_ones(keep, cuts):
    """Pages and rings of decoder layers too. The first chunk of 16 lies below every floor.

    The tokens have clear selections at keep 23.
    """
    tokens = tensors("replay/replay_tiny_a.npz")["cold_keep23_n50.tokens"][:50].tolist()
    mask, compact = Runner("mask"), Runner("compact")
    want, got = (runner.prefill(tokens, keep, cuts) for runner in (mask, compact))
    assert got.hidden.shape == (keep, compact.config.hidden_size)
    assert_close(got, want)
    assert_same_but_decoder_rings(compact, mask)
    kept = np.arange(len(tokens) - min(keep, compact.state.window.shape[2]), len(tokens))
    decoder = slice(compact.config.encoder_layers, compact.config.num_hidden_layers)
    got_rings, want_rings = (runner.ring(0, decoder, kept) for runner in (compact, mask))
    assert np.isfinite(want_rings).all()
    assert_close(got_rings, want_rings)


def test_kept_rows_in_their_own_places_are_bit_equal_to_masked_ones():
    """The floor begins a tile, so that tiles of all rows and tiles of kept rows are the same ones."""
    tokens = prompts()["p200"][:64]
    floor = 32
    config, params = golden_model("quant", "f32")
    runner = Runner("off")
    batch, *_ = pack([Chunk(0, 0, tokens)], StepShape(0, 4, 16))

    @jax.jit
    def run(index: Array) -> Array:
        rows = batch.to_rows()
        kept = Kept.of(rows, index, jnp.full_like(rows.floors, floor), rows.tiles)
        return forward(params, rows, PagedSource(runner.state, runner.tables), config, F32, kept=kept).hidden

    numbers = jnp.arange(len(tokens), dtype=jnp.int32)
    mask, compact = run(numbers), run(jnp.where(numbers < floor, -1, numbers))
    np.testing.assert_array_equal(compact[floor:], mask[floor:])


@pytest.mark.slow
def test_deterministic_kept_rows_are_bit_equal_to_masked_ones():
    """Numerics f32q, deterministic; other chunks too. Hidden states, logits, draft inputs, pages and all rings."""
    tokens = prompts()["p200"][:53]
    mask, compact = (Runner(replay, deterministic="f32q") for replay in ("mask", "compact"))
    want, got = mask.prefill(tokens, 21, cuts=(13,)), compact.prefill(tokens, 21, cuts=(27,))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all()
    assert_same_but_decoder_rings(compact, mask)
    later = slice(compact.config.encoder_layers, None)  # decoder layers and draft stages
    got_rings, want_rings = (runner.ring(0, later, np.arange(32, 53)) for runner in (compact, mask))
    assert np.isfinite(want_rings).all()
    np.testing.assert_array_equal(got_rings, want_rings)


def assert_follow(runner: Runner, case, last: np.ndarray) -> None:
    """The last row of the prompt is golden, and the tokens decoded behind it, which no floor concerns any more."""
    golden = tensors("replay/replay_tiny_a.npz")
    tokens = golden[f"{case['name']}.tokens"].tolist()
    assert distance(last, golden[f"{case['name']}.last"]) <= LOGIT_TOLERANCE
    for place, want in enumerate(golden[f"{case['name']}.follow"], case["prompt_len"]):
        (ran,) = runner.run(Chunk(0, place, tokens[place : place + 1]))
        assert distance(ran.logits[0], want) <= LOGIT_TOLERANCE, place


@pytest.mark.parametrize("form", ["unrolled", "stacked"])
@pytest.mark.parametrize("cuts", [(), (30,), (20, 33)], ids=["at once", "above the floor", "below the floor"])
def test_logits_behind_a_cold_prompt_are_the_golden_ones(cuts, form):
    """Compact, of 23 rows of 50."""
    case = next(case for case in CASES if not case["hits"])
    tokens = tensors("replay/replay_tiny_a.npz")[f"{case['name']}.tokens"].tolist()
    runner = Runner("compact", form)
    last = runner.prefill(tokens[: case["prompt_len"]], case["keep"], cuts).logits[-1]
    assert_follow(runner, case, last)


@pytest.mark.parametrize("case", [case for case in CASES if case["hits"]], ids=lambda case: case["name"])
def test_logits_behind_a_prefix_hit_are_the_golden_ones(case):
    """Compact, behind bounded encoder-side replay of one or more turns, each of which begins without a window."""
    tokens = tensors("replay/replay_tiny_a.npz")[f"{case['name']}.tokens"].tolist()
    runner, hits = Runner("compact"), case["hits"]
    lengths = [*hits, case["prompt_len"]]
    for hit, length in zip([0, *hits], lengths, strict=True):
        runner.forget(tokens, hit)
        start = max(0, hit - runner.config.sliding_window)
        keep = case["keep"] if length == lengths[-1] and case["keep"] else length
        last = runner.prefill(tokens[:length], keep, tuple(range(start + 32, length, 32)), hit).logits[-1]
    assert_follow(runner, case, last)


def test_a_long_enough_keep_is_exact_and_a_window_is_not():
    """Compact against golden logits of the exact model: W + (decoder layers - 1) (W - 1) rows, and W rows."""
    tokens, length = prompts()["p200"], 120
    golden = tensors("tiny-a/logits_f32.safetensors")["p200"]
    config, _ = golden_model("quant", "f32")
    window, decoder = config.sliding_window, config.num_hidden_layers - config.encoder_layers
    enough = window + (decoder - 1) * (window - 1)
    exact, short = Runner("compact"), Runner("compact")
    floor = length - enough
    got = exact.prefill(tokens[:length], enough, cuts=(floor, floor + 32, floor + 64)).logits
    assert got.shape == (enough, config.vocab_size)
    assert distance(got[-1], golden[length - 1]) <= LOGIT_TOLERANCE
    assert distance(got[0], golden[floor]) > 0.01
    differs = short.prefill(tokens[:length], window, cuts=(64,)).logits[-1]
    assert distance(differs, golden[length - 1]) > 0.01
    for place in range(length, length + 4):
        (ran,) = exact.run(Chunk(0, place, [tokens[place]]))
        assert distance(ran.logits[0], golden[place]) <= LOGIT_TOLERANCE


@pytest.mark.parametrize("cuts", [(), (16,), (16, 40)], ids=["at once", "below and across", "three chunks"])
def test_rings_of_decoder_layers_hold_kept_rows_alone(cuts):
    """Compact; rings are longer than the kept rows, so that places of earlier rows stay as they were."""
    tokens, keep = prompts()["p3w_plus1"], 16
    runner = Runner("compact")
    runner.prefill(tokens, keep, cuts)
    ring = runner.state.window.shape[2]
    assert ring > keep
    positions = np.arange(len(tokens) - ring, len(tokens))
    encoder = runner.config.encoder_layers
    assert runner.written(0, slice(encoder), positions).all()
    decoder = runner.written(0, slice(encoder, runner.config.num_hidden_layers), positions)
    np.testing.assert_array_equal(decoder, np.broadcast_to(positions >= len(tokens) - keep, decoder.shape))
    neighbour = runner.written(1, slice(runner.config.num_hidden_layers), np.arange(ring))
    np.testing.assert_array_equal(neighbour, np.broadcast_to(np.arange(ring) <= len(cuts), neighbour.shape))


@pytest.mark.parametrize("replay", ["mask", "compact"])
def test_no_page_depends_on_a_decoder_row(replay):
    """Everything but the rings of decoder layers is that of the exact pass, bit for bit."""
    tokens = prompts()["p3w_plus1"]
    exact, replayed = Runner("off"), Runner(replay)
    for runner in (exact, replayed):
        runner.prefill(tokens, 16, cuts=(23,))
    assert_same_but_decoder_rings(replayed, exact)
