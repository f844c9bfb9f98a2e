"""What a gateway books for a worker between two of the worker's words."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from serving.accounts import Account
from serving.placement import DecodeShard
from serving.proto.deepinfer.v1.inference_pb2 import Load, ShardLoad


@dataclasses.dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def load(running=0, prefill=0, cache=0, queued=0, queued_tokens=0, shards=1) -> Load:
    shard = ShardLoad(
        slots=4, pages=100, running_requests=running, prefill_tokens=prefill, cache_tokens=cache, used_pages=cache // 16
    )
    return Load(shards=[shard] * shards, queued_requests=queued, queued_tokens=queued_tokens)


def test_what_came_since_the_workers_word_is_added_and_what_went_is_taken_away():
    account = Account(Clock())
    early = account.reserve(100, 150)
    account.hear(load(running=1, prefill=100, cache=32), account.ask())
    assert account.prefill_load("w", available=True).outstanding_tokens == 100
    late = account.reserve(40, 60)
    assert account.prefill_load("w", available=True).outstanding_tokens == 140
    late.prompt_tokens -= 32
    assert account.prefill_load("w", available=True).outstanding_tokens == 108
    account.release(early)
    account.release(early)
    assert account.prefill_load("w", available=True).outstanding_tokens == 8
    account.hear(load(), account.ask())
    assert account.prefill_load("w", available=False).outstanding_tokens == 0
    assert (account.open_requests, account.said) == (1, load())


def test_a_word_that_was_asked_for_before_a_placement_does_not_know_it():
    account = Account(Clock())
    asked = account.ask()
    account.reserve(40, 60)
    account.hear(load(), asked)
    assert account.prefill_load("w", available=True).outstanding_tokens == 40
    assert account.decode_load("w", 16, available=True).shards[0].requests == 1


def test_placements_fill_the_emptiest_shard_and_then_wait():
    account = Account(Clock())
    account.hear(load(running=3, cache=160, shards=2), account.ask())
    for _ in range(3):
        account.reserve(10, 33)
    decode = account.decode_load("w", 16, available=True)
    assert decode.shards == (DecodeShard(4, 4, 193, 13, 100), DecodeShard(4, 4, 193, 13, 100))
    assert (decode.waiting_requests, decode.waiting_tokens) == (1, 33)
    assert not decode.has_room(1)


def test_a_worker_without_shards_is_not_available():
    account = Account(Clock())
    assert not account.decode_load("w", 16, available=True).available


@given(st.lists(st.tuples(st.sampled_from(["reserve", "release", "hear"]), st.integers(1, 500)), max_size=40))
def test_books_are_never_negative_and_end_where_the_worker_says(steps):
    account, open_ones = Account(Clock()), []
    for step, tokens in steps:
        if step == "reserve":
            open_ones.append(account.reserve(tokens, tokens))
        elif step == "release" and open_ones:
            account.release(open_ones.pop(tokens % len(open_ones)))
        else:
            account.hear(load(running=len(open_ones), cache=tokens), account.ask())
        decode = account.decode_load("w", 16, available=True)
        assert account.prefill_load("w", available=True).outstanding_tokens >= 0
        assert all(shard.requests >= 0 and shard.cache_tokens >= 0 and shard.pages >= 0 for shard in decode.shards)
    for one in open_ones:
        account.release(one)
    account.hear(load(running=2, prefill=7, cache=64), account.ask())
    assert account.decode_load("w", 16, available=True).shards == (DecodeShard(2, 4, 64, 4, 100),)
    assert account.prefill_load("w", available=True).outstanding_tokens == 7
    assert account.open_requests == 0
