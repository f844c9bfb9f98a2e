"""States that are opened while they arrive: whatever comes when, the result is that of opening them at once."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from deepinfer_jax.arrival import Receiver
from deepinfer_jax.errors import SnapshotError
from serving.early_opening import EarlyOpening
from tests.serving.held_states import FORM, RINGS, random_state

RECEIVER = Receiver(FORM, RINGS, None)


def assert_same(arrival, other):
    assert arrival.meta == other.meta
    for found, wanted in zip(
        jax.tree.leaves((arrival.blocks, arrival.slot)), jax.tree.leaves((other.blocks, other.slot)), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


async def open_early(batches, snapshot, computed):
    with ThreadPoolExecutor(1) as thread:
        opening = EarlyOpening(RECEIVER.opening(computed), thread)
        try:
            for batch in batches:
                opening.take(batch)
                await asyncio.sleep(0)
            return await opening.finish(snapshot)
        finally:
            opening.close()


def flipped(content):
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 4
    return bytes(damaged)


@settings(max_examples=60, phases=[Phase.generate])
@given(data=st.data(), computed=st.integers(1, 60))
def test_what_comes_in_any_order_is_opened_as_at_once(data, computed):
    snapshot = random_state(computed).snapshot
    names = data.draw(st.permutations(list(snapshot)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(names)), max_size=4)))
    batches = [names[begin:end] for begin, end in zip([0, *cuts], cuts, strict=False)]
    # The first time some arrive damaged, as by a transport that is left for another one.
    damaged = data.draw(st.sets(st.sampled_from(names), max_size=2))
    content = [
        {name: flipped(snapshot[name]) if name in damaged else snapshot[name] for name in one} for one in batches
    ]
    arrival = asyncio.run(open_early(content, snapshot, computed))
    assert_same(arrival, RECEIVER.open(snapshot))


def test_what_is_damaged_missing_or_too_much_is_refused_at_the_end():
    snapshot = random_state(21).snapshot
    for changed in (
        snapshot | {"page(0, 0)": flipped(snapshot["page(0, 0)"])},
        {name: content for name, content in snapshot.items() if name != "slot(0)"},
        snapshot | {"page(9, 0)": snapshot["page(0, 0)"]},
    ):
        with pytest.raises(SnapshotError):
            asyncio.run(open_early([changed], changed, 21))


def test_a_state_of_other_length_than_was_expected_is_opened_all_the_same():
    snapshot = random_state(21).snapshot
    for computed in (8, 60):
        assert_same(asyncio.run(open_early([snapshot], snapshot, computed)), RECEIVER.open(snapshot))
