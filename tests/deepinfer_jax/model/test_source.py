"""Key sources alone, without a model: every stored vector names its own place, so a read that goes astray shows.

A paged source with small rings and scattered blocks, NaN wherever nothing was written, runs random schedules; after
every step each read must return what stands at the wanted positions of the wanted request. The sequence source must
agree wherever both can answer. No numerics but those of the caches: plain float32 and bfloat16, bfloat16 bits, and the
packed formats of f32q and released, in which a vector is spelled in binary. Replay exact.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import State, empty_cache, initial_state, read_rows
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.rows import Rows, sequence_rows
from deepinfer_jax.model.source import NO_TOKEN, KeySource, PagedSource, SequenceSource
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.runtime.batch import Chunk, StepShape, pack
from pallas_kernels import CachedRows, gather_rows

LAYERS, SLOTS, BLOCKS = 2, 3, 5  # blocks per slot
LAYOUT = PageLayout(block_tokens=8, ratios=(2, 1))
WINDOW_RING, PENDING_RING, HISTORY_RING = 6, 3, 5
SHAPE = StepShape(decode_rows=3, prefill_tiles=3, tile_rows=4)
PACKED = {"main": "fp4_16", "index": "fp4_32", "window": "fp8_32"}
BACK = 3  # tokens of look-back
FAR = 9  # window positions asked for before a tile; more than the ring holds
TABLES = np.random.default_rng(0).permutation(SLOTS * BLOCKS).astype(np.int32).reshape(SLOTS, BLOCKS)


every_form = pytest.mark.parametrize(
    "form", [jnp.float32, jnp.bfloat16, jnp.uint16, "packed"], ids=["float32", "bfloat16", "bits", "packed"]
)


def vectors(kind, place, slots, positions):
    """float32 ``[... 4]``: (kind, layer or group, slot, position), exact in bfloat16 too."""
    return jnp.stack(
        [jnp.full(positions.shape, kind), jnp.full(positions.shape, place), slots, positions], axis=-1
    ).astype(jnp.float32)


def ids_of(slots, positions):
    return (100 * slots + positions).astype(jnp.int32)


def spelled(values):
    """``[... 32]``: whole numbers below 256 as binary digits 0 and 6, which every packed format holds exactly."""
    digits = jnp.unpackbits(values.astype(jnp.int32).astype(jnp.uint8), axis=-1)
    return 6.0 * digits.astype(jnp.float32)


def unspelled(digits):
    """The inverse of :func:`spelled`; NaN stays NaN."""
    return digits.reshape(*digits.shape[:-1], 4, 8) / 6 @ jnp.asarray([128.0, 64, 32, 16, 8, 4, 2, 1])


def nan_state(form=jnp.float32):
    """A state of the test's own shapes in which nothing is written; ``form`` is a dtype, or "packed"."""

    def poisoned(name, *shape, dtype=form):
        if form == "packed" and name in PACKED:
            return empty_cache((*shape[:-1], 32), PACKED[name], Numerics.preset("f32q"), fill=np.nan)
        values = np.full(shape, np.nan, ml_dtypes.bfloat16 if dtype == jnp.uint16 else dtype)
        return jnp.asarray(values.view(np.uint16) if dtype == jnp.uint16 else values)

    rows = SLOTS * BLOCKS * LAYOUT.rows_per_block
    return State(
        main=poisoned("main", rows, 4),
        index=poisoned("index", rows, 4),
        window=poisoned("window", LAYERS, SLOTS, WINDOW_RING, 4),
        pending=poisoned("pending", len(LAYOUT.ratios), SLOTS, PENDING_RING, 8, dtype=jnp.float32),
        history=jnp.full((SLOTS, HISTORY_RING), -7, jnp.int32),
        layout=LAYOUT,
    )


def read_and_store(source, rows, place_of=int):
    """Everything that a layer asks of a source, in the order in which layers ask: reads before stores of a ring."""
    reads = {}
    cache = source.entries if isinstance(source, SequenceSource) else source.state.main
    packed = isinstance(cache, CachedRows)
    dtype = jnp.dtype(jnp.float32) if packed else read_rows(cache, jnp.float32).dtype

    def stamp(kind, place, positions):
        stamps = vectors(kind, place, rows.slots, positions)
        return spelled(stamps) if packed else stamps.astype(dtype)

    def read(values):
        assert values.dtype == dtype
        return unspelled(values) if packed else values

    for layer in range(LAYERS):
        keys = stamp(1, layer, rows.positions)
        for part, (_, (_, tile_rows), starts) in enumerate(rows.tile_starts()):
            wanted = rows.positions[starts][:, None] + jnp.arange(-FAR, tile_rows)[None]
            wanted = jnp.where((rows.positions[starts] >= 0)[:, None], wanted, -1)
            reads[f"window {layer} {part}"] = read(source.window_keys(place_of(layer), keys, rows, starts, wanted))
        source = source.store_window(place_of(layer), keys, rows)
    for group, ratio in enumerate(LAYOUT.ratios):
        pending = jnp.tile(vectors(2, group, rows.slots, rows.positions), (1, 2))
        reads[f"previous {group}"] = source.previous(place_of(group), pending, rows)
        source = source.store_pending(place_of(group), pending, rows)
        entry = rows.positions // ratio
        source = source.store_entries(place_of(group), ratio, stamp(3, group, entry), stamp(4, group, entry), rows)
        everyone = jnp.arange(rows.tokens.shape[0], dtype=jnp.int32)
        reads[f"index {group}"] = read(source.index_keys(place_of(group), ratio, rows, everyone, dtype))
        selection = jnp.arange(-1, LAYOUT.block_tokens * BLOCKS // ratio, dtype=jnp.int32)[::-1]
        selection = jnp.where(selection[None] < rows.visible_entries(ratio)[:, None], selection[None], -1)
        pool, indices = source.entry_rows(place_of(group), ratio, rows, selection)
        named = read(gather_rows(pool, indices, dtype))
        reads[f"entries {group}"] = selection, jnp.where((indices >= 0)[..., None], named, -1)
    ids = ids_of(rows.slots, rows.positions)
    reads["ids"] = source.previous_ids(ids, rows, BACK)
    return source.store_ids(ids, rows), reads


@jax.jit
def paged_step(state, batch, tables):
    return read_and_store(PagedSource(state, tables), batch.to_rows())


def stamped(kind, place, slot, positions):
    """What :func:`vectors` stored, in NumPy."""
    return np.array([[kind, place, slot, position] for position in positions], np.float32).reshape(-1, 4)


def check_windows(reads, rows, begin):
    """Tile by tile: the step's rows and ``WINDOW_RING`` positions before the request's first one, zeros elsewhere."""
    for layer in range(LAYERS):
        for part, (_, (tiles, tile_rows), starts) in enumerate(rows.tile_starts()):
            for tile in range(tiles):
                row = int(starts[tile])
                position = int(rows.positions[row])
                if position < 0:
                    np.testing.assert_array_equal(reads[f"window {layer} {part}"][tile], np.zeros((FAR + tile_rows, 4)))
                    continue
                slot, last = int(rows.slots[row]), int(rows.positions[rows.last_row[row]])
                wanted = np.arange(position - FAR, position + tile_rows)
                held = (wanted >= max(begin[slot] - WINDOW_RING, 0)) & (wanted <= last)
                want = np.where(held[:, None], stamped(1, layer, slot, wanted), 0)
                np.testing.assert_array_equal(reads[f"window {layer} {part}"][tile], want, f"{layer} {slot} {position}")


def check_row_reads(reads, rows):
    for row in np.flatnonzero(np.asarray(rows.valid)):
        slot, position = int(rows.slots[row]), int(rows.positions[row])
        back = [ids_of(np.int32(slot), np.int32(position - n)) if position >= n else NO_TOKEN for n in (1, 2, 3)]
        np.testing.assert_array_equal(reads["ids"][row], back)
        for group, ratio in enumerate(LAYOUT.ratios):
            if position > 0:
                want = np.tile(stamped(2, group, slot, [position - 1])[0], 2)
                np.testing.assert_array_equal(reads[f"previous {group}"][row], want, f"{group} {slot} {position}")
            visible = (position + 1) // ratio
            keys = reads[f"index {group}"][row][:visible]
            np.testing.assert_array_equal(keys, stamped(4, group, slot, range(visible)), f"{group} {slot} {position}")
            selection, entries = (np.asarray(leaf)[row] for leaf in reads[f"entries {group}"])
            want = np.where(selection[:, None] >= 0, stamped(3, group, slot, selection), -1)
            np.testing.assert_array_equal(entries, want, f"{group} {slot} {position}")


def random_schedule(seed):
    """Steps as lists of (slot, start, count): three requests that grow to 40 tokens, each at its own pace."""
    random, done = np.random.default_rng(seed), [0] * SLOTS
    while min(done) < 40:
        chunks, tiles = [], SHAPE.prefill_tiles
        for slot in random.permutation(SLOTS):
            count = min(int(random.choice([0, 1, 1, 2, 3, 4, 5, 8, 12])), 40 - done[slot])
            needed = -(-count // SHAPE.tile_rows) if count > 1 else 0
            if count and needed <= tiles:
                tiles -= needed
                chunks.append((int(slot), done[slot], count))
                done[slot] += count
        yield chunks


def run(state, chunks, tables=TABLES):
    batch, *_ = pack([Chunk(slot, start, [1] * count) for slot, start, count in chunks], SHAPE)
    source, reads = paged_step(state, batch, tables)
    return source.state, jax.tree.map(np.asarray, reads), batch.to_rows()


@pytest.mark.parametrize("seed", range(4))
@every_form
def test_reads_return_what_stands_at_the_wanted_place(seed, form):
    """Random steps of three requests: window, pending, entries, index keys and look-back of the right token each."""
    state = nan_state(form)
    for chunks in random_schedule(seed):
        state, reads, rows = run(state, chunks)
        check_windows(reads, rows, {slot: start for slot, start, _ in chunks})
        check_row_reads(reads, rows)


@pytest.mark.parametrize(
    "cuts", [[1] * 20, [3] * 7, [12, 12], [12, 1, 1, 5]], ids=["one by one", "odd", "longest", "mixed"]
)
def test_every_boundary_between_steps(cuts):
    """One request; odd boundaries split the pairs of ratio 2, and a step of 12 rows is longer than every ring."""
    state, done = nan_state(), 0
    for count in cuts:
        state, reads, rows = run(state, [(1, done, count)])
        check_windows(reads, rows, {1: done})
        check_row_reads(reads, rows)
        done += count


def test_rows_that_ran_ahead_are_overwritten_before_they_are_read():
    """Rows 13 and 14 were drafts and are rejected: what they stored, made recognisable here, must not come back."""
    state, _, _ = run(nan_state(), [(0, 0, 12)])
    state, _, _ = run(state, [(0, 12, 3)])
    state = jax.tree.map(lambda leaf: jnp.where((leaf == 13) | (leaf == 14), 99, leaf), state)
    assert any(bool((leaf == 99).any()) for leaf in jax.tree.leaves(state))
    for position in (13, 14, 15):
        state, reads, rows = run(state, [(0, position, 1)])
        check_row_reads(reads, rows)
        window = reads["window 0 0"][0]
        np.testing.assert_array_equal(window[-4:], stamped(1, 0, 0, range(position - 3, position + 1)))


@pytest.mark.parametrize("form", [jnp.float32, "packed"], ids=["float32", "packed"])
@pytest.mark.parametrize("chunks", [[], [(1, 9, 1)], [(1, 8, 5)]], ids=["padding alone", "decode", "prefill"])
def test_a_step_writes_the_places_of_its_rows_and_no_other(chunks, form):
    """Padding rows have slot 0 and position -1: neither slot 0 nor its last block, nor block 0, may notice them."""
    before = nan_state(form)
    after, _, _ = run(before, chunks)
    for name in ("main", "index", "window", "pending", "history"):
        old, new = (values_of(getattr(state, name)) for state in (before, after))
        changed = ~((old == new) | (np.isnan(old) & np.isnan(new)))
        places = {tuple(int(n) for n in place[:-1]) for place in np.argwhere(changed)}
        if name == "history":
            places = {tuple(int(n) for n in place) for place in np.argwhere(changed)}
        assert places == expected_places(name, chunks), name


@pytest.mark.parametrize("form", [jnp.float32, "packed"], ids=["float32", "packed"])
@pytest.mark.parametrize("held", [1, 6, 7, 20])
def test_entries_of_held_tokens_are_not_rewritten(form, held):
    """Rows 3 .. 13: entries completed below ``held`` stay NaN, rings take all rows; 7 stands inside a pair of ratio 2.

    Plain and packed caches; replay of a prefix hit.
    """
    batch, *_ = pack([Chunk(1, 3, [1] * 11, held=held)], SHAPE)
    after = paged_step(nan_state(form), batch, TABLES)[0].state
    for name in ("main", "index"):
        written = {(int(row),) for row in np.flatnonzero(~np.isnan(values_of(getattr(after, name))).any(axis=1))}
        start = max(held, 3)
        assert written == expected_places(name, [(1, start, max(0, 14 - start))]), name
    for name in ("window", "pending"):
        ring = getattr(after, name).shape[2]
        places = np.argwhere(~np.isnan(values_of(getattr(after, name))).any(axis=-1))
        assert {tuple(int(n) for n in place) for place in places} == expected_places(name, [(1, 14 - ring, ring)]), name


def values_of(cache):
    return np.asarray(cache.values(jnp.float32) if isinstance(cache, CachedRows) else cache)


def expected_places(name, chunks):
    places = set()
    for slot, start, count in chunks:
        positions = range(start, start + count)
        rings = {"window": (LAYERS, WINDOW_RING), "pending": (len(LAYOUT.ratios), PENDING_RING)}
        if name in rings:
            layers, ring = rings[name]
            places |= {(layer, slot, at % ring) for layer in range(layers) for at in positions}
        elif name == "history":
            places |= {(slot, at % HISTORY_RING) for at in positions}
        else:
            for ratio, offset in zip(LAYOUT.ratios, LAYOUT.group_offsets, strict=True):
                per_block = LAYOUT.block_tokens // ratio
                entries = [at // ratio for at in positions if (at + 1) % ratio == 0]
                blocks = [int(TABLES[slot, entry // per_block]) for entry in entries]
                rows = zip(blocks, entries, strict=True)
                places |= {(block * LAYOUT.rows_per_block + offset + entry % per_block,) for block, entry in rows}
    return places


def test_layer_and_group_numbers_may_be_traced():
    """Inside a scan over stacked layers they are arrays; nothing else changes."""
    batch, *_ = pack([Chunk(0, 0, [1] * 7), Chunk(2, 0, [1])], SHAPE)
    plain, reads = paged_step(nan_state(), batch, TABLES)

    @jax.jit
    def traced(state, numbers):
        return read_and_store(PagedSource(state, jnp.asarray(TABLES)), batch.to_rows(), lambda number: numbers[number])

    source, traced_reads = traced(nan_state(), jnp.arange(LAYERS, dtype=jnp.int32))
    pairs = zip(jax.tree.leaves((plain, reads)), jax.tree.leaves((source, traced_reads)), strict=True)
    for left, right in pairs:
        np.testing.assert_array_equal(left, right)


def test_both_sources_answer_alike():
    """Two sequences from their start: stateless, and paged in one step."""
    lengths = (11, 7)
    rows = sequence_rows(jnp.zeros((2, 12), jnp.int32), 4)
    sequence = jnp.arange(24) // 12
    kept = jnp.arange(24) % 12 < jnp.asarray(lengths)[sequence]
    rows = Rows.of(rows.tokens, rows.slots, jnp.where(kept, rows.positions, -1), rows.tiles)
    stateless = SequenceSource.empty(24, 12, 4, 4, jnp.dtype(jnp.float32))
    answers = [
        jax.tree.map(np.asarray, jax.jit(read_and_store)(source, rows)[1])
        for source in (stateless, PagedSource(nan_state(), jnp.asarray(TABLES)))
    ]
    begin = {0: 0, 1: 0}
    for reads in answers:
        check_windows(reads, rows, begin)
        for group in range(len(LAYOUT.ratios)):
            reads[f"index {group}"] = reads[f"index {group}"][:, : 12 // LAYOUT.ratios[group]]
        check_row_reads(reads, rows)


def test_an_empty_source_holds_zeros_of_the_asked_shapes():
    source = SequenceSource.empty(5, 4, 3, 2, jnp.dtype(jnp.bfloat16))
    assert (source.entries.shape, source.keys.shape, source.length) == ((5, 3), (5, 2), 4)
    assert source.entries.dtype == source.keys.dtype == jnp.bfloat16
    assert not source.entries.any()


def test_sources_follow_the_protocol():
    assert isinstance(SequenceSource.empty(1, 1, 1, 1, jnp.dtype(jnp.float32)), KeySource)
    assert isinstance(PagedSource(nan_state(), jnp.asarray(TABLES)), KeySource)


@every_form
def test_stored_arrays_keep_their_dtypes(form):
    before = nan_state(form)
    after, _, _ = run(before, [(0, 0, 2)])
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(lambda leaf: leaf.dtype, before)


@pytest.mark.parametrize(
    ("max_drafts", "window", "pending", "history"), [(None, 134, 7, 9), (0, 129, 2, 4), (2, 131, 4, 6)]
)
def test_released_ring_lengths(max_drafts, window, pending, history):
    """Window, pair and look-back of 3, each longer by max_drafts + 1 rows, so that rejected rows overwrite nothing."""
    config = ModelConfig.preset("v4.1-flash")
    state = jax.eval_shape(
        lambda: initial_state(
            config, Numerics.preset("bf16"), slots=2, blocks=3, layout=PageLayout.of(config), max_drafts=max_drafts
        )
    )
    assert state.window.shape == (43, 2, window, 512)
    assert state.pending.shape == (4, 2, pending, 1024)
    assert state.history.shape == (2, history)
    assert state.main.shape == (3 * 320, 512)
    assert state.index.shape == (3 * 320, 128)
    assert state.blocks == 3


def test_rings_of_a_small_model_outlive_their_readers():
    """After a step of 1 + max_drafts rows of which one counts, every row the next step reads is still there."""
    config = dataclasses.replace(ModelConfig.preset("mini-40"), draft=None)
    for max_drafts in (0, 1, 4):
        state = initial_state(
            config, Numerics.preset("f32"), slots=1, blocks=1, layout=PageLayout.of(config), max_drafts=max_drafts
        )
        newest, next_row = max_drafts, 1
        assert newest - state.window.shape[2] < next_row - (config.sliding_window - 1)
        assert newest - state.pending.shape[2] < next_row - 1
        assert newest - state.history.shape[1] < next_row - (config.engram.max_ngram_size - 1)


@every_form
def test_entries_that_are_not_finite_are_found_at_the_row_that_put_them_there(form):
    """Two requests; of the second the first three tokens are held. All entries are sound but one at a time."""
    rows = pack([Chunk(0, 0, [0] * 7), Chunk(2, 3, [0])], SHAPE).batch.to_rows()
    rows = dataclasses.replace(rows, held=jnp.where(rows.slots == 2, 3, 0))
    chunk, single = SHAPE.decode_rows, 0
    clean, tables = jax.tree.map(jnp.zeros_like, nan_state(form)), jnp.asarray(TABLES)
    finite = jax.jit(lambda state: PagedSource(state, tables).finite_entries(rows))
    assert np.asarray(finite(clean)).all()
    seen = {chunk + position: [] for position in range(7)} | {single: []}
    for pool in ("main", "index"):
        for number in range(SLOTS * BLOCKS * LAYOUT.rows_per_block):
            poisoned = jax.tree.map(
                lambda plane, bad, number=number: plane.at[number, -1].set(bad[number, -1]),
                getattr(clean, pool),
                getattr(nan_state(form), pool),
            )
            for row in np.flatnonzero(~np.asarray(finite(dataclasses.replace(clean, **{pool: poisoned})))):
                seen[int(row)].append((pool, number))

    def place(slot, group, entry):
        per_block = LAYOUT.block_tokens // LAYOUT.ratios[group]
        block = TABLES[slot, entry // per_block]
        return int(block * LAYOUT.rows_per_block + LAYOUT.group_offsets[group] + entry % per_block)

    wanted = {chunk + position: [place(0, 1, position)] for position in range(7)} | {single: [place(2, 1, 3)]}
    for position in (1, 3, 5):
        wanted[chunk + position].append(place(0, 0, position // 2))
    wanted[single].append(place(2, 0, 1))
    for row, numbers in wanted.items():
        assert sorted(seen[row]) == sorted((pool, number) for pool in ("main", "index") for number in numbers)
