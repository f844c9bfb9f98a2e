"""What an engine tells those who choose between engines."""

import dataclasses

from deepinfer_jax.load import EngineLoad, ShardLoad
from deepinfer_jax.request import Request, SamplingParams
from tests.running_engines import SETTINGS, fresh_engine, run

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def test_load_counts_what_waits_and_what_runs():
    engine = fresh_engine("f32")
    for length in (40, 8, 8, 20):
        engine.submit(Request(tuple(range(3, 3 + length)), dataclasses.replace(GREEDY, max_tokens=8)))
    assert (engine.load().waiting_requests, engine.load().waiting_tokens) == (4, 76)
    engine.step()
    load = engine.load()
    shard = load.shards[0]
    assert (load.waiting_requests, load.waiting_tokens, shard.running_requests) == (1, 20, 3)
    assert shard.cache_tokens + shard.prefill_tokens == 56
    assert shard.used_blocks == engine.books.used_blocks > 0
    while engine.busy:
        engine.step()
    idle = ShardLoad(0, SETTINGS.slots, cache_tokens=0, prefill_tokens=0, used_blocks=0, blocks=SETTINGS.blocks)
    assert engine.load() == EngineLoad(0, 0, (idle,))


def test_the_first_news_say_what_was_found_in_the_cache():
    engine = fresh_engine("f32")
    request = Request(tuple(range(3, 43)), dataclasses.replace(GREEDY, max_tokens=3))
    run(engine, [request])
    engine.submit(request)
    news = []
    while engine.busy:
        news += engine.step()
    assert [output.receipt is not None for output in news] == [True, False, True]
    assert news[0].receipt.hit_tokens == news[-1].receipt.hit_tokens == 32
