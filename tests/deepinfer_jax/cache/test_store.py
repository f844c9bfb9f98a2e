"""The block store in memory: a state machine against a plain model, what threads may do, and damaged values."""

import threading
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from deepinfer_jax.cache.records import BlockPlanes, take_rows
from deepinfer_jax.cache.sections import HEADER_BYTES
from deepinfer_jax.cache.store import BlockStore, MemoryStore, StoreCounters, pack_block, store_key, unpack_block
from deepinfer_jax.errors import SnapshotError
from tests.deepinfer_jax.cache.host_states import (
    NUMERICS,
    assert_same_rows,
    random_blocks,
    released_form,
    small_form,
)

KEY = store_key(b"k" * 32, bounded=False)


class StoreMachine(RuleBasedStateMachine):
    """Against an ordered dictionary: what was used last stays, and bytes never exceed the capacity."""

    keys = st.lists(st.sampled_from([b"a", b"bb", b"ccc", b"d", b"e"]), max_size=4)

    @initialize(capacity=st.integers(0, 40))
    def begin(self, capacity):
        self.store, self.capacity = MemoryStore(capacity), capacity
        self.model: OrderedDict[bytes, bytes] = OrderedDict()
        self.hits = self.misses = self.evictions = self.damaged = 0

    def size(self):
        return sum(len(key) + len(value) for key, value in self.model.items())

    @rule(keys=keys, length=st.integers(0, 20))
    def put(self, keys, length):
        items = [(key, bytes([place]) * length) for place, key in enumerate(keys)]
        self.store.put_many(items)
        for key, value in items:
            self.model.pop(key, None)
            if len(key) + len(value) > self.capacity:
                continue
            while self.size() + len(key) + len(value) > self.capacity:
                self.model.popitem(last=False)
                self.evictions += 1
            self.model[key] = value

    @rule(keys=keys)
    def get(self, keys):
        assert self.store.get_many(keys) == [self.model.get(key) for key in keys]
        for key in keys:
            self.hits += key in self.model
            self.misses += key not in self.model
            if key in self.model:
                self.model.move_to_end(key)

    @rule(keys=keys)
    def look(self, keys):
        assert self.store.contains_many(keys) == [key in self.model for key in keys]

    @rule(key=st.sampled_from([b"a", b"bb", b"ccc"]))
    def damage(self, key):
        value = self.model.get(key)
        if value:
            kept = self.store._values[key]
            self.store._values[key] = (bytes([value[0] ^ 1]) + value[1:], kept[1])
            assert self.store.get_many([key]) == [None]
            del self.model[key]
            self.misses += 1
            self.damaged += 1

    @invariant()
    def books_agree(self):
        if hasattr(self, "store"):
            counters = (self.hits, self.misses, self.evictions, self.damaged, len(self.model), self.size())
            assert self.store.counters() == StoreCounters(*counters)
            assert self.size() <= self.capacity


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=30)


def test_it_is_a_block_store():
    assert isinstance(MemoryStore(1), BlockStore)


def test_what_was_read_last_stays():
    store = MemoryStore(6)
    store.put_many([(b"a", b"12"), (b"b", b"12")])
    store.get_many([b"a"])
    store.put_many([(b"c", b"12")])
    assert store.contains_many([b"a", b"b", b"c"]) == [True, False, True]


def test_a_damaged_value_is_not_there():
    store = MemoryStore(100)
    store.put_many([(b"key", b"value")])
    store._values[b"key"] = (b"volue", store._values[b"key"][1])
    assert store.get_many([b"key"]) == [None]
    assert store.counters() == StoreCounters(misses=1, damaged=1)


def test_a_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="-1 bytes"):
        MemoryStore(-1)


def test_threads_find_whole_values_and_the_books_stay_right():
    store, wrong = MemoryStore(2000), []

    def work(number):
        random = np.random.default_rng(number)
        for _ in range(300):
            key = bytes([random.integers(20)])
            if random.integers(2):
                store.put_many([(key, key * int(random.integers(1, 300)))])
            else:
                (value,) = store.get_many([key])
                if value is not None and set(value) != set(key):
                    wrong.append(value)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters = store.counters()
    kept = store._values
    assert not wrong
    assert counters.damaged == 0
    assert counters.bytes == sum(len(key) + len(value) for key, (value, _) in kept.items()) <= 2000
    assert counters.values == len(kept)


@pytest.mark.parametrize("numerics", NUMERICS)
@settings(max_examples=15)
@given(
    place=st.integers(0, 2),
    seed=st.integers(0, 99),
    replays=st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple),
)
def test_a_block_comes_back_bit_by_bit(numerics, place, seed, replays):
    form = small_form(numerics)
    planes = random_blocks(form, 3, seed)
    value = pack_block(KEY, planes, place, form, replays)
    store = MemoryStore(len(KEY) + len(value))
    store.put_many([(KEY, value)])
    (found,) = store.get_many([KEY])
    stored = unpack_block(KEY, found, form)
    assert stored.replays == replays
    for got, want in zip(stored.planes, planes, strict=True):
        assert_same_rows(got, take_rows(want, slice(place, place + 1)))
    again = pack_block(KEY, stored.planes, 0, form, replays)
    assert again == value


def test_bytes_of_a_released_block():
    """890 bytes a token, one header for the replays and one for each of four groups."""
    form = released_form("released")
    assert len(pack_block(KEY, random_blocks(form, 1, 0), 0, form)) == 890 * 128 + 5 * HEADER_BYTES


def test_keys_tell_exact_and_bounded_content_apart():
    assert store_key(b"c" * 32, bounded=True) != store_key(b"c" * 32, bounded=False)


@settings(max_examples=150)
@given(st.data())
def test_no_damage_goes_unnoticed(data):
    form = small_form("released")
    value = bytearray(pack_block(KEY, random_blocks(form, 1, 0), 0, form, (8,)))
    place = data.draw(st.integers(0, len(value) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "drop", "more"]))
    if how == "flip":
        value[place] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del value[place:]
    elif how == "drop":
        del value[place]
    else:
        value += bytes(place % 200 + 1)
    with pytest.raises(SnapshotError):
        unpack_block(KEY, bytes(value), form)


def test_a_block_opens_under_its_own_key_and_fingerprint_alone():
    form = small_form("bf16")
    value = pack_block(KEY, random_blocks(form, 1, 0), 0, form)
    for other in (store_key(b"k" * 32, bounded=True), store_key(b"l" * 32, bounded=False)):
        with pytest.raises(SnapshotError, match="belong together"):
            unpack_block(other, value, form)
    with pytest.raises(SnapshotError, match="fingerprint"):
        unpack_block(KEY, value, small_form("bf16", "other weights"))


def test_pages_of_one_block_do_not_change_places():
    form = small_form("f32")
    value = pack_block(KEY, random_blocks(form, 1, 0), 0, form)
    size = HEADER_BYTES + 4 * form.page_record
    first, second = value[HEADER_BYTES : HEADER_BYTES + size], value[HEADER_BYTES + size : HEADER_BYTES + 2 * size]
    swapped = value[:HEADER_BYTES] + second + first + value[HEADER_BYTES + 2 * size :]
    assert len(swapped) == len(value)
    with pytest.raises(SnapshotError, match="belong together"):
        unpack_block(KEY, swapped, form)


def test_planes_of_a_device_tree_are_packed_alike():
    """Anything with data and scale planes serves, such as the cached rows that a device reads back."""

    class Rows:
        def __init__(self, rows):
            self.data, self.scale = rows

    form = small_form("released")
    planes = random_blocks(form, 2, 5)
    device = BlockPlanes(Rows(planes.main), Rows(planes.index))
    assert pack_block(KEY, device, 1, form) == pack_block(KEY, planes, 1, form)
