"""Requests that nobody should send: refused with INVALID_ARGUMENT, at no cost, by workers and through a gateway.

Real servers over tiny engines, f32, deterministic, replay mode exact. What gRPC itself refuses is said where it is.
"""

import asyncio
import contextlib
import threading

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_jax.request import SamplingParams
from serving.channels import MESSAGE_BYTES
from serving.errors import CODES
from serving.generate_call import GenerateCall
from serving.proto.deepinfer.v1 import kv_transfer_pb2, prefill_pb2
from serving.request_messages import generate_message
from serving.status import error_from
from tests.deepinfer_jax.test_engine_machine import stream
from tests.running_engines import built, receiver
from tests.serving.clusters import engine_worker, gateway
from tests.serving.fuzzed_messages import SPOILED, any_messages, damaged, leaves, methods, request_class, spoiled

PROMPT = stream(0)[:20]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SECONDS = 60.0
FINGERPRINT = bytes(32).hex()
METHODS = dict(methods())
# Which servers have a service.
SERVERS = {
    "deepinfer.v1.Inference": ("prefill", "decode", "gateway"),
    "deepinfer.v1.Prefill": ("prefill",),
    "deepinfer.v1.KvTransfer": ("prefill",),
}
CALLS = [(name, server) for name in METHODS for server in SERVERS[name.split("/")[1]]]
FEW = settings(max_examples=15, suppress_health_check=list(HealthCheck))
INVALID, OK = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OK
# What messages that are right in themselves may end with: a state that is not there, or of another model.
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


class Servers:
    """A prefill worker, a decode worker and a gateway in a thread of their own, called with bytes."""

    def __init__(self, prefill, decode, gate, loop):
        self.prefill, self.decode, self.gate, self.loop = prefill, decode, gate, loop
        addresses = {"prefill": prefill.address, "decode": decode.address, "gateway": gate.address}
        options = (("grpc.max_send_message_length", -1),)
        self.channels = {name: grpc.insecure_channel(address, options) for name, address in addresses.items()}

    def call(self, method, server, content, timeout=SECONDS, **more):
        """Status, typed error or None, and answers of a call."""
        channel = self.channels[server]
        try:
            if METHODS[method].server_streaming:
                answers = list(channel.unary_stream(method)(content, timeout=timeout, **more))
            else:
                answers = [channel.unary_unary(method)(content, timeout=timeout, **more)]
        except grpc.RpcError as error:
            return error.code(), error_from(error), []
        return OK, None, answers

    def on_loop(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def ledger(self):
        """All that a call could cost."""
        return self.on_loop(self._ledger())

    async def _ledger(self):
        def engine_books(engine):
            counts = {
                (sample.name, *sample.labels.items()): sample.value
                for metric in engine.metrics.registry.collect()
                for sample in metric.samples
                if not sample.name.endswith("_created")
            }
            return counts, engine.busy, engine.books.used_blocks, engine.books.used_slots

        books = [await worker.engine.call(engine_books) for worker in (self.prefill, self.decode)]
        states = [
            (sample.name, sample.value)
            for worker in (self.prefill, self.decode)
            for registry in worker.parts.registries[1:]
            for metric in registry.collect()
            for sample in metric.samples
            # Questions for states that are not there are counted.
            if sample.labels.get("event") != "unknown"
        ]
        inside = self.gate.service._entrance
        placed = sum(worker.account.open_requests for worker in self.gate.workers)
        return books, states, (inside.requests, inside.prompt_tokens, placed, len(self.gate.service._running))

    def rest(self):
        """Wait until nothing of any request is left."""
        for worker in (self.prefill, self.decode):
            assert self.on_loop(worker.idle())

    def release(self, kv_id):
        """Give a state back; an answer that has ended with its prompt has none."""
        if kv_id:
            request = prefill_pb2.ReleaseKvRequest(kv_id=kv_id)
            code, _, _ = self.call("/deepinfer.v1.Prefill/ReleaseKv", "prefill", request.SerializeToString())
            assert code is OK

    def good_answer(self):
        """The tokens of a good request, through the gateway and both workers."""
        code, _, answers = self.call("/deepinfer.v1.Inference/Generate", "gateway", GOOD.SerializeToString())
        assert code is OK
        response = METHODS["/deepinfer.v1.Inference/Generate"].output_type._concrete_class
        return [token for answer in answers for token in response.FromString(answer).delta.token_ids]


GOOD = generate_message(GenerateCall(PROMPT, GREEDY))


@contextlib.asynccontextmanager
async def running():
    async with (
        engine_worker("p", role="prefill", build=built) as prefill,
        engine_worker("d", role="decode", build=receiver) as decode,
        gateway(prefill.address, decode.address) as gate,
    ):
        yield prefill, decode, gate


@pytest.fixture(scope="module")
def everything():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = running()
    try:
        parts = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result()
        servers = Servers(*parts, loop)
        try:
            yield servers, servers.good_answer()
        finally:
            for channel in servers.channels.values():
                channel.close()
            asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def servers(everything):
    """Servers at rest; afterwards nothing is left, and good requests get the tokens that they got before."""
    servers, tokens = everything
    servers.rest()
    yield servers
    servers.rest()
    assert servers.good_answer() == tokens
    servers.rest()


@contextlib.contextmanager
def free(servers):
    """What happens in this context costs nothing."""
    before = servers.ledger()
    yield
    assert servers.ledger() == before


def good_message(method, kv_id=""):
    """A message that would be accepted; of a state of that id where it is about one."""
    build = request_class(METHODS[method])
    if method.endswith("/Generate"):
        return GOOD
    if method.endswith("/Prefill"):
        return prefill_pb2.PrefillRequest(request=GOOD, mode="PREFILL_MODE_FULL")
    if method.endswith("/Pull"):
        return kv_transfer_pb2.KvPullRequest(kv_id=kv_id, fingerprint=FINGERPRINT, resume={"section": "meta"})
    if method.endswith("/Offer"):
        return kv_transfer_pb2.KvOfferRequest(kv_id=kv_id or "x", fingerprint=FINGERPRINT)
    return build(**{field.name: kv_id or "x" for field in build.DESCRIPTOR.fields})


def held_state(servers):
    """The id of a state that the prefill worker holds."""
    method = "/deepinfer.v1.Prefill/Prefill"
    code, _, answers = servers.call(method, "prefill", good_message(method).SerializeToString())
    assert code is OK
    return prefill_pb2.PrefillEvent.FromString(answers[-1]).done.kv.kv_id


def test_every_call_and_every_field_is_spoiled():
    assert set(SPOILED) == set(METHODS)
    for name, (values, unlimited) in SPOILED.items():
        assert values.keys() | unlimited == set(leaves(METHODS[name].input_type)), name
        assert not values.keys() & unlimited
        assert all(values.values()), name


HANDLE = {"kv_id": "a", "endpoints": [{"uri": "grpc://127.0.0.1:1"}], "fingerprint": FINGERPRINT, "mode": 1}
HANDLE |= {"computed_tokens": len(PROMPT)}


@pytest.mark.parametrize(("method", "server"), [call for call in CALLS if SPOILED[call[0]][0]])
def test_values_that_cannot_be_are_refused_and_cost_nothing(servers, method, server):
    values, _ = SPOILED[method]
    kv_id = held_state(servers) if method.endswith("/Pull") else ""
    good = good_message(method, kv_id)
    for path, wrong in values.items():
        base = type(good)()
        base.CopyFrom(good)
        name = path.removeprefix("request.")
        if (name.startswith("kv.") or name == "first_token") and server == "decode":
            base.kv.MergeFrom(kv_transfer_pb2.KvHandle(**HANDLE))
        for value in wrong:
            message: Message = spoiled(base, path, value)
            with free(servers):
                code, error, answers = servers.call(method, server, message.SerializeToString())
            assert (code, answers) == (INVALID, []), (path, value, error)
            assert CODES[error.reason] is INVALID
            assert error.metadata["field"]
    if kv_id:
        assert servers.call(method, server, good.SerializeToString())[0] is OK
        servers.release(kv_id)


@pytest.mark.parametrize(("method", "server"), CALLS)
def test_messages_of_any_values_are_answered_or_refused(servers, method, server):
    @FEW
    @given(any_messages(METHODS[method]))
    def fuzz(message):
        _send(servers, method, server, message.SerializeToString())

    fuzz()


@pytest.mark.parametrize(("method", "server"), CALLS)
def test_any_bytes_are_answered_or_refused(servers, method, server):
    good = good_message(method).SerializeToString()

    @FEW
    @given(st.binary(max_size=200) | damaged(good))
    def fuzz(content):
        _send(servers, method, server, content)

    fuzz()


def _send(servers, method, server, content):
    before = servers.ledger()
    code, error, answers = servers.call(method, server, content)
    if code is OK:
        if method.endswith("/Prefill"):
            servers.release(prefill_pb2.PrefillEvent.FromString(answers[-1]).done.kv.kv_id)
        servers.rest()
    elif code is INVALID:
        assert CODES[error.reason] is INVALID
        assert servers.ledger() == before
    else:
        assert code is PRECONDITION, error
        assert error.reason in ("KV_EXPIRED", "KV_LAYOUT_MISMATCH")
        servers.rest()


@pytest.mark.parametrize(("method", "server"), CALLS)
def test_sizes_and_deadlines_are_demanded_of_every_call(servers, method, server):
    """Too large a message is refused by gRPC itself, with another status; packed or not."""
    good = good_message(method).SerializeToString()
    # A field that nobody knows.
    large = good + b"\xfa\x7f" + _varint(MESSAGE_BYTES) + bytes(MESSAGE_BYTES)
    with free(servers):
        code, error, _ = servers.call(method, server, good, timeout=None)
        assert (code, error.reason) == (INVALID, "DEADLINE_MISSING")
        for more in ({}, {"compression": grpc.Compression.Gzip}):
            code, error, _ = servers.call(method, server, large, **more)
            assert (code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "")


def _varint(value):
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def test_fields_that_are_not_known_change_nothing(servers):
    method, unknown = "/deepinfer.v1.Inference/Generate", b"\xfa\x7f\x03abc\x80\x7d\x05"
    for server in ("prefill", "decode", "gateway"):
        plain, more = (
            [token for answer in answers for token in _tokens(answer)]
            for _, _, answers in (
                servers.call(method, server, GOOD.SerializeToString() + tail) for tail in (b"", unknown)
            )
        )
        assert len(plain) == 4
        assert more == plain
    servers.rest()


def _tokens(answer):
    return METHODS["/deepinfer.v1.Inference/Generate"].output_type._concrete_class.FromString(answer).delta.token_ids


# Handles that are right in themselves, and states that are not there or of something else.
HANDLES = [
    ({"fingerprint": "1" * 64}, "KV_LAYOUT_MISMATCH"),
    ({"computed_tokens": 0}, "KV_LAYOUT_MISMATCH"),
    ({"computed_tokens": 19}, "KV_LAYOUT_MISMATCH"),
    ({"computed_tokens": 2**32 - 1}, "KV_LAYOUT_MISMATCH"),
    ({"mode": 2}, "KV_LAYOUT_MISMATCH"),
    ({}, "KV_EXPIRED"),
    ({"endpoints": [{"uri": "grpc://"}]}, "KV_EXPIRED"),
    ({"endpoints": [{"uri": "grpc+unix://a"}]}, "KV_EXPIRED"),
    ({"endpoints": [{"uri": "grpc://[::1"}, {"uri": "shm://a/deepinfer-kv-1"}]}, "KV_EXPIRED"),
    ({"bytes": 2**64 - 1, "pages": 2**32 - 1, "lease_expires": {"seconds": -(2**63)}}, "KV_EXPIRED"),
]


@pytest.mark.parametrize(("changes", "reason"), HANDLES)
def test_handles_of_no_state_are_one_refusal(servers, changes, reason):
    message = GOOD.__class__()
    message.CopyFrom(GOOD)
    message.kv.MergeFrom(kv_transfer_pb2.KvHandle(**HANDLE | changes))
    code, error, _ = servers.call("/deepinfer.v1.Inference/Generate", "decode", message.SerializeToString())
    assert (code, error.reason) == (PRECONDITION, reason)


def test_ids_of_nothing_are_no_state(servers):
    good = {method: good_message(method, "f" * 32).SerializeToString() for method in METHODS}
    with free(servers):
        for method in ("Describe", "Pull"):
            code, error, _ = servers.call(
                f"/deepinfer.v1.KvTransfer/{method}", "prefill", good[f"/deepinfer.v1.KvTransfer/{method}"]
            )
            assert (code, error.reason) == (PRECONDITION, "KV_EXPIRED")
        for method, server in (
            ("Inference/Abort", "gateway"),
            ("Inference/Abort", "decode"),
            ("Prefill/ReleaseKv", "prefill"),
        ):
            code, _, answers = servers.call(f"/deepinfer.v1.{method}", server, good[f"/deepinfer.v1.{method}"])
            # Neither was found.
            assert (code, answers) == (OK, [b""])
