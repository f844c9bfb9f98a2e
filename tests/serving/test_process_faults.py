"""Faults between server processes: networks and files that damage, end early or stand still; readers that do not read.

What comes out is the right tokens or one error, and everything is given back.
"""

import asyncio
import contextlib
import os
import time
from pathlib import Path

import grpc
import pytest

from deepinfer_jax.request import SamplingParams
from serving.channels import open_channel
from serving.errors import DeadlineError, OverloadedError
from serving.events import Delta
from serving.generate_call import GenerateCall
from serving.proto.deepinfer.v1.inference_pb2_grpc import InferenceStub
from serving.request_messages import generate_message
from serving.status import error_from
from tests.campaigns.cancelling import STAGES, Cancelling
from tests.campaigns.cancels import cancel
from tests.serving.bad_network import BadNetwork, Cuts, Fault, Flips, Stall
from tests.serving.process_clusters import (
    LONG_PROMPT,
    ONCE,
    PROMPT,
    SECONDS,
    SHORT,
    TWO_WAYS_CONFIGURATION,
    TWO_WAYS_CONTEXT,
    TWO_WAYS_SLOTS,
    make_model,
    running_cluster,
    tokens_of,
    two_ways,
    until,
)

WAVES = {"queued": 30, "transferring": 30, "decoding": TWO_WAYS_SLOTS, "anywhere": 20}


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    directory = tmp_path_factory.mktemp("c")
    with BadNetwork(directory / "p") as network:
        network.directory = directory
        yield network


@pytest.fixture(scope="module")
def processes(network, tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("model"), TWO_WAYS_CONTEXT)
    with running_cluster(network.directory, model, two_ways(network), TWO_WAYS_CONFIGURATION) as cluster:
        cluster.ensure()
        yield cluster


@pytest.fixture(scope="module")
def wanted(processes):
    """The tokens of the long prompt."""
    return tokens_of(processes.client("g").generate(LONG_PROMPT, SHORT, salt=b"wanted"))


@pytest.fixture
def cluster(processes, network):
    processes.ensure()
    yield processes
    network.fault = Fault()
    assert processes.idle()


def test_the_network_is_good_where_nothing_is_wrong_with_it(cluster, network, wanted):
    before = network.passed
    events = list(cluster.client("g").generate(LONG_PROMPT, SHORT, salt=b"good"))
    receipt = events[-1].receipt
    assert (receipt.prefill_worker, receipt.transport, receipt.failovers) == ("p", "grpc", 0)
    assert network.passed - before > receipt.handed_over_bytes
    assert tokens_of(events) == wanted


# Less often than a transfer tries again, and always.
MENDED = {"flipped": lambda: Flips(every=100_000, times=3), "cut": lambda: Cuts(after=150_000, times=3)}
BROKEN = {"flipped": lambda: Flips(every=400), "cut": lambda: Cuts(after=2000), "stalled": lambda: Stall(after=2000)}


@pytest.mark.parametrize("name", MENDED)
def test_a_network_that_fails_now_and_then_is_not_noticed(cluster, network, wanted, name):
    network.fault = MENDED[name]()
    events = list(cluster.client("g").generate(LONG_PROMPT, SHORT, salt=name.encode()))
    assert tokens_of(events) == wanted
    assert network.fault.times == 0
    receipt = events[-1].receipt
    assert (receipt.prefill_worker, receipt.transport, receipt.failovers) == ("p", "grpc", 0)


def test_a_network_that_stands_still_for_a_while_is_not_noticed(cluster, network, wanted):
    network.fault = Stall(after=150_000)
    events = cluster.client("g").generate(LONG_PROMPT, SHORT, salt=b"stalled")
    seen = until(events, Delta)
    while not network.fault.waiting:
        time.sleep(0.01)
    # Streams are taken for dead meanwhile.
    time.sleep(1.2)
    network.fault.over = True
    seen += list(events)
    assert tokens_of(seen) == wanted
    assert (seen[-1].receipt.prefill_worker, seen[-1].receipt.transport) == ("p", "grpc")


@pytest.mark.parametrize("name", BROKEN)
def test_what_never_comes_through_is_computed_again(cluster, network, wanted, name):
    network.fault = fault = BROKEN[name]()
    try:
        events = list(cluster.client("g").generate(LONG_PROMPT, SHORT, salt=b"never " + name.encode()))
    finally:
        fault.over = True
    assert tokens_of(events) == wanted
    # Where the prefill worker has sampled the first token, it is part of the answer.
    assert (events[-1].receipt.transport, events[-1].receipt.handed_over_bytes) == ("", 0)


def test_a_deadline_ends_what_waits_for_a_network(cluster, network):
    network.fault = fault = Stall()
    try:
        with pytest.raises(DeadlineError):
            list(cluster.client("g").generate(LONG_PROMPT, SHORT, salt=b"late", timeout=3.0))
    finally:
        fault.over = True


def flip(path):
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 8]))


def shrink(path):
    os.truncate(path, path.stat().st_size // 2)


def replace_by_one_that_does_not_grow(path):
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])


# What happens to the file of a state, and how the state comes then: pulls read the same file.
FILES = {
    "flipped": (flip, ""),
    "shrunk": (shrink, ""),
    "replaced": (replace_by_one_that_does_not_grow, "grpc"),
    "removed": (Path.unlink, "grpc"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_of_a_state_is_no_wrong_answer(cluster, wanted, name):
    damage, transport = FILES[name]
    with cluster.stopped("d"):
        events = cluster.client("h").generate(LONG_PROMPT, SHORT, salt=b"file " + name.encode())
        # The first token is there when the state is complete; nobody has looked at it yet.
        seen = until(events, Delta)
        (path,) = cluster.shared_files("s")
        damage(path)
    seen += list(events)
    path.unlink(missing_ok=True)
    assert tokens_of(seen) == wanted
    assert seen[-1].receipt.transport == transport


# Of about a tenth of a kilobyte each.
UNREAD = SamplingParams(max_tokens=6400, temperature=0.0, ignore_eos=True, logprobs=20)
OTHERS = LONG_PROMPT[:300]
CROWD = LONG_PROMPT[:1700]


class Reader:
    """A call of the gateway whose messages are read only when it is told to."""

    def __init__(self, stub, name, prompt, seconds):
        self.name = name
        call = GenerateCall(prompt, UNREAD, request_id=name, salt=os.urandom(8))
        self.call = stub.Generate(generate_message(call), timeout=seconds, metadata=call.metadata)
        self.tokens = []

    def read(self, kind):
        """Read up to the next message of a kind."""
        for message in self.call:
            self.tokens += message.delta.token_ids
            if message.WhichOneof("event") == kind:
                return
        raise AssertionError(f"no {kind}")


def shard(cluster, name):
    return cluster.client(name).load().shards[0]


def computed_reader(cluster, stub, seconds):
    """A reader that stopped while its prompt was computed; a slow machine may be told of one only when it is done."""
    for attempt in range(10):
        reader = Reader(stub, f"computing-{attempt}-{seconds}", LONG_PROMPT[:1790], seconds)
        reader.read("started")
        if shard(cluster, "p").prefill_tokens:
            return reader
        reader.call.cancel()
    raise AssertionError("every prompt was computed before anybody was told that it is")


def stopped_readers(cluster, network, stub, seconds):
    """Readers that stopped while their requests were answered, handed over, computed and queued."""
    answered = Reader(stub, f"decoding-{seconds}", PROMPT, seconds)
    answered.read("delta")
    answered.read("delta")
    assert shard(cluster, "d").running_requests == 1
    network.fault = fault = Stall()
    moved = Reader(stub, f"transferring-{seconds}", PROMPT, seconds)
    moved.read("delta")
    while not shard(cluster, "d").read_backlog_bytes:
        time.sleep(0.01)
    fault.over, network.fault = True, Fault()
    computed = computed_reader(cluster, stub, seconds)
    crowd = [Reader(stub, f"crowd-{number}-{seconds}", CROWD[number:], seconds) for number in range(TWO_WAYS_SLOTS)]
    queued = Reader(stub, f"queued-{seconds}", PROMPT, seconds)
    while not cluster.client("p").load().queued_requests:
        time.sleep(0.01)
    for reader in crowd:
        reader.call.cancel()
    return [answered, moved, computed, queued]


def test_cancels_at_every_stage_leave_nothing_behind(cluster, network):
    """The campaign of cancels, a short one."""

    async def run():
        async with Cancelling(cluster, network) as campaign:
            await cancel(campaign, 200, WAVES)
            await campaign.check()
            return campaign.cancelled

    cancelled = asyncio.run(run())
    assert all(cancelled[stage] >= 30 for stage in STAGES)


@contextlib.contextmanager
def others_are_answered(cluster, network, seconds):
    """Readers that have stopped, and others that get their answers meanwhile."""
    wanted = tokens_of(cluster.client("h").generate(OTHERS, SHORT, salt=b"others"))
    with open_channel(cluster.address("g"), ONCE, None) as channel:
        readers = stopped_readers(cluster, network, InferenceStub(channel), seconds)
        for gateway in "gh":
            answer = cluster.client(gateway).generate(OTHERS, SHORT, salt=os.urandom(8))
            assert tokens_of(answer) == wanted
        assert not {reader.name for reader in readers} & {line.get("request_id") for line in cluster.log("g")}
        yield readers


def test_readers_that_stop_at_any_stage_delay_nobody_until_their_deadlines(cluster, network):
    with others_are_answered(cluster, network, 20.0) as readers:
        # A message that waited for its reader is no failure.
        for reader in readers:
            ((_, code),) = cluster.calls("g", reader.name)
            # The client's own end may come first.
            assert code in ("DEADLINE_EXCEEDED", "CANCELLED")
        assert cluster.idle()
        for reader in readers:
            with pytest.raises(grpc.RpcError) as ended:
                reader.read("finished")
            assert isinstance(error_from(ended.value), DeadlineError)


@pytest.mark.slow
def test_readers_that_stop_at_any_stage_lose_their_requests(cluster, network):
    with others_are_answered(cluster, network, SECONDS) as readers:
        # All is given back though nobody has read anything.
        assert cluster.idle(SECONDS)
        for reader in readers:
            with pytest.raises(grpc.RpcError) as ended:
                reader.read("finished")
            error = error_from(ended.value)
            assert (type(error), error.reason) == (OverloadedError, "READER_TOO_SLOW")
            assert len(reader.tokens) > 256
