"""Calls of the engine from asyncio, and what becomes of them when it ends."""

import asyncio
import threading

import pytest

from deepinfer_jax.async_engine import AsyncEngine, EngineClosedError
from deepinfer_jax.errors import InputError
from deepinfer_jax.load import EngineLoad
from deepinfer_jax.request import Request, SamplingParams
from tests.running_engines import fresh_engine

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


async def _collect(engine, request):
    return [output async for output in engine.stream(request)]


def test_calls_reach_the_engine_between_steps_and_after_its_end_say_so():
    async def ask(engine):
        with pytest.raises(InputError):
            await engine.call(lambda inner: inner.check(Request((), GREEDY)))
        return await engine.call(lambda inner: inner.load())

    with AsyncEngine(fresh_engine("f32")) as engine:
        load = asyncio.run(ask(engine))
    assert (load.waiting_requests, len(load.shards), load.shards[0].slots) == (0, 1, 3)
    with pytest.raises(EngineClosedError):
        asyncio.run(engine.call(lambda inner: inner.load()))


def test_orders_that_an_ending_engine_did_not_reach_are_refused():
    async def ask(engine):
        begun, release = threading.Event(), threading.Event()

        def hold(inner):
            begun.set()
            release.wait()

        held = asyncio.create_task(engine.call(hold))
        await asyncio.to_thread(begun.wait)
        late = [asyncio.create_task(engine.call(lambda inner: inner.load()))]
        late.append(asyncio.create_task(_collect(engine, Request(tuple(range(3, 43)), GREEDY))))
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        while not engine._closing:
            await asyncio.sleep(0)
        release.set()
        await asyncio.gather(held, closing)
        return await asyncio.gather(*late, return_exceptions=True)

    results = asyncio.run(ask(AsyncEngine(fresh_engine("f32"))))
    # What was ordered before the end is done or refused, and nobody waits for ever.
    assert all(isinstance(result, EngineClosedError | EngineLoad) for result in results), results
    assert isinstance(results[1], EngineClosedError)
