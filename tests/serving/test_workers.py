"""How a gateway finds workers, asks them, and leaves them: names, health, fingerprints, over real servers."""

import asyncio
import contextlib
import socket

import pytest

from deepinfer_jax.errors import ConfigError
from serving.addresses import is_loopback, is_unspecified, split_address
from serving.configuration import GatewaySection
from serving.discovery import Discovery, resolve
from serving.workers import Workers
from tests.serving.clusters import POLL, ScriptedWorker, eventually, serving

SETTINGS = GatewaySection(poll_seconds=POLL, resolve_seconds=POLL, call_seconds=2.0)


def decoder(name):
    return ScriptedWorker(name, "decode", generate=[[]])


@contextlib.asynccontextmanager
async def following(discovery, settings=SETTINGS):
    workers = Workers(settings, discovery)
    await workers.start()
    try:
        yield workers
    finally:
        await workers.close()


def test_names_give_all_their_addresses_and_keep_them_while_they_cannot_be_resolved():
    answers = [["10.0.0.2:5", "10.0.0.1:5"], OSError("no answer"), ["10.0.0.3:5"]]

    async def lookup(host, port):
        assert (host, port) == ("pool", 5)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def ask():
        discovery = Discovery(["unix:a", "dns:pool:5", "10.0.0.1:5", "unix:a"], lookup)
        return [await discovery.addresses() for _ in range(3)]

    first, kept, moved = asyncio.run(ask())
    assert first == kept == ("unix:a", "10.0.0.1:5", "10.0.0.2:5")
    assert moved == ("unix:a", "10.0.0.3:5", "10.0.0.1:5")


def test_a_name_that_never_was_resolved_has_no_addresses():
    async def lookup(host, port):
        raise socket.gaierror("unknown")

    assert asyncio.run(Discovery(["dns:nowhere:1"], lookup).addresses()) == ()


def test_this_machine_resolves_its_own_name():
    found = asyncio.run(resolve("localhost", 7))
    assert set(found) <= {"127.0.0.1:7", "[::1]:7"}
    assert found
    assert all(is_loopback(split_address(address, "key")[0]) for address in found)


@pytest.mark.parametrize("address", ["a", "a:", "a:b", "a:70000", "[::1:5", "a/b:5", "::1:5", ":5"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split_address(address, "key")


def test_addresses_for_everybody_are_known():
    assert [is_unspecified(one) for one in ("0.0.0.0:1", "[::]:1", "127.0.0.1:1", "host:1", "unix:a")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_workers_come_drain_return_and_go():
    one, two = decoder("one"), decoder("two")

    async def ask():
        addresses = []

        async def lookup(host, port):
            return addresses

        async with (
            serving(*one.services()) as (_, first),
            serving(*two.services()) as (server, second),
            following(Discovery(["dns:pool:1"], lookup)) as workers,
        ):
            assert workers.info is None
            assert workers.decode_place(1, 1, ()) is None
            addresses.append(first)
            await asyncio.wait_for(workers.found(), 20)
            addresses.append(second)
            await eventually(lambda: len(workers.decoders()) == 2)
            places = [workers.decode_place(10, 20, ()) for _ in range(2)]
            # What was placed and not told yet counts.
            assert {place.worker.name for place in places} == {"one", "two"}

            two.load.draining = True
            await eventually(lambda: [worker.name for worker in workers.decoders()] == ["one"])
            two.load.draining = False
            await eventually(lambda: len(workers.decoders()) == 2)
            await server._health.enter_graceful_shutdown()
            await eventually(lambda: [worker.name for worker in workers.decoders()] == ["one"])

            # One that is not found any more is left once its requests have ended.
            addresses.remove(first)
            await eventually(lambda: len(list(workers)) == 1)
            assert len(workers._leaving) == 1
            # If it is found again before that, nothing of them is forgotten.
            addresses.append(first)
            await eventually(lambda: len(list(workers)) == 2)
            assert [worker.account.open_requests for worker in workers] == [1, 1]
            addresses.remove(first)
            await eventually(lambda: len(workers._leaving) == 1)
            for place in places:
                place.leave()
            await eventually(lambda: not workers._leaving)

    asyncio.run(ask())


def test_what_people_know_a_difference_by_is_said_before_the_fingerprint():
    one, two = decoder("one"), decoder("two")
    two.info.fingerprint, two.info.page_tokens = "1" * 64, 32

    async def ask():
        async with (
            serving(*one.services()) as (_, first),
            serving(*two.services()) as (_, second),
            following(Discovery([first, second])) as workers,
        ):
            return [worker.trouble for worker in workers if worker.trouble]

    (trouble,) = asyncio.run(ask())
    assert trouble in ("its page_tokens is 32, that of one is 16", "its page_tokens is 16, that of two is 32")


def test_a_worker_that_ends_and_comes_back_with_other_weights_is_refused_beside_others():
    one, two = decoder("one"), decoder("two")

    async def ask():
        async with (
            serving(*one.services()) as (_, first),
            serving(*two.services()) as (_, second),
            following(Discovery([first, second])) as workers,
        ):
            assert len(workers.decoders()) == 2
            two.info.fingerprint = "1" * 64
            await eventually(lambda: len(workers.decoders()) == 1)
            trouble = [worker.trouble for worker in workers if worker.trouble]
            # Where nobody else is left, the new weights are as good as any.
            one.load.draining = True
            await eventually(lambda: [worker.name for worker in workers.decoders()] == ["two"])
            return trouble

    (trouble,) = asyncio.run(ask())
    assert trouble == f"its fingerprint is {'1' * 64}, that of one is {'0' * 64}"
