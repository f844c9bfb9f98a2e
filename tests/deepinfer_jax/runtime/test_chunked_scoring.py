"""Steps whose index scores are computed in chunks, because block tables are wider than one: the same as ever.

Chunks are of 16 entries here, so that the golden prompts of up to 200 tokens have many. Replay exact. All caches start
as NaN.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from deepinfer_jax.cache.state import State
from deepinfer_jax.model.source import PagedSource
from deepinfer_jax.model.transformer import Model, forward
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.runtime.batch import Batch, Chunk, StepShape, pack
from tests.checkpoints import golden_model, prompts
from tests.deepinfer_jax.runtime.states import fresh_state, step
from tests.golden import tensors

SLOTS, BLOCK_TOKENS, BLOCKS_PER_SLOT = 3, 8, 26
MIXED = StepShape(decode_rows=4, prefill_tiles=4, tile_rows=16)
CHUNK = 16
LOGIT_TOLERANCE = 2e-4
TABLES = np.random.default_rng(0).permutation(SLOTS * BLOCKS_PER_SLOT).astype(np.int32).reshape(SLOTS, BLOCKS_PER_SLOT)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode rows go through three lanes, tiles of 16 rows through one."""
    module = importlib.import_module("pallas_kernels.paged_index_selection")
    monkeypatch.setattr(module, "CHUNK_ENTRIES", CHUNK)
    monkeypatch.setattr(module, "LANE_ROWS", 3)


class Runner:
    """Requests over one state of the golden model."""

    def __init__(self, numerics: str = "f32", form: str = "unrolled", *, deterministic: bool = False) -> None:
        self.numerics, self.deterministic = Numerics.preset(numerics), deterministic
        self.config, params = golden_model("quant" if numerics == "released" else "bf16", numerics)
        self.params = getattr(params, form)(self.config)
        self.state = fresh_state(numerics, SLOTS, SLOTS * BLOCKS_PER_SLOT, BLOCK_TOKENS)

    def arguments(self, chunks: list[Chunk]) -> tuple:
        batch, *_ = pack(chunks, MIXED)
        return self.params, self.state, batch, TABLES, self.config, self.numerics, self.deterministic

    def run(self, chunks: list[Chunk]) -> list[np.ndarray]:
        """Run one step and return the logits of every chunk."""
        starts = pack(chunks, MIXED).starts
        self.state, logits = step(*self.arguments(chunks))
        rows = np.asarray(logits)
        return [rows[start : start + len(chunk.tokens)] for chunk, start in zip(chunks, starts, strict=True)]


def in_turns(runner: Runner, named: list[tuple[str, int]], cuts: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Logits of golden prompts, each of which begins after some turns and goes on by the cuts, again and again."""
    done, got = dict.fromkeys(range(len(named)), 0), {name: [] for name, _ in named}
    turn = 0
    while any(done[slot] < len(prompts()[name]) for slot, (name, _) in enumerate(named)):
        chunks, tiles = [], MIXED.prefill_tiles
        for slot, (name, delay) in enumerate(named):
            tokens = prompts()[name]
            count = min(len(tokens) - done[slot], cuts[(turn + slot) % len(cuts)])
            needed = -(-count // MIXED.tile_rows) if count > 1 else 0
            if count and turn >= delay and needed <= tiles:
                tiles -= needed
                chunks.append(Chunk(slot, done[slot], tokens[done[slot] : done[slot] + count]))
        for chunk, rows in zip(chunks, runner.run(chunks), strict=True):
            done[chunk.slot] += len(chunk.tokens)
            got[named[chunk.slot][0]].append(rows)
        turn += 1
    return {name: np.concatenate(rows) for name, rows in got.items()}


@pytest.mark.parametrize("form", ["unrolled", pytest.param("stacked", marks=pytest.mark.slow)])
def test_golden_logits(form: str) -> None:
    """Plain f32: a long request, a middling and a short one, in steps with decode rows, with tiles, and with both."""
    golden = tensors("tiny-a/logits_f32.safetensors")
    got = in_turns(Runner(form=form), [("p200", 0), ("ptext", 2), ("p3w_plus1", 5)], (7, 16, 1, 33, 1, 1))
    for name, logits in got.items():
        assert np.abs(logits - golden[name]).max() <= LOGIT_TOLERANCE, name


@pytest.mark.parametrize("numerics", ["f32", pytest.param("released", marks=pytest.mark.slow)])
def test_neighbours_change_no_bit(numerics: str) -> None:
    """Deterministic: which lanes a context goes through depends on its neighbours, what comes out does not."""
    alone = in_turns(Runner(numerics, deterministic=True), [("p200", 0)], (64,))
    beside = in_turns(Runner(numerics, deterministic=True), [("ptext", 3), ("p200", 0), ("p3w_plus1", 1)], (5, 64, 1))
    assert np.isfinite(alone["p200"]).all()
    np.testing.assert_array_equal(beside["p200"], alone["p200"])


@pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "deterministic"])
def test_a_step_holds_no_whole_context_and_copies_no_pool(deterministic: bool) -> None:
    """The taps' scores of all entries are not computed where nobody reads them, and loops read the pool in place."""
    runner = Runner(deterministic=deterministic)
    compiled = step.lower(*runner.arguments([Chunk(0, 0, prompts()["p200"][:4])])).compile()
    lines = compiled.as_text().splitlines()
    for ratio in (1, 2):
        entries = BLOCKS_PER_SLOT * BLOCK_TOKENS // ratio
        assert not [line for line in lines if f",{entries},{runner.config.index_head_dim}]" in line]
    assert [line for line in lines if f",{CHUNK},{runner.config.index_head_dim}]" in line]
    pools = [f"[{','.join(map(str, pool.shape))}]" for pool in (runner.state.main, runner.state.index)]
    assert not [line for line in lines if " copy(" in line and any(pool in line for pool in pools)]


def test_taps_hold_the_scores_of_all_entries() -> None:
    """Whoever reads them gets one column per entry, and the selections are the best of each row."""

    @jax.jit
    def tapped(params: Model, state: State, batch: Batch) -> dict[str, Array]:
        source = PagedSource(state, jnp.asarray(TABLES))
        return forward(params, batch.to_rows(), source, runner.config, runner.numerics).taps

    runner = Runner()
    tokens = prompts()["p200"]
    for start in range(0, 128, 64):
        runner.run([Chunk(1, start, tokens[start : start + 64])])
    batch, starts, _ = pack([Chunk(1, 128, tokens[128:180]), Chunk(0, 0, tokens[:1])], MIXED)
    taps = jax.tree.map(np.asarray, tapped(runner.params, runner.state, batch))
    layer = runner.config.candidates.source_layer_id
    scores, picks = taps[f"layers.{layer}.index_score"], taps[f"layers.{layer}.topk_compressed"]
    assert scores.shape == (MIXED.rows, BLOCKS_PER_SLOT * BLOCK_TOKENS)
    for row, position in enumerate(range(128, 180), starts[0]):
        best = np.argsort(-scores[row, : position + 1], kind="stable")[: runner.config.index_topk]
        np.testing.assert_array_equal(picks[row], np.sort(best))
