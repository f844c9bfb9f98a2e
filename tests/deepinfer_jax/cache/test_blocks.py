"""The book of blocks: a state machine against a plain model of it, and its rules one by one."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from deepinfer_jax.cache.blocks import EXACT, BlockPool, chain_keys

ROOT = b"root"


def keys(tokens, **more):
    return chain_keys(more.pop("root", ROOT), tokens, 4, **more)


def test_a_key_stands_for_the_block_and_everything_before_it():
    base = keys(range(12))
    assert len(base) == 3
    assert keys(range(15)) == base
    changed_first = keys([99, *range(1, 12)])
    assert all(one != other for one, other in zip(base, changed_first, strict=True))
    changed_last = keys([*range(11), 99])
    assert changed_last[:2] == base[:2]
    assert changed_last[2] != base[2]
    assert set(keys(range(12), root=b"other salt")).isdisjoint(base)


def test_an_images_content_is_in_the_keys_of_the_blocks_it_reaches_into():
    first, second = (keys([1] * 12, images=[(5, 9, content)]) for content in (b"cat", b"dog"))
    assert first[0] == second[0] == keys([1] * 12)[0]
    assert first[1] != second[1]
    assert first[2] != second[2]


def test_the_least_recently_released_content_goes_first_and_a_sequences_end_before_its_beginning():
    pool = BlockPool(4)
    blocks = pool.allocate(0, 4)
    names = keys(range(16))
    for block, name in zip(blocks, names, strict=True):
        pool.publish(0, block, name)
    pool.release(0, blocks[2:])
    pool.release(0, blocks[:2])
    gone = []
    for _ in range(4):
        (taken,) = pool.allocate(0, 1)
        gone.append(blocks.index(taken))
    assert gone == [3, 2, 1, 0]


def test_a_bounded_request_prefers_exact_content_and_follows_one_history():
    pool = BlockPool(6)
    names = keys(range(12))
    exact, first, second, third, foreign, _ = pool.allocate(0, 6)
    pool.publish(0, exact, names[0])
    pool.publish(0, first, names[0], (4,))
    pool.publish(0, second, names[1], (4,))
    pool.publish(0, foreign, names[2], (8,))
    assert pool.match(0, names, 4, bounded=False).blocks == (exact,)
    hit = pool.match(0, names, 4, bounded=True)
    assert (hit.blocks, hit.replays) == ((exact, second), (4,))
    pool.publish(0, third, names[2], (4, 8))
    assert pool.match(0, names, 4, bounded=True).blocks == (exact, second, third)
    assert pool.match(0, names, 4, bounded=True).replays == (4, 8)


def test_exact_content_is_not_continued_by_what_descends_from_a_replay_before_its_end():
    pool = BlockPool(4)
    names = keys(range(12))
    first, exact, replayed, behind = pool.allocate(0, 4)
    pool.publish(0, first, names[0])
    pool.publish(0, replayed, names[1], (4,))
    pool.publish(0, behind, names[2], (4,))
    assert pool.match(0, names, 4, bounded=True).blocks == (first, replayed, behind)
    pool.publish(0, exact, names[1])
    hit = pool.match(0, names, 4, bounded=True)
    assert (hit.blocks, hit.replays) == ((first, exact), ())


def test_the_same_content_twice_keeps_its_first_block():
    pool = BlockPool(2)
    one, other = pool.allocate(0, 2)
    (name,) = keys(range(4))
    assert pool.publish(0, one, name) == one
    assert pool.publish(0, other, name) == one
    assert pool.release(0, [other]) == [other]
    assert pool.release(0, [one]) == []


def test_misuse_is_an_error():
    pool = BlockPool(2)
    (block,) = pool.allocate(0, 1)
    (name,) = keys(range(4))
    assert pool.allocate(0, 2) is None
    assert pool.available(0) == 1
    pool.publish(0, block, name)
    with pytest.raises(ValueError, match="already has other content"):
        pool.publish(0, block, keys([7] * 4)[0])
    pool.release(0, [block])
    with pytest.raises(ValueError, match="has no user"):
        pool.release(0, [block])
    with pytest.raises(ValueError, match="is free"):
        pool.retain(0, [1 - block])


class Books(RuleBasedStateMachine):
    """Requests over a small token alphabet come, grow, fork, publish and go; contents are checked by a model."""

    requests = Bundle("requests")
    shards = 2
    capacity = 6

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.capacity, self.shards)
        self.content = {}  # (shard, block) -> the tokens up to its end, for blocks that may be found
        self.users = {}  # (shard, block) -> number of requests
        self.live = []

    def use(self, shard, blocks, change):
        for block in blocks:
            self.users[shard, block] = self.users.get((shard, block), 0) + change

    @rule(target=requests, shard=st.integers(0, 1), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def arrive(self, shard, tokens):
        names = keys(tokens)
        hit = self.pool.match(shard, names[: (len(tokens) - 1) // 4], 4, bounded=False)
        for place, block in enumerate(hit.blocks):
            assert self.content[shard, block] == tuple(tokens[: 4 * (place + 1)])
        needed = -(-len(tokens) // 4) - len(hit.blocks)
        new = self.pool.allocate(shard, needed)
        if new is None:
            self.pool.release(shard, hit.blocks)
            return multiple()
        for block in new:
            assert self.users.get((shard, block), 0) == 0
            self.content.pop((shard, block), None)
        request = {"shard": shard, "tokens": tokens, "blocks": [*hit.blocks, *new]}
        self.use(shard, request["blocks"], 1)
        self.live.append(request)
        return request

    @rule(request=requests)
    def publish(self, request):
        if request in self.live:
            for place, name in enumerate(keys(request["tokens"])):
                block, upto = request["blocks"][place], tuple(request["tokens"][: 4 * (place + 1)])
                kept = self.pool.publish(request["shard"], block, name, EXACT)
                self.content.setdefault((request["shard"], kept), upto)
                assert self.content[request["shard"], kept] == upto

    @rule(target=requests, request=requests)
    def fork(self, request):
        if not any(request is other for other in self.live):
            return multiple()
        self.pool.retain(request["shard"], request["blocks"])
        self.use(request["shard"], request["blocks"], 1)
        copy = dict(request, blocks=[*request["blocks"]])
        self.live.append(copy)
        return copy

    @rule(request=consumes(requests))
    def leave(self, request):
        if any(request is other for other in self.live):
            self.live = [other for other in self.live if other is not request]
            self.use(request["shard"], request["blocks"], -1)
            for block in self.pool.release(request["shard"], request["blocks"]):
                assert self.users[request["shard"], block] == 0
                assert (request["shard"], block) not in self.content

    @rule()
    def forget(self):
        self.pool.forget()
        self.content.clear()

    @invariant()
    def counts_agree(self):
        for shard in range(self.shards):
            used = sum(1 for (place, _), count in self.users.items() if place == shard and count)
            assert self.pool.used(shard) == used
            assert self.pool.available(shard) == self.capacity - used
            cached = sum(1 for place, block in self.content if place == shard and not self.users.get((place, block)))
            assert self.pool.cached(shard) == cached

    def teardown(self):
        for request in self.live:
            self.pool.release(request["shard"], request["blocks"])
        assert all(self.pool.available(shard) == self.capacity for shard in range(self.shards))


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBooks = Books.TestCase
