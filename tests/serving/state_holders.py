"""A holder of states of random bits: the real table, service and server, and transports that fetch from it."""

import asyncio
import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor

from deepinfer_jax.cache.records import BlockPlanes, take_rows
from deepinfer_jax.errors import SnapshotError
from serving.grpc_transport import GrpcTransport
from serving.held_state import HeapStorage, HeldState
from serving.jax_transport import JaxTransport
from serving.kv_transfer import KvTransferService
from serving.kv_transport import KvFetcher, TransferProgress
from serving.leases import Leases
from serving.offers import Offers
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvEndpoint, KvHandle
from serving.shared_files import SharedStorage
from serving.shm_transport import ShmTransport
from serving.state_pulls import PullSettings
from tests.serving.held_states import FORM, random_state
from tests.serving.servers import started

GROUPS = (2, 8, 14)
QUICK = PullSettings(lanes=2, range_bytes=200_000, chunk_bytes=1 << 16, attempts=4, first_delay=0.01, patience=5.0)


class TamperedTransfer(KvTransferService):
    """Passes every message of a Pull through ``tamper``, an asynchronous generator of what is sent instead."""

    def __init__(self, form, leases, tamper, offers=None):
        super().__init__(form, GROUPS, leases, offers)
        self.tamper = tamper

    async def _send(self, message, kv_id, call):
        async for changed in self.tamper(message, call):
            await super()._send(changed, kv_id, call)


async def untouched(message, call):
    yield message


@dataclasses.dataclass
class Growing:
    """A state on its way out of an engine that is the test."""

    random: object
    kv_id: str
    handle: KvHandle
    state: HeldState
    given: int = 0

    def give(self, count):
        """Let the engine add some full blocks."""
        full = self.random.plan.computed // FORM.layout.block_tokens
        count = min(count, full - self.given)
        if count:
            self.state.handover.add([self.blocks(self.given, self.given + count)], count, 0)
            self.given += count

    def finish(self):
        """Let the engine add everything else."""
        blocks = FORM.layout.blocks_for(self.random.plan.computed)
        rest = [self.blocks(self.given, blocks)] if self.given < blocks else []
        self.state.handover.complete(rest, blocks - self.given, self.random.meta, self.random.slot)
        self.given = blocks

    def blocks(self, first, stop):
        """Some of the blocks as an engine reads them."""
        at = slice(first, stop)
        return BlockPlanes(take_rows(self.random.blocks.main, at), take_rows(self.random.blocks.index, at))


class Holder:
    """Holds states, and fetches them as another process would."""

    def __init__(self, leases, service, uri, shared, threads, settings, engines=None):
        self.leases, self.service, self.uri, self.shared, self.threads = leases, service, uri, shared, threads
        self.pulls = GrpcTransport(FORM, settings)
        transports = [self.pulls] if shared is None else [ShmTransport(self.pulls, threads, shared), self.pulls]
        self.engine = None
        if engines is not None:
            self.engine, receiver = engines
            transports.insert(0, JaxTransport(self.pulls, receiver, threads))
        self.fetcher = KvFetcher(transports)

    def hold(self, computed, seed=0):
        random = random_state(computed, seed)
        made = []

        def make():
            storage = HeapStorage() if self.shared is None else SharedStorage(self.shared)
            made.append(HeldState(FORM, random.plan, storage, self.threads))
            return made[0]

        kv_id = self.leases.open(make, tokens=computed, size=random.plan.most_bytes)
        endpoints = [KvEndpoint(uri=self.uri)]
        if made[0].endpoint is not None:
            endpoints.insert(0, made[0].endpoint)
        if self.engine is not None:
            endpoints.insert(0, KvEndpoint(uri=self.engine.uri))
        handle = KvHandle(
            kv_id=kv_id, endpoints=endpoints, fingerprint=FORM.fingerprint.hex(), computed_tokens=computed
        )
        return Growing(random, kv_id, handle, made[0])

    async def fetch(self, growing, seconds=60.0, progress=None):
        """Fetch a state, and compare it with what was held."""

        async def check(snapshot):
            for name, content in growing.random.snapshot.items():
                if snapshot[name] != content:
                    raise SnapshotError(name, "other content", "what was held")
            assert list(snapshot) == list(growing.random.snapshot)

        progress = progress or TransferProgress()
        return await self.fetcher.fetch(growing.handle, growing.random.plan, check, seconds=seconds, progress=progress)

    async def settle(self):
        """Wait until no Pull runs."""
        while self.service.counts.running:
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def holder(tamper=untouched, *, shared=None, settings=QUICK, engines=None, offering=None, **table):
    """A holder that holds nothing at the end.

    ``engines``: a transfer engine that offers by the settings ``offering``, and one that pulls.
    """
    leases = Leases(**({"most_bytes": 1 << 30, "most_states": 9} | table))
    offers = None if engines is None else Offers(engines[0], offering)
    service = TamperedTransfer(FORM, leases, tamper, offers)
    with ThreadPoolExecutor(2) as threads:
        async with started(service, grace=0.0) as (server, target):
            held = Holder(leases, service, f"grpc://{target}", shared, threads, settings, engines)
            held.server, held.offers = server, offers
            try:
                yield held
                await held.settle()
            finally:
                leases.drop_all("the test has ended")
                if offers is not None:
                    await offers.close()
                    assert len(offers) == 0
                await held.fetcher.close()
    assert shared is None or list(shared.iterdir()) == []
