"""Connections to holders are kept for the next state, and those that nobody uses end when there are too many."""

import asyncio
import contextlib

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.lanes import Lanes
from serving.server import Server


@contextlib.asynccontextmanager
async def targets(count):
    """Addresses of servers."""
    servers = [Server([]) for _ in range(count)]
    ports = [await server.start("127.0.0.1:0") for server in servers]
    try:
        yield [f"127.0.0.1:{port}" for port in ports]
    finally:
        for server in servers:
            await server.stop(0.0)


async def call(channel):
    return await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10.0)


def test_the_longest_unused_are_closed_and_those_in_use_never():
    async def run():
        lanes, kept = Lanes(2, most_holders=2), {}
        async with targets(4) as places, contextlib.AsyncExitStack() as stack:
            busy = await stack.enter_async_context(lanes.to(places[0]))
            for place in places[1:]:
                async with lanes.to(place) as channels:
                    kept[place] = channels
                    await call(channels[1])
            # The one in use and the last one are left.
            assert len(lanes) == 2
            assert grpc.ChannelConnectivity.SHUTDOWN not in [channel.get_state() for channel in busy]
            assert await call(busy[0])
            async with lanes.to(places[3]) as channels:
                assert channels is kept[places[3]]
            async with lanes.to(places[1]) as channels:
                assert channels is not kept[places[1]]
                assert await call(channels[0])
        await lanes.close()
        assert len(lanes) == 0

    asyncio.run(run())


def test_more_users_than_are_kept_share_what_they_use():
    async def run():
        lanes = Lanes(1, most_holders=1)
        async with targets(3) as places:
            async with contextlib.AsyncExitStack() as stack:
                for place in (*places, *places):
                    (channel,) = await stack.enter_async_context(lanes.to(place))
                    assert await call(channel)
                assert len(lanes) == 3
            assert len(lanes) == 1
        await lanes.close()

    asyncio.run(run())
