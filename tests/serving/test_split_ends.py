"""However a split request ends, everything is given back: slots, blocks, leases, files; and the caller is told once.

Two workers over tiny f32 engines with compact decoder replay. Every test ends by waiting until nothing is held.
"""

import asyncio
import dataclasses
import math
import threading
import time

import grpc
import pytest

from deepinfer_jax.request import Request, SamplingParams
from serving.errors import (
    CallCancelledError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    ServingError,
    StateError,
    UnavailableError,
)
from serving.event_messages import delta_event, prompt_logprobs_event
from serving.generate_call import GenerateCall
from serving.held_state import HeldState
from serving.kv_sections import StatePlan
from serving.kv_transport import TransportError
from serving.proto.deepinfer.v1 import inference_pb2, inference_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvHandle
from serving.request_messages import generate_message
from serving.status import error_from
from tests.deepinfer_jax.test_engine_machine import alone, stream
from tests.running_engines import KEEP, encoder, fresh_engine, receiver
from tests.serving.clusters import Throttle, engine_worker, eventually
from tests.serving.split_workers import ENCODER_ONLY, FULL, HoldingSettings, split

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
LONG = dataclasses.replace(GREEDY, max_tokens=30)
CALL = GenerateCall(stream(0)[:60], GREEDY)


@pytest.fixture(params=["grpc", "shm"])
def shared(request, tmp_path):
    """The directory of shared files, where states go by them."""
    return tmp_path if request.param == "shm" else None


class Gate:
    """A transport in front of the others that waits until it is opened, or fails."""

    def __init__(self, transports):
        self.name, self._transports = "gate", transports
        self.waiting, self.opened = asyncio.Event(), asyncio.Event()
        self.failure = self.progress = None

    def reaches(self, endpoint):
        return any(transport.reaches(endpoint) for transport in self._transports)

    async def fetch(self, handle, endpoint, plan, *, deadline, progress):
        self.progress = progress
        self.waiting.set()
        await self.opened.wait()
        if self.failure is not None:
            raise self.failure
        (transport,) = [one for one in self._transports if one.reaches(endpoint)][:1]
        return await transport.fetch(handle, endpoint, plan, deadline=deadline, progress=progress)

    async def close(self):
        for transport in self._transports:
            await transport.close()


class Gates(list):
    """Puts a gate in front of the transports of a worker."""

    def __call__(self, transports):
        self.append(Gate(transports))
        return self


async def handle_of(workers, call, mode=FULL):
    """The handle of a prompt that is computed, and the last event."""
    prompt = workers.begin(call, mode)
    events = []
    while (event := await workers.next(prompt)) is not None:
        events.append(event)
    assert events[0].WhichOneof("event") == "accepted"
    assert events[-1].WhichOneof("event") == "done"
    assert [event.WhichOneof("event") for event in events].count("done") == 1
    return events[-1].done.kv, events


async def hold_engine(workers, engine):
    """Let an engine wait between two steps until the returned event is set."""
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait(inner):
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

    holding = asyncio.create_task(engine.call(wait))
    await asyncio.sleep(0)
    return release, holding


async def ended(stream):
    """Read a stream that was cancelled until it says so."""
    with pytest.raises(asyncio.CancelledError):
        await drain(stream)


async def drain(stream):
    """Read a stream to its end."""
    try:
        while await stream.read() is not grpc.aio.EOF:
            pass
    except grpc.RpcError as error:
        raise error_from(error) from error


def test_a_caller_that_leaves_at_any_stage_leaves_nothing_behind(shared):
    async def run():
        gates = Gates()
        async with split("f32", "compact", shared=shared, changes=gates) as workers:
            # Before the engine has heard of it.
            release, holding = await hold_engine(workers, workers.prefill_engine)
            prompt = workers.begin(CALL)
            while not len(workers.worker.leases):
                await asyncio.sleep(0.001)
            prompt.cancel()
            await ended(prompt)
            release.set()
            await holding
            await workers.settled()
            # While it waits behind others, and while it is computed.
            crowd = [workers.begin(dataclasses.replace(CALL, prompt=stream(1)[: 50 + place])) for place in range(6)]
            handles = [(await workers.next(prompt)).accepted.kv for prompt in crowd]
            for prompt in reversed(crowd):
                prompt.cancel()
                await ended(prompt)
            # Some may have been done before they were cancelled.
            for handle in handles:
                await workers.release(handle.kv_id)
            await workers.settled()
            # While its state is fetched.
            handle, _ = await handle_of(workers, CALL)
            answer = workers.go_on(CALL, handle)
            (gate,) = gates
            await gate.waiting.wait()
            answer.cancel()
            await ended(answer)
            await workers.settled()
            # While it is answered.
            gate.opened.set()
            handle, _ = await handle_of(workers, CALL)
            answer = workers.go_on(dataclasses.replace(CALL, params=LONG), handle)
            assert (await workers.next(answer)).HasField("started")
            assert (await workers.next(answer)).HasField("delta")
            answer.cancel()
            await ended(answer)
            await workers.settled()
            # All that came to nothing; what comes next is right.
            (wanted,) = alone("f32", "compact", Request(CALL.prompt, CALL.params))
            assert (await workers.ask(CALL)).tokens == wanted.tokens

    # Engines of one kind share a device: the lone one must have run before.
    alone("f32", "compact", Request(CALL.prompt, CALL.params))
    asyncio.run(run())


def test_abort_ends_a_request_whose_state_is_on_its_way():
    async def run():
        gates = Gates()
        async with split("f32", "compact", changes=gates) as workers:
            handle, _ = await handle_of(workers, CALL)
            answer = workers.go_on(CALL, handle, request_id="mine")
            await gates[0].waiting.wait()
            found = await workers.inference.Abort(inference_pb2.AbortRequest(request_id="mine"), timeout=9)
            assert found.found
            collected = await workers.collect(answer, CALL)
            assert (collected.tokens, collected.finished.reason) == ((), "cancelled")

    asyncio.run(run())


def test_a_state_that_does_not_come_is_one_error_and_is_given_back():
    async def run():
        gates = Gates()
        async with split("f32", "compact", changes=gates) as workers:
            gates[0].opened.set()
            for failure, kind, reason in (
                (TransportError("KV_EXPIRED", "lost"), StateError, "KV_EXPIRED"),
                (TransportError("KV_DAMAGED", "damaged"), StateError, "KV_DAMAGED"),
            ):
                gates[0].failure = failure
                handle, _ = await handle_of(workers, CALL)
                with pytest.raises(kind) as refused:
                    await workers.collect(workers.go_on(CALL, handle), CALL)
                assert refused.value.reason == reason
                await workers.settled()

    asyncio.run(run())


def test_deadlines_reach_both_workers():
    async def run():
        gates = Gates()
        async with split("f32", "compact", changes=gates) as workers:
            release, holding = await hold_engine(workers, workers.prefill_engine)
            prompt = workers.begin(CALL, seconds=0.3)
            with pytest.raises(DeadlineError):
                await drain(prompt)
            release.set()
            await holding
            await workers.settled()
            handle, _ = await handle_of(workers, CALL)
            with pytest.raises(DeadlineError):
                await workers.collect(workers.go_on(CALL, handle, seconds=0.3), CALL)
            await workers.settled()

    asyncio.run(run())


def test_an_engine_ends_a_late_prompt_though_its_server_hears_of_nothing():
    async def run():
        async with split("f32", "compact") as workers:
            inner = await workers.prefill_engine.call(lambda inner: inner)
            throttle = Throttle(inner)
            throttle.allow(0)
            prompt = workers.begin(CALL, seconds=1.5)
            assert (await workers.next(prompt)).HasField("accepted")
            # The event loop stands still meanwhile.
            time.sleep(1.6)
            throttle.allow(math.inf)
            while inner.busy:
                time.sleep(0.001)
            assert inner.metrics.value("finished_requests_total", reason="deadline") == 1
            with pytest.raises(DeadlineError):
                await drain(prompt)

    asyncio.run(run())


def test_releasing_ends_a_computation_and_a_state():
    async def run():
        async with split("f32", "compact") as workers:
            throttle = await workers.prefill_engine.call(Throttle)
            throttle.allow(0)
            prompt = workers.begin(CALL)
            handle = (await workers.next(prompt)).accepted.kv
            assert await workers.release(handle.kv_id)
            throttle.allow(math.inf)
            with pytest.raises(CallCancelledError):
                await drain(prompt)
            handle, _ = await handle_of(workers, CALL)
            assert await workers.release(handle.kv_id)
            assert not await workers.release(handle.kv_id)
            assert not await workers.release("never")
            with pytest.raises(StateError) as refused:
                await workers.collect(workers.go_on(CALL, handle), CALL)
            assert refused.value.reason == "KV_EXPIRED"

    asyncio.run(run())


async def receive_first(workers, released):
    """Have a prompt answered whose engine ends the step that hands it over only behind the event of its release."""

    def hold_news(engine):
        step = engine.step

        def late():
            news = step()
            assert not any(output.finish_reason for output in news) or released.wait(60)
            return news

        engine.step = late

    await workers.prefill_engine.call(hold_news)
    prompt = workers.begin(CALL)
    handle = (await workers.next(prompt)).accepted.kv
    answering = asyncio.create_task(workers.collect(workers.go_on(CALL, handle), CALL))
    await eventually(lambda: workers.worker.leases.counts.released == 1)
    released.set()
    while (event := await workers.next(prompt)) is not None:
        last = event
    assert last.done.kv.kv_id == handle.kv_id
    assert last.done.receipt.prefill_worker == "prefill"
    (wanted,) = alone("f32", "compact", Request(CALL.prompt, GREEDY))
    assert [*delta_event(last.done.first).tokens, *(await answering).tokens] == wanted.tokens


def test_a_state_may_be_received_before_its_prompt_is_said_to_be_done(shared):
    """The engine's step goes on, perhaps for long, behind the state that it has handed over."""

    async def run():
        async with split("f32", "compact", shared=shared) as workers:
            await receive_first(workers, threading.Event())

    asyncio.run(run())


def test_a_state_may_be_received_before_its_holder_knows_that_it_is_whole(tmp_path, monkeypatch):
    """A file has all of it at once; the thread that wrote it may be late to say so."""
    released, seal_end = threading.Event(), HeldState._seal_end

    def late(state, first, stop):
        seal_end(state, first, stop)
        assert released.wait(60)

    async def run():
        async with split("f32", "compact", shared=tmp_path) as workers:
            monkeypatch.setattr(HeldState, "_seal_end", late)
            await receive_first(workers, released)

    asyncio.run(run())


def test_leases_end_by_themselves_and_there_is_room_for_so_many():
    async def run():
        holding = HoldingSettings(lease_seconds=0.2, most_states=2)
        async with split("f32", "compact", holding=holding) as workers:
            leases = workers.worker.leases
            await handle_of(workers, CALL)
            while len(leases):
                await asyncio.sleep(0.01)
            assert leases.counts.expired == 1
            release, waiting = await hold_engine(workers, workers.prefill_engine)
            prompts = [workers.begin(CALL) for _ in range(2)]
            while len(leases) < 2:
                await asyncio.sleep(0.001)
            with pytest.raises(OverloadedError) as refused:
                await workers.next(workers.begin(CALL))
            assert (refused.value.reason, refused.value.retry_after) == ("KV_POOL_EXHAUSTED", 1.0)
            for prompt in prompts:
                prompt.cancel()
            release.set()
            await waiting
        async with split("f32", "compact", holding=HoldingSettings(most_bytes=1000)) as workers:
            with pytest.raises(InvalidRequestError) as refused:
                await workers.next(workers.begin(CALL))
            assert refused.value.reason == "CONTEXT_TOO_LONG"

    asyncio.run(run())


def test_an_engine_that_is_full_leaves_a_state_where_it_is():
    async def run():
        async with split("f32", "compact", decoding={"max_waiting": 1}) as workers:
            handle, _ = await handle_of(workers, CALL)
            engine = workers.decode_engine
            release, holding = await hold_engine(workers, engine)
            while engine._orders:
                await asyncio.sleep(0.001)
            other = engine.stream(Request(CALL.prompt, CALL.params))
            waiting = asyncio.create_task(anext(other))
            answer = workers.go_on(CALL, handle)
            # Both are asked for between the same two steps.
            while len(engine._orders) < 2:
                await asyncio.sleep(0.001)
            release.set()
            await holding
            with pytest.raises(OverloadedError, match="QUEUE_FULL"):
                await workers.collect(answer, CALL)
            await waiting
            await other.aclose()
            while workers.arrivals._releasing:
                await asyncio.sleep(0.001)
            # Another worker may take it.
            assert len(workers.worker.leases) == 1
            assert len((await workers.collect(workers.go_on(CALL, handle), CALL)).tokens) == 7

    asyncio.run(run())


def test_there_is_room_for_so_many_bytes_on_their_way():
    form = fresh_engine("f32", "compact").receiver.form
    size = StatePlan.of(form, len(CALL.prompt), len(CALL.prompt) + 1).most_bytes

    async def run():
        gates = Gates()
        async with split("f32", "compact", changes=gates, arriving_bytes=2 * size - 1) as workers:
            handles = [(await handle_of(workers, CALL))[0] for _ in range(2)]
            answer = workers.go_on(CALL, handles[0])
            await gates[0].waiting.wait()
            with pytest.raises(ServingError) as refused:
                await workers.collect(workers.go_on(CALL, handles[1], seconds=5.0), CALL)
            assert (refused.value.reason, refused.value.retry_after) == ("KV_POOL_EXHAUSTED", 1.0)
            assert len(workers.worker.leases) == 2
            gates[0].opened.set()
            assert len((await workers.collect(answer, CALL)).tokens) == 7
            assert len((await workers.collect(workers.go_on(CALL, handles[1]), CALL)).tokens) == 7

    asyncio.run(run())


def test_a_prefill_worker_that_is_told_to_end_waits_until_its_states_were_fetched():
    (wanted,) = alone("f32", "off", Request(CALL.prompt, CALL.params))

    async def run():
        async with (
            engine_worker("p", role="prefill") as prefill,
            engine_worker("d", role="decode", build=receiver) as decode,
            grpc.aio.insecure_channel(prefill.address) as first,
            grpc.aio.insecure_channel(decode.address) as second,
        ):
            request = prefill_pb2.PrefillRequest(request=generate_message(CALL), mode=FULL)
            prompts = prefill_pb2_grpc.PrefillStub(first)
            done = [event async for event in prompts.Prefill(request, timeout=60)][-1].done
            stopping = asyncio.create_task(prefill.server.stop(60.0, prefill.parts.settled))
            await eventually(lambda: prefill.server.guard.draining)
            with pytest.raises(UnavailableError, match="DRAINING"):
                await drain(prompts.Prefill(request, timeout=60))
            message = generate_message(dataclasses.replace(CALL, kv=done.kv))
            answer = inference_pb2_grpc.InferenceStub(second).Generate(message, timeout=60)
            tokens = [token async for event in answer for token in event.delta.token_ids]
            await stopping
            return [*done.first.token_ids, *tokens]

    assert asyncio.run(run()) == wanted.tokens


def test_events_of_a_prompt_say_what_there_is():
    scored = GenerateCall(stream(2)[:50], dataclasses.replace(GREEDY, prompt_logprobs=1))
    (wanted,) = alone("f32", "compact", Request(scored.prompt, scored.params))
    (again,) = alone("f32", "compact", Request(CALL.prompt, CALL.params))

    async def run():
        async with split("f32", "compact") as workers:
            handle, events = await handle_of(workers, scored)
            accepted, done = events[0].accepted.kv, events[-1].done
            assert (accepted.kv_id, accepted.pages, accepted.computed_tokens) == (handle.kv_id, 4, 50)
            assert accepted.bytes >= handle.bytes > 0
            assert [endpoint.uri for endpoint in handle.endpoints] == [accepted.endpoints[0].uri]
            # One that is computed is held for the call's time and a lease, and then for a lease.
            now = time.time()
            assert now < handle.lease_expires.ToNanoseconds() / 1e9 <= now + workers.worker.leases.seconds
            assert accepted.lease_expires.ToNanoseconds() > handle.lease_expires.ToNanoseconds()
            assert (handle.worker, handle.mode, len(handle.fingerprint)) == ("prefill", 1, 64)
            told = [event.progress.computed_tokens for event in events if event.HasField("progress")]
            assert told == sorted(set(told))
            (scores,) = [event.prompt_logprobs for event in events if event.HasField("prompt_logprobs")]
            assert prompt_logprobs_event(scores, scored.prompt).logprobs == wanted.prompt_logprobs
            assert list(done.first.token_ids) == wanted.tokens[:1]
            assert (done.receipt.worker, done.receipt.computed_tokens) == ("prefill", 50)
            answer = await workers.collect(workers.go_on(scored, handle, first_token=wanted.tokens[0]), scored)
            assert list(answer.tokens) == wanted.tokens[1:]
            # The same prompt again, and one that ends at once.
            await workers.ask(CALL)
            handle, events = await handle_of(workers, CALL)
            assert events[-1].done.receipt.hit_tokens == 48
            assert {event.progress.cached_tokens for event in events if event.HasField("progress")} <= {48}
            assert list(events[-1].done.first.token_ids) == again.tokens[:1]
            workers.worker.leases.drop(handle.kv_id, "not wanted")
            one = dataclasses.replace(CALL, params=dataclasses.replace(GREEDY, max_tokens=1))
            handle, events = await handle_of(workers, one)
            done = events[-1].done
            assert not done.HasField("kv")
            assert (done.finished.reason, done.finished.completion_tokens) == (2, 1)
            assert list(done.first.token_ids) == again.tokens[:1]

    asyncio.run(run())


def test_a_prompt_that_is_computed_at_once_is_accepted_first():
    """An event loop that has much to do learns of a prompt's beginning and of its end at the same time."""

    async def run():
        async with split() as workers:
            engine = workers.prefill_engine
            stream_of = engine.stream

            def late(request, submitted_as, **how):
                def submitted(number):
                    submitted_as(number)
                    while engine._streams:
                        time.sleep(0.001)

                return stream_of(request, submitted, **how)

            engine.stream = late
            events = [event async for event in workers.begin(CALL)]
            assert [event.WhichOneof("event") for event in events] == ["accepted", "done"]
            assert await workers.release(events[0].accepted.kv.kv_id)

    asyncio.run(run())


REFUSALS = [
    ({"mode": 0}, "mode", "INVALID_FIELD"),
    ({"mode": 9}, "mode", "INVALID_FIELD"),
    ({"request": {"kv": KvHandle(kv_id="x")}}, "request.kv", "INVALID_FIELD"),
    ({"request": {"first_token": 3}}, "request.first_token", "INVALID_FIELD"),
    ({"request": {"prompt_len": 3}}, "request.prompt_len", "INVALID_FIELD"),
    ({"request": {"max_tokens": 0}}, "max_tokens", "INVALID_FIELD"),
    ({"request": {"max_tokens": 1000}}, "prompt_token_ids and max_tokens", "CONTEXT_TOO_LONG"),
    ({"request": {"cache": {"write": False}}}, "cache.write", "NOT_SUPPORTED"),
]


def test_prompts_that_cannot_be_computed_are_refused_and_cost_nothing():
    async def run():
        async with split("f32", "compact") as workers:
            for changes, field, reason in REFUSALS:
                request = prefill_pb2.PrefillRequest(request=generate_message(CALL))
                request.MergeFrom(prefill_pb2.PrefillRequest(**({"mode": FULL} | changes)))
                with pytest.raises(grpc.RpcError) as refused:
                    await workers.prefill.Prefill(request, timeout=9).read()
                error = error_from(refused.value)
                assert (error.reason, error.metadata["field"]) == (reason, field)
            with pytest.raises(InvalidRequestError):
                await workers.next(workers.begin(dataclasses.replace(CALL, prompt=stream(0)[:KEEP]), ENCODER_ONLY))
            with pytest.raises(grpc.RpcError) as refused:
                await workers.prefill.Prefill(prefill_pb2.PrefillRequest()).read()
            assert error_from(refused.value).reason == "DEADLINE_MISSING"
        async with split("f32", "compact", sender=encoder) as workers:
            with pytest.raises(InvalidRequestError) as refused:
                await workers.next(workers.begin(CALL))
            assert refused.value.reason == "NOT_SUPPORTED"

    asyncio.run(run())


def test_states_of_other_prompts_are_refused():
    async def run():
        async with split("f32", "compact") as workers:
            for changed, field in (
                ({"fingerprint": "0" * 63 + "1"}, "kv.fingerprint"),
                ({"computed_tokens": 59}, "kv.computed_tokens"),
                ({"mode": 2}, "kv.computed_tokens"),
            ):
                handle, _ = await handle_of(workers, CALL)
                other = KvHandle()
                other.CopyFrom(handle)
                other.MergeFrom(KvHandle(**changed))
                with pytest.raises(StateError) as refused:
                    await workers.collect(workers.go_on(CALL, other), CALL)
                # By the receiver; the holder, which would refuse it as well, has other names for its fields.
                assert (refused.value.reason, refused.value.metadata["field"]) == ("KV_LAYOUT_MISMATCH", field)
                # Nothing was done, and another worker may take it.
                assert workers.worker.leases.release(handle.kv_id)
            for changed in ({"first_token": 5}, {"prompt": (*CALL.prompt[:-1], 4)}, {"answer": (4,)}):
                handle, _ = await handle_of(workers, CALL)
                with pytest.raises(InvalidRequestError):
                    await workers.collect(workers.go_on(dataclasses.replace(CALL, **changed), handle), CALL)
                workers.worker.leases.release(handle.kv_id)

    asyncio.run(run())


def test_an_engine_that_ends_is_said_so():
    async def run():
        async with split("f32", "compact") as workers:
            await asyncio.to_thread(workers.prefill_engine.close)
            with pytest.raises(UnavailableError) as refused:
                await workers.next(workers.begin(CALL))
            assert refused.value.reason == "ENGINE_STOPPED"
            assert len(workers.worker.leases) == 0
            workers.prefill_engine = workers.decode_engine

    asyncio.run(run())


def test_load_counts_what_is_held_and_what_is_to_come():
    async def run():
        gates = Gates()
        async with split("f32", "compact", changes=gates) as workers:
            handle, _ = await handle_of(workers, CALL)
            answer = workers.go_on(CALL, handle)
            await gates[0].waiting.wait()
            load = await workers.inference.GetLoad(inference_pb2.GetLoadRequest(), timeout=9)
            backlog = load.shards[0].read_backlog_bytes
            assert backlog >= handle.bytes
            # What has come is none any more.
            gates[0].progress.add(1000)
            load = await workers.inference.GetLoad(inference_pb2.GetLoadRequest(), timeout=9)
            assert load.shards[0].read_backlog_bytes == backlog - 1000
            gates[0].progress.restart()
            assert (len(workers.worker.leases), workers.worker.leases.tokens) == (1, 60)
            gates[0].opened.set()
            await workers.collect(answer, CALL)
            load = await workers.inference.GetLoad(inference_pb2.GetLoadRequest(), timeout=9)
            assert load.shards[0].read_backlog_bytes == 0

    asyncio.run(run())
