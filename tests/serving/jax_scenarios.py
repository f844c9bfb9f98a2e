"""What happens to states that JAX's transfer engine carries: each a function that is run in a process of its own.

``python -m tests.serving.jax_scenarios NAME``; a crash of the engine then ends that process, and not the tests'.
"""

import asyncio
import contextlib
import functools
import gc
import mmap
import sys
import weakref

import grpc
import numpy as np

from deepinfer_jax.cache.sections import open_section
from serving.errors import DeadlineError, InvalidRequestError, StateError
from serving.kv_transport import TransferProgress
from serving.offers import OfferSettings
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvOffered, KvOfferRequest
from serving.status import error_from
from serving.transfer_engine import TransferEngine
from tests.serving.held_states import FORM
from tests.serving.state_holders import holder

HOST = "127.0.0.1"
# Some batches a state, and nothing is waited for long.
SMALL = OfferSettings(batch_bytes=4000, most=2, seconds=30.0, patience=0.2)
COMPUTED = 70


class WatchedEngine(TransferEngine):
    """Knows what of its content is still in memory: on CPU an array is the memory that it was made of."""

    def __init__(self, host, damage=lambda content: content):
        super().__init__(host)
        self._kept, self.puts, self._damage = [], 0, damage

    def put(self, content):
        if len(content) == 1:
            return super().put(content)
        self.puts += 1
        memory = mmap.mmap(-1, len(content))
        memory[:] = self._damage(content)
        self._kept.append(weakref.ref(memory))
        return super().put(memory)

    @property
    def kept(self):
        """Contents that are still in memory."""
        gc.collect()
        return sum(memory() is not None for memory in self._kept)


@contextlib.asynccontextmanager
async def transferring(offering=SMALL, damage=lambda content: content):
    """A holder that offers, and lets everything go in the end."""
    sender, receiver = WatchedEngine(HOST, damage), TransferEngine(HOST)
    async with holder(engines=(sender, receiver), offering=offering) as held:
        yield held
    await until(lambda: sender.kept == 0)
    receiver.close()
    sender.close()


async def until(condition):
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not become true")


def complete(held, computed=COMPUTED):
    growing = held.hold(computed)
    growing.finish()
    return growing


async def ask(held, growing, first=0, **fields):
    """An offer as a receiver asks for it."""
    endpoint = next(one for one in growing.handle.endpoints if held.pulls.reaches(one))
    request = KvOfferRequest(kv_id=growing.kv_id, fingerprint=FORM.fingerprint.hex(), first=first)
    request.MergeFrom(KvOfferRequest(**fields))
    return await held.pulls.offered(endpoint, request, 30)


async def refused(awaitable):
    """The typed error with which a call ends."""
    try:
        await awaitable
    except grpc.RpcError as error:
        return error_from(error)
    raise AssertionError("the call was not refused")


async def a_state_arrives_whole_while_it_grows():
    async with transferring() as held:
        for computed, early in ((COMPUTED, (1, 2, 3)), (1, ()), (8, (1,)), (33, (4,))):
            growing, progress, pulls = held.hold(computed), TransferProgress(), held.service.counts.pulls
            fetching = asyncio.create_task(held.fetch(growing, progress=progress))
            for count in early:
                before = progress.received
                growing.give(count)
                # Pages travel before the state is complete.
                await until(lambda before=before, progress=progress: progress.received > before)
            assert not fetching.done()
            growing.finish()
            assert (await fetching).transport == "jax"
            assert progress.received == sum(map(len, growing.random.snapshot.values()))
            # The rest comes behind the last token, and says when that was.
            assert 0 < progress.exposed_bytes <= progress.received
            # It can be had again, until it is released, and nothing is kept meanwhile.
            assert (await held.fetch(growing)).transport == "jax"
            assert held.engine.kept == len(held.offers) == 0
            assert held.service.counts.pulls == pulls
            assert held.leases.release(growing.kv_id)
            with contextlib.suppress(StateError):
                await held.fetch(growing)
                raise AssertionError("a released state was fetched")
        assert held.engine.puts > 20


async def damaged_bytes_are_found_and_pulled_by_grpc():
    async def check(snapshot):
        for name, content in snapshot.items():
            open_section(name, FORM.fingerprint, content)

    for place in (0, 20, 70, 100, -1):

        def damage(content, place=place):
            changed = bytearray(content)
            changed[place] ^= 4
            return bytes(changed)

        async with transferring(damage=damage) as held:
            growing = complete(held)
            fetched = await held.fetcher.fetch(growing.handle, growing.random.plan, check, seconds=60.0)
            assert (fetched.transport, held.engine.puts > 0) == ("grpc", True)


async def offers_that_lie_are_not_pulled():
    async with transferring() as held:
        growing, service = complete(held), held.service
        for sizes in ([], [1], [1 << 40], [100] * 5000):

            async def offer(state, first, sizes=sizes):
                return KvOffered(number=5, section_bytes=sizes)

            held.offers.offer = offer
            assert (await held.fetch(growing)).transport == "grpc"
        assert service.counts.pulls > 0


async def what_nobody_pulls_is_dropped():
    """With the state, by time, and at the end of the worker."""
    async with transferring() as held:
        growing = complete(held)
        first = await ask(held, growing)
        second = await ask(held, growing, len(first.section_bytes))
        assert 0 not in {first.number, second.number}
        assert (held.engine.kept, len(held.offers)) == (2, 2)
        # No more than two, whoever asks.
        assert (await ask(held, growing)).number == 0
        assert held.engine.kept == 2
        assert held.leases.release(growing.kv_id)
        await until(lambda: held.engine.kept == len(held.offers) == 0)
    async with transferring(OfferSettings(batch_bytes=4000, seconds=0.3, patience=0.2)) as held:
        growing = complete(held)
        assert (await ask(held, growing)).number
        await until(lambda: held.engine.kept == len(held.offers) == 0)
    async with transferring() as held:
        growing = complete(held)
        assert (await ask(held, growing)).number
        await held.offers.close()
        await until(lambda: held.engine.kept == 0)


async def calls_are_checked():
    async with transferring() as held:
        growing = held.hold(COMPUTED)
        # Nothing is there yet.
        assert await ask(held, growing) == KvOffered()
        count = len(growing.random.plan.sections)
        error = await refused(ask(held, growing, count + 1))
        assert (type(error), error.metadata["field"]) == (InvalidRequestError, "first")
        assert await ask(held, growing, count, taken=[1, 2, 3]) == KvOffered()
        error = await refused(ask(held, growing, fingerprint="x"))
        assert (type(error), error.reason) == (StateError, "KV_LAYOUT_MISMATCH")
        error = await refused(ask(held, growing, kv_id="x"))
        assert (type(error), error.reason) == (StateError, "KV_EXPIRED")


async def a_receiver_that_dies_leaves_nothing_behind():
    """Killed before it pulls, in the middle, and behind it; the holder serves the next one."""
    async with transferring() as held:
        for seconds in (0.0, 0.0, 0.005, 0.01, 0.02, 0.05, 0.2):
            number = held.engine.offer(held.engine.put(bytes(64 << 20)), 600.0)
            command = [sys.executable, "-m", "tests.serving.jax_scenarios", "pull", held.engine.address, str(number)]
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            assert await process.stdout.readline() == b"begun\n"
            await asyncio.sleep(seconds)
            process.kill()
            await process.wait()
            held.engine.withdraw(number)
            await until(lambda: held.engine.kept == 0)
        growing = complete(held)
        assert (await held.fetch(growing)).transport == "jax"


async def where_pulls_fail_grpc_is_used_and_the_address_avoided():
    async with transferring() as held:
        jax = held.fetcher._transports[0]
        jax._patience = 0.5
        growing = complete(held)
        for address in (f"{HOST}:1", "192.0.2.1:9", "[::1]:9", "nowhere", f"{HOST}:0"):
            growing.handle.endpoints[0].uri = f"jax://{address}"
            reached = address == f"{HOST}:1"
            assert jax.reaches(growing.handle.endpoints[0]) == reached
            assert (await held.fetch(growing)).transport == "grpc"
            assert not jax.reaches(growing.handle.endpoints[0])
        # A worker that has such an endpoint no more.
        growing.handle.endpoints[0].uri = held.engine.uri
        held.service._offers = None
        assert (await held.fetch(growing)).transport == "grpc"
        assert jax.reaches(growing.handle.endpoints[0])


async def a_pull_that_is_not_answered_ends():
    async with transferring() as held:
        jax, growing = held.fetcher._transports[0], complete(held)
        jax._patience = 0.5
        held.engine.offer = lambda content, seconds: 77
        assert (await held.fetch(growing)).transport == "grpc"
        assert not jax.reaches(growing.handle.endpoints[0])


async def a_deadline_and_a_cancel_end_everything():
    async with transferring() as held:
        growing = held.hold(COMPUTED)
        growing.give(2)
        with contextlib.suppress(DeadlineError):
            await held.fetch(growing, seconds=0.5)
            raise AssertionError("a state arrived that was never complete")
        progress = TransferProgress()
        fetching = asyncio.create_task(held.fetch(growing, progress=progress))
        await until(lambda: progress.received)
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        assert held.service.counts.pulls == 0
        held.leases.drop(growing.kv_id, "the engine failed")
        await until(lambda: held.engine.kept == len(held.offers) == 0)


async def many_are_fetched_at_once():
    async with transferring() as held:
        states = [complete(held, computed) for computed in (70, 40, 9, 70, 33)]
        fetched = await asyncio.gather(*map(held.fetch, states))
        assert {one.transport for one in fetched} == {"jax"}


async def pull(address, number):
    """Not a scenario: the process that is killed."""
    engine = TransferEngine(HOST)
    pulling = asyncio.create_task(engine.pull(address, int(number), 64 << 20))
    await asyncio.sleep(0)
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    content = engine.read(await pulling)
    assert not np.frombuffer(content, np.uint8).any()
    await asyncio.sleep(60)


SCENARIOS = (
    a_state_arrives_whole_while_it_grows,
    damaged_bytes_are_found_and_pulled_by_grpc,
    offers_that_lie_are_not_pulled,
    what_nobody_pulls_is_dropped,
    calls_are_checked,
    a_receiver_that_dies_leaves_nothing_behind,
    where_pulls_fail_grpc_is_used_and_the_address_avoided,
    a_pull_that_is_not_answered_ends,
    a_deadline_and_a_cancel_end_everything,
    many_are_fetched_at_once,
)

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    found = {function.__name__: function for function in (*SCENARIOS, pull)}[name]
    asyncio.run(functools.partial(found, *arguments)())
