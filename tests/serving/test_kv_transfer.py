"""States fetched from a holder by real calls and files: whole, or not at all with one reason, whatever happens between.

States are of random bits. Nothing here depends on how long anything takes, but for how long a test waits at most.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import weakref
from pathlib import Path

import grpc
import jax
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from serving.errors import DeadlineError, InvalidRequestError, StateError, refusal
from serving.kv_chunks import ChunkPacker
from serving.kv_transport import TransferProgress
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KV_PART_META, KvDescribeRequest, KvEndpoint, KvPullRequest
from serving.proto.deepinfer.v1.kv_transfer_pb2_grpc import KvTransferStub
from serving.state_pulls import PullSettings
from serving.status import error_from
from tests.serving.held_states import FORM
from tests.serving.state_holders import QUICK, holder, untouched

ONCE = settings(max_examples=10, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["grpc", "shm"])
def shared(request, tmp_path):
    """The directory of shared files, where states are fetched by them."""
    return tmp_path if request.param == "shm" else None


def way(shared):
    return "grpc" if shared is None else "shm"


async def outcome(fetching):
    """The transport that brought a state, or the reason why none did."""
    try:
        return (await fetching).transport
    except StateError as error:
        return error.reason


@ONCE
@given(
    computed=st.integers(1, 70),
    lanes=st.integers(1, 3),
    range_bytes=st.sampled_from([1, 4000, 1 << 20]),
    early=st.lists(st.integers(0, 3), max_size=4),
)
def test_a_state_arrives_whole_while_it_grows(shared, computed, lanes, range_bytes, early):
    pulls = PullSettings(lanes=lanes, range_bytes=range_bytes, chunk_bytes=1 << 16, patience=5.0)

    async def run():
        async with holder(shared=shared, settings=pulls) as held:
            growing, progress = held.hold(computed), TransferProgress()
            fetching = asyncio.create_task(held.fetch(growing, progress=progress))
            for count in early:
                growing.give(count)
                while growing.state.complete_pages < growing.given:
                    await asyncio.sleep(0.001)
            assert not fetching.done()
            growing.finish()
            fetched = await fetching
            assert fetched.transport == way(shared)
            size = sum(map(len, growing.random.snapshot.values()))
            assert progress.received == size
            whole, exposed = progress.seconds()
            if exposed is not None:  # The word when it was computed may come too late to wait for.
                assert 0 <= exposed <= whole
                assert 0 < progress.exposed_bytes <= size
            # It can be had again, until it is released.
            assert held.leases.complete(growing.kv_id, size) == held.leases.seconds
            await held.fetch(growing)
            assert held.leases.release(growing.kv_id)
            with pytest.raises(StateError) as refused:
                await held.fetch(growing)
            assert refused.value.reason == "KV_EXPIRED"

    asyncio.run(run())


# What may happen to a message on its way, by name.


async def flipped(message, call):
    damaged = bytearray(message)
    damaged[len(message) // 2] ^= 16
    yield bytes(damaged)


async def dropped(message, call):
    return
    yield


async def doubled(message, call):
    yield message
    yield message


async def cut_short(message, call):
    yield message[: len(message) * 2 // 3]


async def ended_early(message, call):
    yield ChunkPacker().finish()


async def broken(message, call):
    raise refusal("ENGINE_STOPPED", "gone")
    yield


async def failed(message, call):
    raise ZeroDivisionError
    yield


async def stalled(message, call):
    await asyncio.sleep(1000)
    yield


# Tokens, of which a pull takes several messages.
LONG = 1500
FAULTS = {
    "flipped": (flipped, "KV_DAMAGED"),
    "dropped": (dropped, "KV_DAMAGED"),
    # Every stream brings one chunk before it fails.
    "doubled": (doubled, None),
    "cut short": (cut_short, "KV_DAMAGED"),
    "ended early": (ended_early, "KV_DAMAGED"),
    "broken": (broken, "KV_EXPIRED"),
    "failed": (failed, "KV_EXPIRED"),
    "stalled": (stalled, "KV_EXPIRED"),
}


def some(fault, hit):
    """A fault that messages meet for whose number ``hit`` is true."""
    numbers = itertools.count()

    async def tamper(message, call):
        if hit(next(numbers)):
            async for changed in fault(message, call):
                yield changed
        else:
            yield message

    return tamper


def patient(name, seconds):
    return dataclasses.replace(QUICK, patience=seconds if name == "stalled" else QUICK.patience)


@pytest.mark.parametrize("name", FAULTS)
def test_streams_that_fail_now_and_then_are_made_good(name):
    fault, _ = FAULTS[name]

    async def run():
        faults = {0, 1, 2, 7, 8, 13}
        pulls = dataclasses.replace(patient(name, 1.0), attempts=len(faults) + 1)
        async with holder(some(fault, lambda number: number in faults), settings=pulls) as held:
            growing = held.hold(LONG)
            growing.finish()
            assert await outcome(held.fetch(growing)) == "grpc"
            pulls, held.service.tamper = held.service.counts.pulls, untouched
            await held.fetch(growing)
            # Some were asked for again.
            assert pulls > held.service.counts.pulls - pulls

    asyncio.run(run())


def test_streams_that_bring_something_may_break_any_number_of_times():
    async def run():
        pulls = dataclasses.replace(QUICK, lanes=1, range_bytes=1 << 30, attempts=2)
        async with holder(some(doubled, lambda number: True), settings=pulls) as held:
            growing = held.hold(LONG)
            growing.finish()
            assert await outcome(held.fetch(growing)) == "grpc"
            # Two are for pages and the rest.
            assert held.service.counts.pulls - 2 >= pulls.attempts

    asyncio.run(run())


@pytest.mark.parametrize("name", [name for name, (_, reason) in FAULTS.items() if reason])
def test_streams_that_always_fail_are_one_error(name):
    fault, reason = FAULTS[name]

    async def run():
        async with holder(some(fault, lambda number: True), settings=patient(name, 0.1)) as held:
            growing = held.hold(LONG)
            growing.finish()
            while not growing.state.complete:
                await asyncio.sleep(0.001)
            with pytest.raises(StateError) as refused:
                await held.fetch(growing)
            assert refused.value.reason == reason

    asyncio.run(run())


def test_what_an_engine_gave_is_let_go_once_it_is_sealed():
    async def run():
        async with holder() as held:
            growing = held.hold(40)
            planes = growing.blocks(0, 2)
            kept = [weakref.ref(array) for array in jax.tree.leaves(planes)]
            growing.state.handover.add([planes], 2, 0)
            growing.given = 2
            del planes
            while growing.state.complete_pages < 2:
                await asyncio.sleep(0.001)
            assert all(array() is None for array in kept)
            growing.finish()
            await held.fetch(growing)

    asyncio.run(run())


def test_waiting_for_a_computation_is_no_stall():
    """More often than streams may fail, on both kinds of them."""

    async def run():
        async with holder(settings=PullSettings(lanes=1, attempts=3, patience=0.5)) as held:
            growing = held.hold(40)
            growing.give(2)
            fetching = asyncio.create_task(held.fetch(growing))
            while held.service.counts.pulls < 10 and not fetching.done():
                await asyncio.sleep(0.01)
            growing.finish()
            await fetching

    asyncio.run(run())


def test_a_shared_file_that_is_damaged_or_shrinks_is_left_for_pulls(tmp_path):
    async def run():
        async with holder(shared=tmp_path) as held:
            for damage in (
                lambda path: path.write_bytes(path.read_bytes()[:-20] + bytes(20)),
                lambda path: path.write_bytes(bytes(len(path.read_bytes()))),
                lambda path: path.write_bytes(path.read_bytes() + bytes(100_000)),
                lambda path: path.write_bytes(path.read_bytes()[:-1]),
                lambda path: path.unlink(),
            ):
                growing = held.hold(40)
                growing.finish()
                while not growing.state.complete:
                    await asyncio.sleep(0.001)
                (path,) = tmp_path.iterdir()
                # Pulls read the same file, so that they get a whole copy.
                storage = growing.state._storage
                storage._heap, storage._places = dict(growing.random.snapshot), {}
                damage(path)
                progress = TransferProgress()
                assert await outcome(held.fetch(growing, progress=progress)) == "grpc"
                # What came in vain does not count.
                assert progress.received == sum(map(len, growing.random.snapshot.values()))
                held.leases.drop(growing.kv_id, "done")

    asyncio.run(run())


def test_states_end_under_their_readers(shared):
    """By release, by a failed computation, by the end of the lease; waiting for more or in the middle of a chunk."""

    async def run():
        now = 0.0
        async with holder(shared=shared, clock=lambda: now) as held:
            for end in (
                lambda kv_id: held.leases.release(kv_id),
                lambda kv_id: held.leases.drop(kv_id, "the engine failed"),
            ):
                growing = held.hold(40)
                growing.give(3)
                fetching = asyncio.create_task(held.fetch(growing))
                while held.service.counts.running < 1 or growing.state.complete_pages < 3:
                    await asyncio.sleep(0.001)
                end(growing.kv_id)
                with pytest.raises(StateError) as refused:
                    await fetching
                assert refused.value.reason == "KV_EXPIRED"
            growing = held.hold(40)
            growing.finish()
            held.leases.complete(growing.kv_id, 1000)
            now += held.leases.seconds
            if shared is not None:
                # A file may be read whole before a call finds that its lease has passed.
                held.leases.sweep()
            with pytest.raises(StateError) as refused:
                await held.fetch(growing)
            assert refused.value.reason == "KV_EXPIRED"
            assert held.leases.counts.expired == 1

    asyncio.run(run())


def test_pulls_renew_the_lease():
    async def run():
        now = 0.0
        async with holder(clock=lambda: now) as held:
            growing = held.hold(40)
            growing.finish()
            held.leases.complete(growing.kv_id, 1000)
            for _ in range(3):
                now += 0.9 * held.leases.seconds
                await held.fetch(growing)
            now += held.leases.seconds
            held.leases.sweep()
            assert growing.state.ended == "its lease has expired"

    asyncio.run(run())


def test_every_message_of_a_pull_renews_the_lease():
    """One that takes several leases keeps its state."""

    async def run():
        now, sent = 0.0, 0

        async def slow(message, call):
            nonlocal now, sent
            # Of the two pulls each may send one before the other renews.
            now, sent = now + 0.4 * held.leases.seconds, sent + 1
            yield message

        pulls = dataclasses.replace(QUICK, lanes=1, range_bytes=1 << 30)
        async with holder(slow, settings=pulls, clock=lambda: now) as held:
            growing = held.hold(LONG)
            growing.finish()
            held.leases.complete(growing.kv_id, 1000)
            assert await outcome(held.fetch(growing)) == "grpc"
            assert sent >= 4
            held.leases.sweep()
            assert growing.state.ended is None

    asyncio.run(run())


def test_a_deadline_and_a_cancel_end_everything(shared):
    async def run():
        async with holder(shared=shared) as held:
            growing = held.hold(40)
            growing.give(2)
            with pytest.raises(DeadlineError):
                await held.fetch(growing, seconds=0.3)
            await held.settle()
            fetching = asyncio.create_task(held.fetch(growing))
            while not held.service.counts.running:
                await asyncio.sleep(0.001)
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            await held.settle()

    asyncio.run(run())


def test_a_cancel_that_comes_with_the_end_of_a_state_leaves_no_file_open(tmp_path):
    """Gateways end both sides of a request at once."""

    def opened():
        descriptors = Path("/proc/self/fd").iterdir()
        return [one for one in descriptors if one.is_symlink() and str(tmp_path) in os.readlink(one)]

    async def run():
        async with holder(shared=tmp_path) as held:
            growing = held.hold(40)
            growing.give(2)
            fetching = asyncio.create_task(held.fetch(growing))
            while not held.service.counts.running:
                await asyncio.sleep(0.001)
            assert opened()
            (watching,) = [one for one in asyncio.all_tasks() if one.get_coro().__name__ == "watch"]
            held.leases.drop(growing.kv_id, "not wanted")
            while not watching.cancelling() and not watching.done():
                await asyncio.sleep(0)
            # The fetch knows of the end, and gives back what it has.
            fetching.cancel()
            with contextlib.suppress(asyncio.CancelledError, StateError):
                await fetching
            await held.settle()
            assert opened() == []

    asyncio.run(run())


def test_a_holder_that_goes_down_is_one_error(shared):
    async def run():
        async with holder(shared=shared) as held:
            growing = held.hold(40)
            growing.give(2)
            fetching = asyncio.create_task(held.fetch(growing))
            while not held.service.counts.running:
                await asyncio.sleep(0.001)
            await held.server.stop(0.0)
            with pytest.raises(StateError) as refused:
                await fetching
            assert refused.value.reason == "KV_EXPIRED"

    asyncio.run(run())


def test_states_that_cannot_be_reached_or_are_of_another_model_are_refused_at_once():
    async def run():
        async with holder() as held:
            growing = held.hold(20)
            growing.finish()
            growing.handle.fingerprint = "0" * 64
            with pytest.raises(StateError) as refused:
                await held.fetch(growing)
            assert refused.value.reason == "KV_LAYOUT_MISMATCH"
            assert held.service.counts.sent_bytes == 0
            del growing.handle.endpoints[:]
            growing.handle.endpoints.append(KvEndpoint(uri="shm://elsewhere/x"))
            with pytest.raises(StateError, match="no endpoint"):
                await held.fetch(growing)

    asyncio.run(run())


async def refused(awaitable):
    """The typed error with which a call of a stub ends."""
    with pytest.raises(grpc.RpcError) as caught:
        await awaitable
    return error_from(caught.value)


def test_calls_of_the_generated_client():
    """The service speaks protobuf, however it writes it; what it refuses it names."""

    async def run():
        async with holder() as held, grpc.aio.insecure_channel(held.uri.removeprefix("grpc://")) as channel:
            stub, growing = KvTransferStub(channel), held.hold(21)
            layout = await stub.Describe(KvDescribeRequest(), timeout=9)
            assert (layout.fingerprint, layout.page_tokens, layout.layers) == (FORM.fingerprint.hex(), 8, 13)
            assert [(group.layer, group.ratio, group.entry_format) for group in layout.groups] == [
                (2, 2, "fp4_16"),
                (8, 2, "fp4_16"),
                (14, 1, "fp4_16"),
            ]
            assert not layout.HasField("progress")
            growing.give(1)
            while growing.state.complete_pages < 1:
                await asyncio.sleep(0.001)
            progress = (await stub.Describe(KvDescribeRequest(kv_id=growing.kv_id), timeout=9)).progress
            assert (progress.computed_tokens, progress.complete_pages, progress.done) == (8, 1, False)
            growing.finish()
            request = KvPullRequest(kv_id=growing.kv_id, fingerprint=FORM.fingerprint.hex())
            chunks = [chunk async for chunk in stub.Pull(request, timeout=9)]
            assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
            assert b"".join(chunk.data for chunk in chunks) == b"".join(growing.random.snapshot.values())
            progress = (await stub.Describe(KvDescribeRequest(kv_id=growing.kv_id), timeout=9)).progress
            assert (progress.computed_tokens, progress.complete_pages, progress.done) == (21, 3, True)

            def changed(**fields):
                other = KvPullRequest()
                other.CopyFrom(request)
                other.MergeFrom(KvPullRequest(**fields))
                return stub.Pull(other, timeout=9).read()

            error = await refused(stub.Describe(KvDescribeRequest(kv_id="x"), timeout=9))
            assert (type(error), error.reason) == (StateError, "KV_EXPIRED")
            error = await refused(changed(kv_id="x"))
            assert (type(error), error.reason) == (StateError, "KV_EXPIRED")
            error = await refused(changed(fingerprint="1" * 64))
            assert (type(error), error.reason) == (StateError, "KV_LAYOUT_MISMATCH")
            error = await refused(changed(groups=[3]))
            assert (type(error), error.metadata["field"]) == (InvalidRequestError, "groups")
            error = await refused(changed(chunk_bytes=1))
            assert (type(error), error.metadata["field"]) == (InvalidRequestError, "chunk_bytes")
            error = await refused(stub.Pull(request).read())
            assert error.reason == "DEADLINE_MISSING"
            most = max(section.most for section in growing.random.plan.sections if section.part == KV_PART_META)
            error = await refused(changed(resume={"section": "meta", "offset": most}))
            assert (type(error), error.metadata["field"]) == (InvalidRequestError, "resume.offset")

    asyncio.run(run())
