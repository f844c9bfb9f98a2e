"""Every figure of GetLoad says something: each is seen above 0 while a prefill and a decode worker have work.

Numerics f32, deterministic, replay mode exact. Engines stand still between steps where a test says so.
"""

import asyncio
import math

from deepinfer_jax.request import SamplingParams
from serving.async_client import AsyncClient
from serving.proto.deepinfer.v1 import inference_pb2
from tests.deepinfer_jax.test_engine_machine import stream
from tests.running_engines import receiver
from tests.serving.clusters import engine_worker, gateway

LONG = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
MANY = 9


def seen_of(message, prefix=""):
    """Names of the fields that say something."""
    for field, value in message.ListFields():
        if field.message_type is None:
            yield f"{prefix}{field.name}"
        else:
            for part in value:
                yield from seen_of(part, f"{prefix}{field.name}.")


def all_fields(descriptor, prefix=""):
    for field in descriptor.fields:
        name = f"{prefix}{field.name}"
        yield from [name] if field.message_type is None else all_fields(field.message_type, f"{name}.")


class Watch:
    """Asks a gateway and its workers for their load; engines take a step for every time that somebody waits for one."""

    def __init__(self, clients, workers):
        self._clients, self._workers = clients, workers
        self.seen, self.loads = set(), []

    async def look(self):
        asked = asyncio.gather(*(client.load(timeout=60.0) for client in self._clients))
        while not asked.done():
            for worker in self._workers:
                worker.throttle.allow(1)
            await asyncio.sleep(0.005)
        self.loads = asked.result()
        for load in self.loads:
            self.seen |= set(seen_of(load))

    async def until(self, condition):
        while not condition(self.loads):
            await self.look()


async def one_by_one():
    async with (
        engine_worker("p", role="prefill") as prefill,
        engine_worker("d", role="decode", build=receiver) as decode,
        gateway(prefill.address, decode.address, prefill="full", call_seconds=60.0) as gate,
        AsyncClient(prefill.address) as first,
        AsyncClient(decode.address) as second,
    ):
        watch = Watch((first, second, gate.client), (prefill, decode))
        for worker in (prefill, decode):
            worker.throttle.allow(0)
        answers = [asyncio.create_task(gate.client.complete(stream(number)[:60], LONG)) for number in range(MANY)]
        # Some wait for a slot there, and have to be computed; the pages of those that run are used.
        await watch.until(lambda loads: loads and loads[0].queued_requests and loads[0].shards[0].prefill_tokens)
        waits, runs = watch.loads[0], watch.loads[0].shards[0]
        assert waits.queued_tokens == 60 * waits.queued_requests
        assert 0 < runs.running_requests <= runs.slots == 3
        assert 0 < runs.used_pages <= runs.pages
        # States wait under leases for the decode worker, which has fewer slots.
        await watch.until(lambda loads: loads[0].shards[0].held_requests > 1)
        held = watch.loads[0].shards[0]
        assert held.held_tokens == 60 * held.held_requests
        await watch.until(lambda loads: loads[1].shards[0].cache_tokens > 60)
        for worker in (prefill, decode):
            worker.throttle.allow(math.inf)
        await asyncio.gather(*answers)
        assert await prefill.idle()
        assert await decode.idle()
        prefill.server.guard.drain()
        await watch.look()
        assert [load.draining for load in watch.loads] == [True, False, False]
        # A gateway says what it last heard.
        quiet = {name for load in watch.loads[:2] for name in seen_of(load)}
        return watch.seen, quiet


def test_every_figure_of_a_load_is_seen():
    seen, quiet = asyncio.run(one_by_one())
    names = set(all_fields(inference_pb2.Load.DESCRIPTOR))
    # How far a transfer is depends on threads; see the test of hand-overs that are held up.
    assert names - seen <= {"shards.read_backlog_bytes"}
    assert quiet == {"shards.slots", "shards.pages", "draining"}
