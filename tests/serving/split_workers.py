"""A prefill worker and a decode worker in one process, over the shared tiny engines, and a caller of both."""

import asyncio
import contextlib
import dataclasses

import grpc

from deepinfer_jax.async_engine import AsyncEngine
from deepinfer_jax.request import Logprob
from serving.answer_stream import AnswerReader
from serving.arrivals import DEFAULT_MOST_BYTES
from serving.event_messages import delta_event, finished_event
from serving.events import Collector, Finished
from serving.generate_call import GenerateCall
from serving.inference import InferenceService
from serving.model_info import model_info
from serving.prefill_worker import HoldingSettings, PrefillWorker
from serving.proto.deepinfer.v1 import inference_pb2_grpc, kv_transfer_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from serving.receiving import ReceivingSettings, receiving
from serving.request_messages import generate_message
from serving.server import Server
from serving.state_pulls import PullSettings
from serving.status import error_from
from tests.running_engines import built, fresh_engine, receiver

SECONDS = 60.0
FULL, ENCODER_ONLY = "PREFILL_MODE_FULL", "PREFILL_MODE_ENCODER_ONLY"
# Small, so that states of tiny models take several of each.
PULLS = PullSettings(lanes=2, range_bytes=20_000, chunk_bytes=1 << 16, attempts=3, first_delay=0.01, patience=2.0)


@dataclasses.dataclass
class Whole:
    """The answer of a split request."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Logprob] = dataclasses.field(default_factory=list)
    finished: Finished | None = None
    prefilled: prefill_pb2.PrefillDone | None = None


class Split:
    """Two workers and the stubs of their services."""

    def __init__(self, prefill_engine, decode_engine, worker, arrivals, prefill_target, decode_target):
        self.prefill_engine, self.decode_engine = prefill_engine, decode_engine
        self.worker, self.arrivals = worker, arrivals
        self._channels = [grpc.aio.insecure_channel(target) for target in (prefill_target, decode_target)]
        self.prefill = prefill_pb2_grpc.PrefillStub(self._channels[0])
        self.transfer = kv_transfer_pb2_grpc.KvTransferStub(self._channels[0])
        self.inference = inference_pb2_grpc.InferenceStub(self._channels[1])

    async def close(self):
        for channel in self._channels:
            await channel.close()

    def begin(self, call, mode=FULL, seconds=SECONDS):
        """The stream of a prompt."""
        request = prefill_pb2.PrefillRequest(request=generate_message(call), mode=mode)
        return self.prefill.Prefill(request, timeout=seconds)

    def go_on(self, call, handle, seconds=SECONDS, **more):
        """The stream of an answer behind a state."""
        params = dataclasses.replace(call.params, prompt_logprobs=None)
        call = dataclasses.replace(call, kv=handle, params=params, **more)
        return self.inference.Generate(generate_message(call), timeout=seconds)

    async def ask(self, call, mode=FULL, seconds=SECONDS) -> Whole:
        """A whole answer; the state is fetched while it is computed."""
        whole, prompt = Whole(), self.begin(call, mode, seconds)
        accepted = await self.next(prompt)
        decoding = asyncio.create_task(self.collect(self.go_on(call, accepted.accepted.kv, seconds), call))
        try:
            while (event := await self.next(prompt)) is not None:
                if event.WhichOneof("event") == "done":
                    whole.prefilled = event.done
            done = whole.prefilled
            if done.HasField("first"):
                first = delta_event(done.first)
                whole.tokens += first.tokens
                whole.logprobs += first.logprobs
            if done.HasField("finished"):
                whole.finished = finished_event(done.finished)
                return whole
            answer = await decoding
        finally:
            decoding.cancel()
            await asyncio.gather(decoding, return_exceptions=True)
        whole.tokens += answer.tokens
        whole.logprobs += answer.logprobs
        whole.finished = answer.finished
        return whole

    async def release(self, kv_id):
        """Give a state back. Returns whether it was held."""
        request = prefill_pb2.ReleaseKvRequest(kv_id=kv_id)
        return (await self.prefill.ReleaseKv(request, timeout=SECONDS)).released

    async def next(self, stream):
        """The next message; None behind the last one."""
        try:
            message = await stream.read()
        except grpc.RpcError as error:
            raise error_from(error) from error
        return None if message is grpc.aio.EOF else message

    async def collect(self, stream, call):
        """All events of an answer."""
        reader, collector = AnswerReader(call.prompt), Collector()
        while (message := await self.next(stream)) is not None:
            collector.add(reader.event(message))
        reader.end()
        return collector.answer()

    async def settled(self):
        """Wait until nothing is held anywhere."""
        for engine in (self.prefill_engine, self.decode_engine):
            while await engine.call(lambda inner: inner.busy):
                await asyncio.sleep(0.01)
            used = await engine.call(lambda inner: (inner.books.used_blocks, inner.books.used_slots))
            assert used == (0, 0)
        while len(self.worker.leases) or self.worker.transfer.counts.running:
            await asyncio.sleep(0.01)
        assert (self.worker.leases.bytes, self.worker.leases.tokens, self.arrivals.bytes) == (0, 0, 0)


def describe(engine, **more):
    return model_info(
        engine,
        model="tiny",
        weights_id="",
        numerics="f32",
        fingerprint=engine.receiver.form.fingerprint,
        stop_strings=False,
        **more,
    )


@contextlib.asynccontextmanager
async def served(services):
    """The target of a server of some services."""
    server = Server(services)
    port = await server.start("127.0.0.1:0")
    await server.ready()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0.0)


@contextlib.asynccontextmanager
async def split(
    numerics="f32",
    decoder="off",
    *,
    sender=built,
    holding=None,
    shared=None,
    pulls=PULLS,
    changes=lambda transports: transports,
    wrap=lambda services: services,
    decoding=None,
    arriving_bytes=DEFAULT_MOST_BYTES,
    **more,
):
    """Two workers, which hold nothing at the end.

    ``shared``: directory of shared files; ``changes`` may replace transports, ``wrap`` what the prefill worker serves.
    ``decoding``: changed settings of the decode worker's engine; ``arriving_bytes``: of states on their way to it.
    """
    first = fresh_engine(numerics, decoder, build=sender, **more)
    second = fresh_engine(numerics, decoder, build=receiver, **(decoding or {}))
    holding = dataclasses.replace(holding or HoldingSettings(), shared=shared)
    taking = ReceivingSettings(pulls=pulls, most_bytes=arriving_bytes, shared=shared)
    with AsyncEngine(first) as prefill_engine, AsyncEngine(second) as decode_engine:
        info = describe(first, worker="prefill", role="prefill")
        worker = PrefillWorker(prefill_engine, first.config, first.settings, info, holding)
        async with (
            receiving(second.receiver, second.settings.replay, taking, changes=changes) as arrivals,
            worker,
            served(wrap(worker.services())) as prefill_target,
        ):
            worker.advertise([f"grpc://{prefill_target}"])
            info = describe(second, worker="decode", role="decode", kv_handles=True)
            answers = InferenceService(decode_engine, info, arrivals=arrivals)
            async with served([answers.service()]) as target:
                workers = Split(prefill_engine, decode_engine, worker, arrivals, prefill_target, target)
                try:
                    yield workers
                    await workers.settled()
                finally:
                    await workers.close()
        if shared is not None:
            assert list(shared.iterdir()) == []


__all__ = ["ENCODER_ONLY", "FULL", "GenerateCall", "HoldingSettings", "Split", "Whole", "split"]
