"""Incremental execution: however tokens are cut into steps, a request computes the same.

The golden checkpoint has window 16, index top-k 8, six candidate blocks of 4 and rings of 21 rows; sequences of up to
200 tokens go well past all of them. Deterministic tests compare bit for bit (numerics named per test, replay exact),
plain f32 tests compare golden prompts within 2e-4. All caches start as NaN: nothing may read what was not written.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import State, initial_state, read_rows
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.runtime.batch import Chunk, StepShape, pack
from pallas_kernels import CachedRows
from tests.checkpoints import golden_model, prompts
from tests.deepinfer_jax.runtime.states import step
from tests.golden import tensors

SLOTS = 3
BLOCK_TOKENS = 8
BLOCKS_PER_SLOT = 26
MIXED = StepShape(decode_rows=4, prefill_tiles=4, tile_rows=16)
WHOLE = StepShape(decode_rows=0, prefill_tiles=13, tile_rows=16)
LOGIT_TOLERANCE = 2e-4
CACHES = ("main", "index", "window")
CHECKPOINTS = {"released": "quant"}  # that of other numerics is "bf16"


class Runner:
    """Requests over one state: feed chunks, collect each request's logits by position."""

    def __init__(self, numerics: str, deterministic: bool, seed: int = 0, fill: float = np.nan) -> None:
        self.numerics, self.deterministic = Numerics.preset(numerics), deterministic
        self.config, self.params = golden_model(CHECKPOINTS.get(numerics, "bf16"), numerics)
        self.tables = np.random.default_rng(seed).permutation(SLOTS * BLOCKS_PER_SLOT).astype(np.int32)
        self.tables = self.tables.reshape(SLOTS, BLOCKS_PER_SLOT)
        self.state = initial_state(
            self.config,
            self.numerics,
            slots=SLOTS,
            blocks=SLOTS * BLOCKS_PER_SLOT,
            layout=PageLayout.of(self.config, BLOCK_TOKENS),
            fill=fill,
        )

    def run(self, chunks: list[Chunk], shape: StepShape = MIXED) -> list[np.ndarray]:
        """Run one step and return the logits of every chunk."""
        batch, starts, _ = pack(chunks, shape)
        self.state, logits = step(
            self.params, self.state, batch, self.tables, self.config, self.numerics, self.deterministic
        )
        rows = np.asarray(logits)
        return [rows[start : start + len(chunk.tokens)] for chunk, start in zip(chunks, starts, strict=True)]

    def request_state(self, slot: int, length: int) -> dict[str, np.ndarray]:
        """What a request of ``length`` tokens owns: its entries and index keys, and its still visible window keys."""
        layout = self.state.layout
        main, index, window = (np.asarray(cache) for cache in caches(self.state))
        owned: dict[str, np.ndarray] = {}
        for group, (ratio, offset) in enumerate(zip(layout.ratios, layout.group_offsets, strict=True)):
            entry = np.arange(length // ratio)
            per_block = BLOCK_TOKENS // ratio
            rows = self.tables[slot, entry // per_block] * layout.rows_per_block + offset + entry % per_block
            owned[f"main {group}"], owned[f"index {group}"] = main[rows], index[rows]
        positions = np.arange(max(0, length - self.config.sliding_window), length)
        owned["window"] = window[:, slot, positions % window.shape[2]]
        return owned


@jax.jit
def caches(state: State) -> tuple[Array, ...]:
    """Entries, index keys and window keys in float32, which is exact for every format."""
    return tuple(read_rows(getattr(state, name), jnp.float32).astype(jnp.float32) for name in CACHES)


@functools.cache
def alone(numerics: str, tokens: tuple[int, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Deterministic logits and state of a request that runs alone, in one step."""
    runner = Runner(numerics, deterministic=True, seed=1)
    (logits,) = runner.run([Chunk(1, 0, tokens)], WHOLE)
    return logits, runner.request_state(1, len(tokens))


def tokens_of(request: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(request).integers(3, 508, 200)[:length].tolist())


@st.composite
def schedules(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Steps as lists of (slot, token count): up to three requests of up to 200 tokens, cut at random."""
    remaining = {slot: draw(st.integers(1, 200)) for slot in range(draw(st.integers(1, SLOTS)))}
    steps = []
    while any(remaining.values()):
        chunks = []
        tiles = MIXED.prefill_tiles
        for slot, left in remaining.items():
            largest = min(left, tiles * MIXED.tile_rows)
            if largest == 0 or (len(remaining) > 1 and draw(st.integers(0, 4)) == 0):
                continue
            count = min(largest, draw(st.sampled_from([1, 1, 2, 3, 7, 15, 16, 17, 31, 40, 64])))
            tiles -= -(-count // MIXED.tile_rows) if count > 1 else 0
            remaining[slot] -= count
            chunks.append((slot, count))
        if chunks:
            steps.append(chunks)
    return steps


@pytest.mark.parametrize(
    "numerics", ["f32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("f32q", "bf16")), "released"]
)
@settings(max_examples=8)
@given(schedule=schedules(), seed=st.integers(0, 99))
def test_any_chunking_beside_any_neighbours_is_bit_equal(
    numerics: str, schedule: list[list[tuple[int, int]]], seed: int
) -> None:
    """Deterministic: logits of every position, pages and window rings equal those of the request alone in one step."""
    runner = Runner(numerics, deterministic=True, seed=seed)
    totals = {slot: sum(count for chunks in schedule for at, count in chunks if at == slot) for slot in range(SLOTS)}
    tokens = {slot: tokens_of(10 + slot, total) for slot, total in totals.items() if total}
    done = dict.fromkeys(tokens, 0)
    logits: dict[int, list[np.ndarray]] = {slot: [] for slot in tokens}
    for chunks in schedule:
        packed = [Chunk(slot, done[slot], tokens[slot][done[slot] : done[slot] + count]) for slot, count in chunks]
        for (slot, count), rows in zip(chunks, runner.run(packed), strict=True):
            logits[slot].append(rows)
            done[slot] += count
    for slot, rows in logits.items():
        want_logits, want_state = alone(numerics, tokens[slot])
        assert np.isfinite(want_logits).all()
        np.testing.assert_array_equal(np.concatenate(rows), want_logits)
        got_state = runner.request_state(slot, totals[slot])
        for name, want in want_state.items():
            np.testing.assert_array_equal(got_state[name], want, err_msg=name)
        assert all(np.isfinite(part).all() for part in want_state.values())


@settings(max_examples=6)
@given(position=st.integers(1, 150), drafted=st.integers(1, 4), seed=st.integers(0, 99))
def test_rejected_rows_leave_no_trace(position: int, drafted: int, seed: int) -> None:
    """Deterministic f32: rows run ahead and then rejected are overwritten before anything reads them (ring slack)."""
    tokens = tokens_of(5, 200)
    wrong = np.random.default_rng(seed).integers(3, 508, drafted).tolist()
    runner = Runner("f32", deterministic=True)
    for start in range(0, position, 64):
        runner.run([Chunk(0, start, tokens[start : min(position, start + 64)])])
    runner.run([Chunk(0, position, [tokens[position], *wrong])])
    want, _ = alone("f32", tokens)
    for at in range(position + 1, position + 40):
        (rows,) = runner.run([Chunk(0, at, [tokens[at]])])
        np.testing.assert_array_equal(rows[0], want[at])


@pytest.mark.parametrize("cuts", [(1,), (7, 16, 1, 3, 33), (64,)], ids=["one by one", "odd", "large"])
def test_golden_prompts_in_chunks(cuts: tuple[int, ...]) -> None:
    """Plain f32 execution, three requests of different age side by side, against golden logits."""
    golden = tensors("tiny-a/logits_f32.safetensors")
    named = [("p200", 0), ("ptext", 2), ("p3w_plus1", 5)]
    runner = Runner("f32", deterministic=False)
    done, got = dict.fromkeys(range(SLOTS), 0), {slot: [] for slot in range(SLOTS)}
    turn = 0
    while any(done[slot] < len(prompts()[name]) for slot, (name, _) in enumerate(named)):
        chunks, tiles = [], MIXED.prefill_tiles
        for slot, (name, delay) in enumerate(named):
            left = len(prompts()[name]) - done[slot]
            count = min(left, cuts[(turn + slot) % len(cuts)])
            needed = -(-count // MIXED.tile_rows) if count > 1 else 0
            if count and turn >= delay and needed <= tiles:
                tiles -= needed
                chunks.append(Chunk(slot, done[slot], prompts()[name][done[slot] : done[slot] + count]))
        for chunk, rows in zip(chunks, runner.run(chunks), strict=True):
            done[chunk.slot] += len(chunk.tokens)
            got[chunk.slot].append(rows)
        turn += 1
    for slot, (name, _) in enumerate(named):
        assert np.abs(np.concatenate(got[slot]) - golden[name]).max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("numerics", ["f32", "bf16"])
def test_a_freed_slot_and_its_pages_can_be_reused(numerics: str) -> None:
    """Deterministic: a new request in a used slot, over used pages, equals one in a fresh state."""
    runner = Runner(numerics, deterministic=True)
    runner.run([Chunk(0, 0, tokens_of(3, 60))])
    tokens = tokens_of(4, 45)
    (got,) = runner.run([Chunk(0, 0, tokens)])
    want, _ = alone(numerics, tokens)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "plain"])
def test_unwritten_packed_rows_are_never_read(deterministic: bool) -> None:
    """Numerics f32q, replay exact: NaN, zeros or large values in them give the same logits and the same state.

    NaN alone would not show a selection that ranks unwritten index keys, since a score of NaN may count as the lowest.
    """
    clean, poisoned, large = (Runner("f32q", deterministic, fill=fill) for fill in (0.0, np.nan, 0.0))
    packed = {name: getattr(large.state, name) for name in CACHES}
    packed = {name: CachedRows.pack(jnp.full(cache.shape, 2e3), cache.name) for name, cache in packed.items()}
    large.state = dataclasses.replace(large.state, **packed)
    assert all(np.isnan(values).all() for values in caches(poisoned.state))
    assert all((values > 1e3).all() for values in caches(large.state))
    chunks = [Chunk(0, 0, tokens_of(3, 37)), Chunk(2, 0, tokens_of(4, 1))]
    later = [Chunk(0, 37, tokens_of(3, 38)[37:]), Chunk(2, 1, tokens_of(4, 30)[1:])]
    want = [clean.run(chunks), clean.run(later)]
    for runner in (poisoned, large):
        for chunked, expected in zip((chunks, later), want, strict=True):
            for got, logits in zip(runner.run(chunked), expected, strict=True):
                np.testing.assert_array_equal(got, logits)
        for slot, length in ((0, 38), (2, 30)):
            for name, values in clean.request_state(slot, length).items():
                np.testing.assert_array_equal(runner.request_state(slot, length)[name], values, err_msg=name)
    assert all(np.isfinite(logits).all() for logits in (*want[0], *want[1]))


def test_image_spans_may_be_cut_anywhere() -> None:
    """Plain f32: the golden multimodal prompt in chunks that fall inside its image span."""
    golden = tensors("tiny-a/multimodal.safetensors")
    image = golden["token_types"] >= 0
    runner = Runner("f32", deterministic=False)
    got = []
    for start, stop in ((0, 10), (10, 11), (11, 18), (18, 40), (40, len(image))):
        chunk = Chunk(
            1,
            start,
            golden["input_ids"][start:stop].tolist(),
            image=image[start:stop],
            image_embeddings=golden["embeds_f32"][start:stop],
        )
        got += runner.run([chunk])
    assert np.abs(np.concatenate(got) - golden["logits_f32"]).max() <= LOGIT_TOLERANCE


def test_padding_rows_do_not_touch_the_state() -> None:
    """A step of padding alone leaves every bit of the state as it was, NaN included."""
    runner = Runner("f32", deterministic=False)
    runner.run([Chunk(0, 0, tokens_of(7, 30))])
    before = jax.tree.map(lambda leaf: np.array(leaf), dataclasses.asdict(runner.state))
    runner.run([])
    after = dataclasses.asdict(runner.state)
    for name in ("main", "index", "window", "pending", "history"):
        np.testing.assert_array_equal(before[name], np.asarray(after[name]))


def test_replay_floor_narrows_the_window() -> None:
    """A floor hides window keys below it and nothing else: at or below the natural window start it changes nothing."""
    tokens = tokens_of(8, 40)
    unfloored, _ = alone("f32", tokens)

    def with_floor(floor: int) -> np.ndarray:
        runner = Runner("f32", deterministic=True)
        runner.run([Chunk(0, 0, tokens[:39])])
        return runner.run([Chunk(0, 39, tokens[39:], floor=floor)])[0][0]

    window = golden_model("bf16", "f32")[0].sliding_window
    np.testing.assert_array_equal(with_floor(39 - window + 1), unfloored[39])
    assert np.abs(with_floor(39 - window + 2) - unfloored[39]).max() > 1e-3


@pytest.mark.parametrize("numerics", ["f32", "f32q"])
def test_step_updates_its_pools_in_place(numerics: str) -> None:
    """Plain: the compiled module aliases every state buffer from input to output and copies none of the pools."""
    runner = Runner(numerics, deterministic=False)
    batch, *_ = pack([Chunk(0, 0, tokens_of(1, 4))], MIXED)
    compiled = step.lower(
        runner.params, runner.state, batch, runner.tables, runner.config, runner.numerics, False
    ).compile()
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.state))
    assert compiled.memory_analysis().alias_size_in_bytes == state_bytes
    pools = jax.tree.leaves((runner.state.main, runner.state.index))
    shapes = {",".join(str(size) for size in pool.shape) for pool in pools}
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line]
    copies = [line for line in copies if any(f"[{shape}]" in line for shape in shapes)]
    assert not copies, copies[:2]
    assert jnp.isnan(read_rows(runner.state.main, jnp.float32)).all()
