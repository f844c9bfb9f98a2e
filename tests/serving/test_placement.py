"""Placement policies: who is never chosen, who is preferred, and that loads stay balanced."""

import dataclasses
import random

from hypothesis import given
from hypothesis import strategies as st

from serving.placement import DecodeLoad, DecodeShard, PrefillLoad, choose_decode, choose_prefill

NAMES = st.sampled_from("abcdefgh")
COUNTS = st.integers(0, 6)
PREFILL = st.lists(
    st.builds(PrefillLoad, NAMES, st.integers(0, 5), st.booleans()), max_size=6, unique_by=lambda worker: worker.name
)
SHARDS = st.lists(
    st.builds(DecodeShard, COUNTS, st.integers(1, 6), st.integers(0, 400), COUNTS, st.integers(1, 12)),
    min_size=1,
    max_size=2,
).map(tuple)
DECODE = st.lists(
    st.builds(DecodeLoad, NAMES, SHARDS, st.integers(0, 1), st.integers(0, 50), st.just(16), st.booleans()),
    max_size=6,
    unique_by=lambda worker: worker.name,
)
TOKENS = st.integers(1, 300)
EXCLUDED = st.frozensets(NAMES, max_size=3)


def one_shard(name: str, requests: int, cache: int, **more) -> DecodeLoad:
    return DecodeLoad(name, (DecodeShard(requests, 8, cache, cache // 128, 1000),), **more)


@given(PREFILL, EXCLUDED)
def test_a_prompt_goes_where_the_fewest_tokens_are_outstanding(workers, excluded) -> None:
    usable = {worker.name: worker for worker in workers if worker.available and worker.name not in excluded}
    chosen = choose_prefill(workers, excluded)
    assert (chosen is None) == (not usable)
    if chosen is not None:
        least = min(worker.outstanding_tokens for worker in usable.values())
        assert chosen == min(name for name, worker in usable.items() if worker.outstanding_tokens == least)
    assert choose_prefill(reversed(workers), excluded) == chosen


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 6))
def test_outstanding_prompts_differ_by_less_than_the_longest_one(prompts, count) -> None:
    loads = [PrefillLoad(str(number), 0) for number in range(count)]
    for tokens in prompts:
        place = int(choose_prefill(loads))
        loads[place] = dataclasses.replace(loads[place], outstanding_tokens=loads[place].outstanding_tokens + tokens)
    held = [load.outstanding_tokens for load in loads]
    assert max(held) - min(held) <= max(prompts)


@given(DECODE, TOKENS, EXCLUDED)
def test_only_usable_workers_decode_and_those_with_room_come_first(workers, tokens, excluded) -> None:
    usable = {worker.name: worker for worker in workers if worker.available and worker.name not in excluded}
    chosen = choose_decode(workers, tokens, excluded)
    assert (chosen is None) == (not usable)
    if chosen is not None:
        assert usable[chosen].has_room(tokens) == any(worker.has_room(tokens) for worker in usable.values())
    assert choose_decode(reversed(workers), tokens, excluded) == chosen


@given(DECODE, TOKENS)
def test_no_worker_is_chosen_that_another_beats_in_requests_and_in_cache(workers, tokens) -> None:
    chosen = choose_decode(workers, tokens)
    by_name = {worker.name: worker for worker in workers}
    for worker in workers:
        if chosen is not None and worker.available and worker.has_room(tokens) >= by_name[chosen].has_room(tokens):
            better = worker.requests < by_name[chosen].requests and worker.cache_tokens < by_name[chosen].cache_tokens
            assert not better


def test_short_requests_go_where_few_run_and_long_ones_where_caches_are_short() -> None:
    workers = [one_shard("few", 1, 9000), one_shard("short", 6, 3000), one_shard("middle", 4, 12000)]
    assert choose_decode(workers, 100) == "short"
    spread = [one_shard("few", 1, 9000), one_shard("short", 6, 8800)]
    assert choose_decode(spread, 300) == "few"
    assert choose_decode(spread, 40_000) == "short"


def test_a_request_waits_only_where_nobody_has_room() -> None:
    full = DecodeLoad("a", (DecodeShard(8, 8, 10, 1, 1000),))
    narrow = DecodeLoad("b", (DecodeShard(0, 8, 0, 990, 1000),))
    queued = one_shard("c", 0, 0, waiting_requests=1)
    roomy = one_shard("d", 7, 90_000)
    assert choose_decode([full, narrow, queued, roomy], 2000) == "d"
    assert choose_decode([full, narrow, queued], 2000) == "b"
    assert narrow.has_room(1280)
    assert not narrow.has_room(1281)


def test_a_slot_and_the_pages_must_be_on_one_shard() -> None:
    apart = DecodeLoad("a", (DecodeShard(8, 8, 0, 0, 10), DecodeShard(0, 8, 0, 10, 10)))
    assert not apart.has_room(1)


def test_random_traffic_keeps_requests_and_caches_level() -> None:
    """Placed by the policy, the largest cache stays near the mean; placed in turns, it does not."""
    generator = random.Random(3)
    lengths = [generator.choice((200, 400, 800, 60_000)) for _ in range(400)]

    def worst(place) -> float:
        held = [[0, 0] for _ in range(8)]
        for number, tokens in enumerate(lengths):
            chosen = place(number, tokens, held)
            held[chosen][0] += 1
            held[chosen][1] += tokens
        return max(cache for _, cache in held) / (sum(lengths) / 8)

    def policy(number: int, tokens: int, held: list) -> int:
        del number
        loads = [DecodeLoad(str(i), (DecodeShard(n, 1000, c, 0, 1 << 40),)) for i, (n, c) in enumerate(held)]
        return int(choose_decode(loads, tokens))

    assert worst(policy) < 1.1
    assert worst(lambda number, tokens, held: number % 8) > 1.2
