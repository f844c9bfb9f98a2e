"""News between an engine that waits for nobody and a reader that is slow, or gone."""

import asyncio

import pytest

from deepinfer_jax.async_engine import AsyncEngine
from deepinfer_jax.errors import InputError
from deepinfer_jax.request import Request, SamplingParams
from serving.errors import OverloadedError
from serving.news_box import NewsBox
from tests.running_engines import fresh_engine

REQUEST = Request(tuple(range(3, 23)), SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))


def filled(request, unread_tokens):
    """A box that was filled while nobody took anything, and how many requests the engine aborted."""

    async def fill():
        box = NewsBox(unread_tokens)
        await box.fill(engine.stream(request))
        # Aborted between two steps, and counted by the next.
        while await engine.call(lambda inner: inner.busy):
            await asyncio.sleep(0.001)
        return box

    inner = fresh_engine("f32")
    with AsyncEngine(inner) as engine:
        box = asyncio.run(fill())
    assert (inner.books.used_blocks, inner.books.used_slots) == (0, 0)
    return box, inner.metrics.value("finished_requests_total", reason="abort")


def test_news_that_nobody_took_come_together():
    box, aborted = filled(REQUEST, unread_tokens=30)
    news = asyncio.run(box.take())
    assert sum(len(output.tokens) for output in news) == 30
    assert news[-1].finish_reason == "length"
    assert aborted == 0


def test_a_reader_that_falls_behind_loses_its_request():
    box, aborted = filled(REQUEST, unread_tokens=8)
    news = asyncio.run(box.take())
    assert sum(len(output.tokens) for output in news) == 8
    with pytest.raises(OverloadedError, match="more than 8 tokens") as caught:
        asyncio.run(box.take())
    assert (caught.value.reason, caught.value.retry_after) == ("READER_TOO_SLOW", None)
    assert aborted == 1


def test_tokens_that_were_taken_count_no_more():
    async def take_at_once(engine):
        box, taken = NewsBox(unread_tokens=4), []
        filling = asyncio.create_task(box.fill(engine.stream(REQUEST)))
        while not taken or taken[-1].finish_reason is None:
            taken += await box.take()
        await filling
        return taken

    with AsyncEngine(fresh_engine("f32")) as engine:
        taken = asyncio.run(take_at_once(engine))
    assert sum(len(output.tokens) for output in taken) == 30


def test_a_refusal_reaches_the_taker():
    box, _ = filled(Request(()), unread_tokens=8)
    with pytest.raises(InputError):
        asyncio.run(box.take())


def test_the_taker_waits():
    async def wait(engine):
        box = NewsBox()
        taking = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        assert not taking.done()
        filling = asyncio.create_task(box.fill(engine.stream(REQUEST)))
        first = await taking
        filling.cancel()
        await asyncio.wait((filling,))
        return first

    with AsyncEngine(fresh_engine("f32")) as engine:
        assert asyncio.run(wait(engine))[0].receipt is not None
