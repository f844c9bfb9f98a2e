"""Transfers of blocks and slots: every bit arrives, nothing else changes, nothing is copied, nothing compiles late.

Numerics f32, bf16 and released (packed caches); no model runs.
"""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import State, initial_state
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import F32
from deepinfer_jax.runtime.transfer import BLOCKS_AT_ONCE, UNUSED, BlockPlanes, SlotPlanes, Transfer, batches
from tests.configurations import raw_preset
from tests.deepinfer_jax.runtime.states import assert_same_bits, bits_of, fresh_state, random_content

REPOSITORY = Path(__file__).resolve().parents[3]
SLOTS, BLOCKS, BLOCK_TOKENS = 3, 11, 8
LARGEST = np.iinfo(np.int32).max
numerics = pytest.mark.parametrize("numerics", ["f32", "bf16", "released"])


def bits_as_uint16(state: State) -> State:
    """The state as JAX before 0.11 keeps bfloat16 on CPU."""
    return jax.tree.map(
        lambda leaf: jax.lax.bitcast_convert_type(leaf, jnp.uint16) if leaf.dtype == jnp.bfloat16 else leaf, state
    )


def filled(numerics: str, seed: int = 0) -> State:
    if numerics == "bits":
        return bits_as_uint16(random_content(fresh_state("bf16", SLOTS, BLOCKS, BLOCK_TOKENS), seed))
    return random_content(fresh_state(numerics, SLOTS, BLOCKS, BLOCK_TOKENS), seed)


@functools.cache
def compiled(numerics: str) -> Transfer:
    return Transfer(filled(numerics))


def on_host(tree):
    """A copy that later donations cannot reach."""
    return jax.tree.map(lambda leaf: np.array(leaf), tree)


def as_blocks(pool):
    """The pool's planes as ``[blocks rows_per_block ...]``."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).reshape(BLOCKS, -1, *leaf.shape[1:]), pool)


@numerics
@settings(max_examples=12)
@given(
    source=st.lists(st.integers(0, BLOCKS - 1), min_size=8, max_size=8),
    target=st.lists(st.integers(0, BLOCKS - 1), min_size=8, max_size=8, unique=True),
    unused=st.lists(st.sampled_from([None, UNUSED, BLOCKS, LARGEST, -LARGEST - 1]), min_size=8, max_size=8),
    through_host=st.booleans(),
)
def test_blocks_arrive_and_nothing_else_changes(numerics, source, target, unused, through_host):
    state = filled(numerics)
    transfer = compiled(numerics)
    want = on_host((as_blocks(state.main), as_blocks(state.index)))
    planes = transfer.read_blocks(state, np.asarray(source, np.int32))
    assert_same_bits(planes, jax.tree.map(lambda leaf: leaf[np.asarray(source)], BlockPlanes(*want)))
    numbers = np.asarray([t if u is None else u for t, u in zip(target, unused, strict=True)], np.int32)
    for place, number in enumerate(numbers):
        if 0 <= number < BLOCKS:
            for leaf, content in zip(jax.tree.leaves(want), jax.tree.leaves(planes), strict=True):
                leaf[number] = np.asarray(content)[place]
    rings = on_host((state.window, state.pending, state.history))
    written = transfer.write_blocks(state, numbers, on_host(planes) if through_host else planes)
    assert_same_bits((as_blocks(written.main), as_blocks(written.index)), want)
    assert_same_bits((written.window, written.pending, written.history), rings)


@numerics
@settings(max_examples=6)
@given(
    source=st.integers(0, SLOTS - 1), target=st.sampled_from([0, 1, 2, -1, SLOTS, LARGEST]), through_host=st.booleans()
)
def test_slots_arrive_and_nothing_else_changes(numerics, source, target, through_host):
    state = filled(numerics)
    transfer = compiled(numerics)
    want = on_host(state)
    planes = transfer.read_slot(state, source)
    content = SlotPlanes(
        jax.tree.map(lambda leaf: leaf[:, source], want.window), want.pending[:, source], want.history[source]
    )
    assert_same_bits(planes, content)
    if 0 <= target < SLOTS:
        for leaf, rows in zip(jax.tree.leaves(want.window), jax.tree.leaves(content.window), strict=True):
            leaf[:, target] = rows
        want.pending[:, target], want.history[target] = content.pending, content.history
    written = transfer.write_slot(state, target, on_host(planes) if through_host else planes)
    assert_same_bits(written, want)


def test_bfloat16_bits_in_uint16_arrive_too():
    state = filled("bits")
    transfer = Transfer(state)
    want = on_host(as_blocks(state.main))
    planes = transfer.read_blocks(state, np.arange(8, dtype=np.int32))
    state = transfer.write_blocks(state, np.arange(3, 11, dtype=np.int32), planes)
    want[3:] = want[:8].copy()
    assert_same_bits(as_blocks(state.main), want)
    poisoned = transfer.poison_blocks(state, np.asarray([4, *[UNUSED] * 7], np.int32))
    values = jax.lax.bitcast_convert_type(as_blocks(poisoned.main), jnp.bfloat16)
    assert np.isnan(np.asarray(values)[4]).all()
    assert_same_bits(np.delete(as_blocks(poisoned.main), 4, 0), np.delete(want, 4, 0))


@pytest.mark.parametrize("numerics", ["f32", "bf16", "released"])
def test_poison_is_what_a_poisoned_state_begins_with(numerics):
    state = filled(numerics)
    transfer = compiled(numerics)
    kept = on_host((as_blocks(state.main), as_blocks(state.index)))
    state = transfer.poison_blocks(state, np.asarray([9, 0, *[UNUSED] * 6], np.int32))
    state = transfer.poison_slot(state, 1)
    fresh = fresh_state(numerics, SLOTS, BLOCKS, BLOCK_TOKENS)
    for got, old, new in zip(
        jax.tree.leaves((as_blocks(state.main), as_blocks(state.index))),
        jax.tree.leaves(kept),
        jax.tree.leaves((as_blocks(fresh.main), as_blocks(fresh.index))),
        strict=True,
    ):
        np.testing.assert_array_equal(bits_of(got[[0, 9]]), bits_of(new[[0, 9]]))
        np.testing.assert_array_equal(bits_of(got[[1, 10]]), bits_of(old[[1, 10]]))
    assert_same_bits(transfer.read_slot(state, 1), transfer.read_slot(fresh, 1))


@numerics
def test_no_pool_is_copied(numerics):
    """The compiled writes alias every state buffer from input to output, and copy nothing of its shape."""
    state = filled(numerics)
    shapes = {",".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(state)}
    transfer = compiled(numerics)
    for name, text in transfer.compiled_text().items():
        copies = [line for line in text.splitlines() if " copy(" in line or " copy-start(" in line]
        assert not [line for line in copies if any(f"[{shape}]" in line for shape in shapes)], name
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    for write in (transfer._write_blocks, transfer._write_slot):
        assert write.memory_analysis().alias_size_in_bytes == state_bytes
        assert write.memory_analysis().temp_size_in_bytes < state_bytes


def test_writes_donate_and_reads_do_not():
    state = filled("f32")
    transfer = compiled("f32")
    planes, slot = transfer.read_blocks(state, np.arange(8, dtype=np.int32)), transfer.read_slot(state, 0)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    after = transfer.write_slot(transfer.write_blocks(state, np.arange(8, dtype=np.int32), planes), 0, slot)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((after, planes, slot)))


def test_nothing_compiles_after_the_transfer_is_made():
    state = filled("f32")
    transfer = Transfer(state)
    numbers = np.arange(8, dtype=np.int32)
    compiles: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if "compile" in event:
            compiles.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        planes, slot = transfer.read_blocks(state, numbers), transfer.read_slot(state, 2)
        state = transfer.write_blocks(transfer.write_slot(state, 0, slot), numbers, planes)
        state = transfer.write_blocks(state, numbers, jax.tree.map(np.asarray, planes))
        state = transfer.poison_slot(transfer.poison_blocks(state, numbers), 1)
        found = list(compiles)
        jax.jit(lambda x: x * 3 + 41)(np.float32(1))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert found == []
    assert compiles != []


def test_an_abstract_state_is_enough():
    state = filled("f32")
    abstract = Transfer(jax.eval_shape(lambda: fresh_state("f32", SLOTS, BLOCKS, BLOCK_TOKENS)))
    numbers = np.asarray([3, *[UNUSED] * 7], np.int32)
    got, want = (maker.read_blocks(state, numbers) for maker in (abstract, compiled("f32")))
    assert_same_bits(jax.tree.map(lambda leaf: leaf[:1], got), jax.tree.map(lambda leaf: leaf[:1], want))
    assert got.main.shape == abstract.block_planes.main.shape


def test_a_state_without_pages():
    raw = raw_preset("peer-50m")
    raw["text_config"] |= {
        "compress_ratios": [0] * 6,
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "candidate_source_layer_id": None,
    }
    config = ModelConfig.from_dict(raw)
    state = initial_state(config, F32, slots=2, blocks=4, layout=PageLayout.of(config, 8))
    transfer = Transfer(state)
    planes = transfer.read_blocks(state, np.arange(8, dtype=np.int32))
    assert planes.main.shape[:2] == (BLOCKS_AT_ONCE, 0)
    state = transfer.write_blocks(state, np.arange(8, dtype=np.int32), planes)
    state = transfer.write_slot(state, 1, transfer.read_slot(state, 0))
    assert state.pending.shape[0] == 0


@given(st.lists(st.integers(0, 1000), max_size=40))
def test_batches_cover_all_blocks_in_order(blocks):
    parts = batches(blocks)
    assert all(part.shape == (BLOCKS_AT_ONCE,) and part.dtype == np.int32 and part.base is None for part in parts)
    flat = [number for part in parts for number in part.tolist()]
    assert flat[: len(blocks)] == blocks
    assert set(flat[len(blocks) :]) <= {UNUSED}
    assert len(flat) - len(blocks) < BLOCKS_AT_ONCE


def test_a_state_split_over_devices():
    """Four CPU devices: every bit as on one, shardings kept, no pool gathered; see the program."""
    command = [sys.executable, "-m", "tests.deepinfer_jax.runtime.sharded_transfer"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "equal"
