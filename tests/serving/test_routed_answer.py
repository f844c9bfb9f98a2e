"""Where a gateway sends what, and what it does when workers fail: workers that follow a script, over real gRPC."""

import asyncio
import contextlib
import dataclasses

import grpc
import pytest

from deepinfer_jax.request import SamplingParams
from serving.errors import (
    DeadlineError,
    InvalidRequestError,
    ServingError,
    UnavailableError,
    bad_field,
    error_of,
    refusal,
)
from serving.events import Delta
from serving.proto.deepinfer.v1 import inference_pb2, kv_transfer_pb2, prefill_pb2, types_pb2
from tests.serving.clusters import FINGERPRINT, ScriptedWorker, eventually, forever, gateway
from tests.serving.random_requests import tokenizer

PROMPT = tuple(range(3, 33))
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
GONE = error_of(grpc.StatusCode.UNAVAILABLE, "the connection broke")
KV = kv_transfer_pb2.KvHandle(
    kv_id="k1",
    fingerprint=FINGERPRINT,
    mode="PREFILL_MODE_FULL",
    endpoints=[kv_transfer_pb2.KvEndpoint(uri="grpc://127.0.0.1:1")],
)
STARTED = inference_pb2.GenerateResponse(started=inference_pb2.Started(prompt_tokens=30, cached_tokens=16, worker="d"))
ACCEPTED = prefill_pb2.PrefillEvent(accepted=prefill_pb2.PrefillAccepted(kv=KV))
PROGRESS = prefill_pb2.PrefillEvent(progress=prefill_pb2.PrefillProgress(computed_tokens=20, cached_tokens=16))
ENCODED = prefill_pb2.PrefillEvent(done=prefill_pb2.PrefillDone(kv=KV))


def tokens(*ids, seq=0):
    return inference_pb2.GenerateResponse(delta=inference_pb2.TokenDelta(token_ids=ids, seq=seq))


def ended(worker, reason="FINISH_REASON_LENGTH", **receipt):
    finished = inference_pb2.Finished(reason=reason, receipt=types_pb2.Receipt(worker=worker, seed=5, **receipt))
    return inference_pb2.GenerateResponse(finished=finished)


def first(token, **more):
    receipt = types_pb2.Receipt(worker="p", hit_tokens=16, computed_tokens=14, timing=types_pb2.Timing(queue=1e-9))
    done = prefill_pb2.PrefillDone(kv=KV, first=inference_pb2.TokenDelta(token_ids=[token]), receipt=receipt, **more)
    return prefill_pb2.PrefillEvent(done=done)


def prefill_worker(name, *turns, **info):
    return ScriptedWorker(name, "prefill", prefill=turns or ([ACCEPTED, PROGRESS, first(5)],), **info)


def decode_worker(name, *turns, **info):
    return ScriptedWorker(name, "decode", generate=turns, **info)


async def served(workers, work, **settings):
    """What ``work`` gives for a gateway over these workers."""
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(worker.serving()) for worker in workers]
        gate = await stack.enter_async_context(gateway(*addresses, **settings))
        result = await work(gate)
        await eventually(lambda: not gate.server.guard.running)
        assert not any(worker.account.open_requests for worker in gate.workers)
        await gate.service.close()
        # Before the connections end, which would end every call.
        await eventually(lambda: not any(worker.running for worker in workers))
        return result


def ask(*workers, prompt=PROMPT, params=PARAMS, **settings):
    return asyncio.run(served(workers, lambda gate: gate.client.complete(prompt, params), **settings))


def refused(*workers, **settings):
    with pytest.raises(ServingError) as error:
        ask(*workers, **settings)
    return error.value


WHOLE = [STARTED, tokens(6, 7), tokens(8, seq=1), ended("d", computed_tokens=3, handed_over_bytes=99, transport="grpc")]


def until_asked(worker):
    """A turn's step that waits until a decode worker has been asked."""

    async def wait(call):
        await eventually(lambda: worker.generated)

    return wait


def test_state_is_fetched_while_the_prompt_is_computed_and_receipts_are_joined():
    decode = decode_worker("d", WHOLE)
    prefill = prefill_worker("p", [ACCEPTED, until_asked(decode), PROGRESS, first(5)])
    answer = ask(prefill, decode, params=dataclasses.replace(PARAMS, prompt_logprobs=1))
    assert answer.tokens == (5, 6, 7, 8)
    assert (answer.started.worker, answer.started.cached_tokens, answer.started.prompt_tokens) == ("d", 16, 30)
    receipt = answer.finished.receipt
    assert (receipt.worker, receipt.prefill_worker, receipt.handed_over_bytes) == ("d", "p", 99)
    assert (receipt.engine.hit_tokens, receipt.engine.computed_tokens, receipt.failovers) == (16, 17, 0)
    timing = receipt.timing
    assert timing.queue == 1e-9
    assert timing.queue < timing.prefill < timing.prefill + timing.decode <= timing.total
    assert answer.finished.completion_tokens == 4

    (asked,), (begun,) = decode.generated, [request.request for request in prefill.prefilled]
    assert prefill.prefilled[0].mode == types_pb2.PREFILL_MODE_FULL
    assert asked.kv == KV
    assert tuple(asked.prompt_token_ids) == tuple(begun.prompt_token_ids) == PROMPT
    assert asked.sampling.seed == begun.sampling.seed != 0
    assert not asked.HasField("prompt_len")
    assert (begun.logprobs.prompt, asked.logprobs.HasField("prompt")) == (1, False)
    assert asked.request_id != begun.request_id
    # The worker that fetched it gives it back.
    assert prefill.released == []


@pytest.mark.parametrize("ends", [[], [PROGRESS, GONE]])
def test_a_prompt_goes_to_another_prefill_worker_when_one_fails(ends):
    decode = decode_worker("d", [forever], WHOLE)
    one, two = prefill_worker("p1", [ACCEPTED, until_asked(decode), *ends]), prefill_worker("p2")
    two.load.queued_tokens = 50
    answer = ask(one, two, decode)
    assert answer.tokens == (5, 6, 7, 8)
    assert [len(worker.prefilled) for worker in (one, two)] == [1, 1]
    assert answer.finished.receipt.failovers == 0
    assert decode.cancelled == 1
    # What it may still hold is given back.
    assert one.released == ["k1"]


def test_a_prompt_goes_to_another_prefill_worker_when_one_refuses():
    one, two = prefill_worker("p1", [refusal("QUEUE_FULL", "full")]), prefill_worker("p2")
    two.load.queued_tokens = 50
    answer = ask(one, two, decode_worker("d", WHOLE))
    assert (answer.tokens, answer.finished.receipt.failovers) == ((5, 6, 7, 8), 0)
    assert [len(worker.prefilled) for worker in (one, two)] == [1, 1]
    assert one.released == []


def test_what_a_prefill_worker_need_not_compute_is_no_load_of_it():
    prefill, decode = prefill_worker("p", [ACCEPTED, PROGRESS, forever]), decode_worker("d", [forever])

    async def work(gate):
        reading = asyncio.create_task(gate.client.complete(PROMPT, PARAMS))
        (account,) = [worker.account for worker in gate.workers if worker.role == "prefill"]
        await eventually(lambda: account.prefill_load("p", available=True).outstanding_tokens == len(PROMPT) - 16)
        reading.cancel()

    # The worker's own word, which has no requests, must not come in between.
    asyncio.run(served((prefill, decode), work, poll_seconds=60.0))


def test_prompts_that_are_too_many_do_not_become_the_decode_workers():
    prefill, decode = prefill_worker("p", [refusal("QUEUE_FULL", "full")]), decode_worker("d", WHOLE)
    error = refused(prefill, decode)
    assert (error.reason, error.retry_after, len(decode.generated)) == ("QUEUE_FULL", 1.0, 0)


def test_another_decode_worker_fetches_the_same_state():
    for turn in ([GONE], [STARTED, GONE], [refusal("KV_POOL_EXHAUSTED", "no room")]):
        prefill = prefill_worker("p")
        one, two = decode_worker("d1", turn), decode_worker("d2", WHOLE)
        two.load.queued_requests = 1
        answer = ask(prefill, one, two)
        assert answer.tokens == (5, 6, 7, 8)
        assert len(prefill.prefilled) == 1
        assert [worker.generated[0].kv.kv_id for worker in (one, two)] == ["k1", "k1"]
        # It is told the first token where that is known by then.
        assert two.generated[0].first_token in (0, 5)
        assert not two.generated[0].HasField("prompt_len")
        assert prefill.released == []


def test_lost_state_is_computed_again_before_the_first_token():
    one, two = (prefill_worker(f"p{place}", [ACCEPTED, ENCODED], keep=20) for place in (1, 2))
    two.load.queued_tokens = 50
    lost, well = [refusal("KV_EXPIRED", "gone")], [STARTED, tokens(5, 6, 7, 8), ended("d")]
    decode = decode_worker("d", lost, lost, well, keep=20)
    answer = ask(one, two, decode, prefill="encoder_only")
    assert answer.tokens == (5, 6, 7, 8)
    # Once more on the same worker; then it is the worker that is at fault.
    assert [len(worker.prefilled) for worker in (one, two)] == [2, 1]
    assert one.prefilled[0].mode == types_pb2.PREFILL_MODE_ENCODER_ONLY
    assert (one.released, two.released) == (["k1", "k1"], [])


def test_what_a_prefill_worker_did_in_vain_is_not_in_the_receipt():
    receipt = types_pb2.Receipt(worker="p", hit_tokens=16, computed_tokens=14)
    encoded = prefill_pb2.PrefillEvent(done=prefill_pb2.PrefillDone(kv=KV, receipt=receipt))
    prefill = prefill_worker("p", [ACCEPTED, encoded], keep=20)
    well = [STARTED, tokens(5, 6, 7, 8), ended("d", computed_tokens=33)]
    # What the state is of is known by then.
    decode = decode_worker("d", [STARTED, refusal("KV_DAMAGED", "bits")], well, keep=20)
    answer = ask(prefill, decode, prefill="encoder_only")
    assert answer.tokens == (5, 6, 7, 8)
    receipt = answer.finished.receipt
    assert (receipt.prefill_worker, receipt.engine.hit_tokens, receipt.engine.computed_tokens) == ("", 0, 33)
    assert prefill.released == ["k1"]


def test_behind_the_first_token_lost_state_is_computed_where_the_answer_goes_on():
    prefill = prefill_worker("p")
    decode = decode_worker("d", [refusal("KV_DAMAGED", "bits")], [STARTED, tokens(6, 7, 8), ended("d")])
    answer = ask(prefill, decode)
    assert answer.tokens == (5, 6, 7, 8)
    again = decode.generated[1]
    assert (tuple(again.prompt_token_ids), again.prompt_len) == ((*PROMPT, 5), 30)
    assert not again.HasField("kv")
    assert (answer.finished.receipt.failovers, answer.finished.receipt.timing.queue) == (1, 1e-9)
    assert (len(prefill.prefilled), prefill.released) == (1, ["k1"])


def test_an_answer_goes_on_behind_its_tokens():
    for turn in ([*WHOLE[:2], GONE], [*WHOLE[:2]], [*WHOLE[:2], tokens(8, seq=2)]):
        one, two = decode_worker("d1", turn), decode_worker("d2", [STARTED, tokens(8), ended("d2")])
        two.load.queued_requests = 1
        answer = ask(prefill_worker("p"), one, two)
        assert answer.tokens == (5, 6, 7, 8)
        again = two.generated[0]
        assert (tuple(again.prompt_token_ids), again.prompt_len, again.max_tokens) == ((*PROMPT, 5, 6, 7), 30, 4)
        assert again.sampling.seed == one.generated[0].sampling.seed
        assert answer.finished.receipt.failovers == 1


def until_aborted(worker):
    """A turn's step that waits until a worker is asked to end an answer."""

    async def wait(call):
        await eventually(lambda: worker.aborted)

    return wait


@pytest.mark.parametrize(
    "turns",
    [
        [[STARTED, tokens(5), tokens(6, seq=1), tokens(7, 8, seq=2)]],
        [[STARTED, tokens(5, 6), GONE], [STARTED, tokens(7, 8)]],
    ],
    ids=["messages", "workers"],
)
def test_a_stop_string_is_found_across_messages_and_workers(turns):
    *_, last = workers = [decode_worker(f"d{place}", [*turn]) for place, turn in enumerate(turns)]
    last._generate[0] += [until_aborted(last), ended("d")]
    last.load.queued_requests = len(workers) - 1
    stop = tokenizer().decode((6, 7))
    answer = ask(*workers, params=dataclasses.replace(PARAMS, stop=(stop,)), tokenizer=tokenizer())
    assert (answer.tokens, answer.finished.reason, answer.finished.matched) == ((5, 6, 7), "stop", stop)
    assert [list(worker.generated[0].stop.strings) for worker in workers] == [[]] * len(workers)


def test_a_stop_string_may_begin_in_what_a_request_came_with():
    turn = [STARTED, tokens(7, 8)]
    decode = decode_worker("d", turn)
    turn += [until_aborted(decode), ended("d")]
    params = dataclasses.replace(PARAMS, stop=(tokenizer().decode((6, 7)),))

    async def work(gate):
        return await gate.client.complete(PROMPT, params, answer=(5, 6))

    answer = asyncio.run(served((decode,), work, tokenizer=tokenizer()))
    assert (answer.tokens, answer.finished.reason, answer.finished.completion_tokens) == ((7,), "stop", 3)


def test_an_answer_does_not_go_on_with_other_weights():
    leave = asyncio.Event()

    async def until_left(call):
        await leave.wait()

    one = decode_worker("d1", [*WHOLE[:2], until_left, GONE], [GONE])
    other = decode_worker("d2", [STARTED, tokens(5, 6, 7, 8), ended("d2")])
    other.info.fingerprint, other.load.draining = "1" * 64, True

    async def work(gate):
        events = gate.client.generate(PROMPT, PARAMS)
        while not isinstance(await anext(events), Delta):
            continue
        one.load.draining, other.load.draining = True, False
        await eventually(lambda: [worker.name for worker in gate.workers.decoders()] == ["d2"])
        leave.set()
        with pytest.raises(UnavailableError, match="the connection broke"):
            _ = [event async for event in events]
        assert other.generated == []
        # What begins is another matter.
        return await gate.client.complete(PROMPT, PARAMS)

    assert asyncio.run(served((one, other), work, return_seconds=0.2)).tokens == (5, 6, 7, 8)


def scored(first_position, count, seq=0):
    """Log-probabilities of a prompt, which say of which position they are."""
    scores = [-float(position) for position in range(first_position, first_position + count)]
    message = inference_pb2.PromptLogprobs(first_position=first_position, logprobs=scores, seq=seq)
    return inference_pb2.GenerateResponse(prompt_logprobs=message)


def test_log_probabilities_of_a_prompt_come_once_though_two_workers_compute_them():
    one = decode_worker("d1", [STARTED, scored(1, 15), GONE])
    two = decode_worker("d2", [STARTED, scored(1, 20), scored(21, 9, 1), tokens(5, 6, 7, 8, seq=2), ended("d2")])
    two.load.queued_requests = 1
    answer = ask(one, two, params=dataclasses.replace(PARAMS, prompt_logprobs=0))
    assert [entry.logprob for entry in answer.prompt_logprobs] == [-float(place) for place in range(1, len(PROMPT))]
    assert answer.tokens == (5, 6, 7, 8)


def test_an_answer_waits_for_its_only_worker():
    decode = decode_worker("d", [*WHOLE[:2], GONE], [GONE], [STARTED, tokens(8), ended("d")])
    answer = ask(prefill_worker("p"), decode, attempts=6)
    assert answer.tokens == (5, 6, 7, 8)
    assert answer.finished.receipt.failovers == 2


def test_an_answer_waits_for_its_only_worker_as_long_as_it_is_told_to():
    """Each time that workers are asked finds none; that is no attempt. The deadline ends it too."""

    async def work(gate):
        begin = asyncio.get_running_loop().time()
        with pytest.raises(ServingError) as error:
            await gate.client.complete(PROMPT, PARAMS, timeout=1.0)
        return error.value, asyncio.get_running_loop().time() - begin

    def wait(**settings):
        async def stay_away(call):
            decode.load.draining = True

        decode = decode_worker("d", [*WHOLE[:2], stay_away, GONE])
        return asyncio.run(served((decode,), work, poll_seconds=0.05, **settings))

    error, seconds = wait(return_seconds=0.4)
    assert (error.reason, error.retry_after) == ("NO_WORKER", 1.0)
    assert 0.4 <= seconds < 0.9
    error, seconds = wait()
    assert error.reason == "DEADLINE_PASSED"
    assert seconds < 1.0


def test_what_grpc_alone_reports_has_a_reason_for_the_client():
    gone = decode_worker("d", [STARTED, GONE])
    assert refused(gone, attempts=1).reason == "NO_WORKER"
    cancelled = decode_worker("d", [STARTED, error_of(grpc.StatusCode.CANCELLED, "cancelled")])
    assert refused(cancelled, attempts=1).reason == "NO_WORKER"
    failed = decode_worker("d", [STARTED, error_of(grpc.StatusCode.UNKNOWN, "odd")])
    assert (refused(failed, attempts=1).reason, refused(failed, attempts=1).code) == (
        "ENGINE_FAULT",
        grpc.StatusCode.INTERNAL,
    )

    async def late(gate):
        with pytest.raises(DeadlineError) as error:
            await gate.client.complete(PROMPT, PARAMS, timeout=0.5)
        return error.value

    error = asyncio.run(served((decode_worker("d", [STARTED, forever]),), late, deadline_margin=0.2))
    assert error.reason == "DEADLINE_PASSED"


def test_a_deadline_that_is_too_close_occupies_no_worker():
    async def work(gate):
        with pytest.raises(DeadlineError):
            await gate.client.complete(PROMPT, PARAMS, timeout=1.0)

    prefill, decode = prefill_worker("p"), decode_worker("d", WHOLE)
    asyncio.run(served((prefill, decode), work, deadline_margin=2.0))
    assert (prefill.prefilled, decode.generated) == ([], [])


def test_a_worker_that_was_lost_is_not_asked_until_it_is_found_well():
    one, two = decode_worker("d1", [GONE]), decode_worker("d2", [STARTED, tokens(5, 6, 7, 8), ended("d2")])
    two.load.queued_requests = 1

    async def work(gate):
        return [(await gate.client.complete(PROMPT, PARAMS)).tokens for _ in range(2)]

    # Nobody asks how it is meanwhile.
    assert asyncio.run(served((one, two), work, poll_seconds=60.0)) == [(5, 6, 7, 8)] * 2
    assert (len(one.generated), len(two.generated)) == (1, 2)


def test_where_only_the_end_was_lost_no_worker_is_asked():
    decode = decode_worker("d", [STARTED, tokens(5, 6, 7, 8), GONE])
    answer = ask(decode)
    assert (answer.tokens, answer.finished.reason, len(decode.generated)) == ((5, 6, 7, 8), "length", 1)
    assert answer.finished.completion_tokens == 4


def test_an_answer_that_the_prompts_worker_ends_needs_no_other():
    end = inference_pb2.Finished(reason=types_pb2.FINISH_REASON_STOP, stop_token_id=9)
    decode = decode_worker("d", [forever])
    answer = ask(prefill_worker("p", [ACCEPTED, until_asked(decode), first(5, finished=end)]), decode)
    assert (answer.tokens, answer.finished.reason, answer.finished.matched) == ((5,), "stop", 9)
    assert answer.finished.receipt.worker == "p"
    assert decode.cancelled == 1


@pytest.mark.parametrize(
    ("prompt", "params", "settings", "info"),
    [
        (PROMPT[:20], PARAMS, {"prefill": "encoder_only"}, {"keep": 20}),
        (PROMPT, dataclasses.replace(PARAMS, prompt_logprobs=0), {"prefill": "encoder_only"}, {"keep": 20}),
        (PROMPT, dataclasses.replace(PARAMS, max_tokens=0, prompt_logprobs=0), {}, {}),
        (PROMPT, PARAMS, {"prefill": "none"}, {}),
    ],
)
def test_what_prefill_workers_cannot_do_decode_workers_do(prompt, params, settings, info):
    prefill, decode = prefill_worker("p", **info), decode_worker("d", [STARTED, tokens(5), ended("d")], **info)
    ask(prefill, decode, prompt=prompt, params=params, **settings)
    assert (len(prefill.prefilled), len(decode.generated)) == (0, 1)
    assert decode.generated[0].logprobs.HasField("prompt") == (params.prompt_logprobs is not None)


def test_without_a_prefill_worker_decode_workers_compute_or_nobody_does():
    decode = decode_worker("d", [STARTED, tokens(5, 6, 7, 8), ended("d")])
    prefill = prefill_worker("p", [GONE])
    assert ask(prefill, decode).tokens == (5, 6, 7, 8)
    assert ask(decode).tokens == (5, 6, 7, 8)
    assert refused(decode, prefill_fallback=False).reason == "NO_WORKER"
    assert refused(prefill, decode, prefill_fallback=False).code is grpc.StatusCode.UNAVAILABLE


def test_wrong_requests_and_slow_readers_are_not_repeated():
    for error in (bad_field("priority", 3, "less"), refusal("READER_TOO_SLOW", "slow")):
        one, two = decode_worker("d1", [error]), decode_worker("d2", [error])
        assert refused(one, two).reason == error.reason
        assert len(one.generated) + len(two.generated) == 1


def test_what_fails_everywhere_fails_after_a_number_of_workers():
    workers = [decode_worker(f"d{place}", [refusal("ENGINE_FAULT", "not finite")]) for place in range(5)]
    error = refused(*workers, attempts=3)
    assert (error.reason, sum(len(worker.generated) for worker in workers)) == ("ENGINE_FAULT", 3)
    full = [decode_worker(f"d{place}", [refusal("QUEUE_FULL", "full")]) for place in range(2)]
    error = refused(*full, attempts=5)
    assert (error.reason, error.retry_after, sum(len(worker.generated) for worker in full)) == ("QUEUE_FULL", 1.0, 2)


STAGES = {
    "queued": ([forever], WHOLE),
    "computing": ([ACCEPTED, PROGRESS, forever], [forever]),
    "transferring": ([ACCEPTED, PROGRESS, first(5)], [forever]),
    "decoding": ([ACCEPTED, PROGRESS, first(5)], [*WHOLE[:2], forever]),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["cancel", "deadline"])
def test_an_end_from_outside_ends_everything_at_every_stage(stage, way):
    prefill_turn, decode_turn = STAGES[stage]
    prefill, decode = prefill_worker("p", prefill_turn), decode_worker("d", decode_turn)
    shown = {"queued": 0, "computing": 0, "transferring": 1, "decoding": 3}[stage]

    async def work(gate):
        seen = []

        async def read():
            async for event in gate.client.generate(PROMPT, PARAMS, timeout=60.0 if way == "cancel" else 1.5):
                seen.extend(event.tokens if isinstance(event, Delta) else ())

        reading = asyncio.create_task(read())
        await eventually(lambda: prefill.prefilled and len(seen) == shown)
        await eventually(lambda: stage == "queued" or decode.generated)
        if way == "cancel":
            reading.cancel()
        with pytest.raises(asyncio.CancelledError if way == "cancel" else DeadlineError):
            await reading
        await eventually(lambda: not gate.server.guard.running)
        await gate.service.close()
        counts = [account.open_requests for account in (worker.account for worker in gate.workers)]
        assert counts == [0, 0]

    asyncio.run(served((prefill, decode), work))
    assert prefill.cancelled == (stage in ("queued", "computing"))
    assert decode.cancelled == (stage != "queued")
    # Where the answer had begun, its state had arrived.
    assert prefill.released == ([] if stage in ("queued", "decoding") else ["k1"])


@pytest.mark.parametrize("stage", ["queued", "computing", "transferring"])
def test_an_abort_is_answered_at_every_stage(stage):
    prefill_turn, decode_turn = STAGES[stage]
    transferring = stage == "transferring"
    prefill, decode = prefill_worker("p", prefill_turn), decode_worker("d", [*decode_turn])
    if transferring:
        # It has no state yet, and ends with a word.
        decode._generate[0][:] = [until_aborted(decode), STARTED, ended("d", "FINISH_REASON_CANCELLED")]

    async def work(gate):
        events, seen = gate.client.generate(PROMPT, PARAMS, request_id="mine", timeout=20.0), []

        async def read():
            async for event in events:
                seen.append(event)

        reading = asyncio.create_task(read())
        await eventually(lambda: prefill.prefilled and (stage == "queued" or decode.generated))
        await eventually(lambda: not transferring or any(isinstance(event, Delta) for event in seen))
        assert await gate.client.abort("mine")
        await reading
        return seen

    *_, end = seen = asyncio.run(served((prefill, decode), work))
    assert [event.tokens for event in seen if isinstance(event, Delta)] == [(5,)] * transferring
    assert (end.reason, end.completion_tokens) == ("cancelled", int(transferring))
    assert (prefill.cancelled, len(decode.aborted)) == (not transferring, int(stage != "queued"))
    assert prefill.released == ([] if stage == "queued" else ["k1"])


def test_workers_of_another_fingerprint_or_kind_are_not_used():
    one = decode_worker("d1", [STARTED, tokens(5, 6, 7, 8), ended("d1")])
    other = decode_worker("d2", [GONE])
    other.info.fingerprint = "1" * 64
    another = ScriptedWorker("g", "gateway", generate=[[GONE]])

    async def work(gate):
        for _ in range(3):
            await gate.client.complete(PROMPT, PARAMS)
        return {worker.name: worker.trouble for worker in gate.workers}

    troubles = asyncio.run(served((one, other, another), work, fingerprint=FINGERPRINT))
    assert troubles["d1"] == ""
    assert troubles["d2"].startswith(f"its fingerprint is {'1' * 64}, configured is 0000")
    assert troubles["g"] == "it is a gateway itself"
    assert (len(other.generated), len(another.generated)) == (0, 0)


def test_a_gateway_takes_what_each_of_its_workers_would_take():
    one, two = decode_worker("d1", [], stop_strings=True, max_running=3), decode_worker("d2", [], max_running=4)
    two.info.max_context, one.info.max_logprobs = 64, 5
    info = asyncio.run(served((one, two), lambda gate: gate.client.model_info()))
    assert (info.max_context, info.max_logprobs, info.stop_strings, info.max_running) == (64, 5, False, 7)


def test_an_invalid_request_of_a_worker_is_told_as_it_is():
    decode = decode_worker("d", [bad_field("cache.write", False, "true", "NOT_SUPPORTED")])
    error = refused(decode)
    assert isinstance(error, InvalidRequestError)
    assert (error.reason, error.metadata["field"], error.metadata["worker"]) == ("NOT_SUPPORTED", "cache.write", "d")


def test_a_worker_that_does_not_serve_what_it_says_is_left():
    class Silent(ScriptedWorker):
        def services(self):
            return super().services()[:1]

    decode = decode_worker("d", [STARTED, tokens(5, 6, 7, 8), ended("d")])
    assert ask(Silent("p", "prefill"), decode).tokens == (5, 6, 7, 8)


def test_the_only_worker_that_drains_says_so():
    decode = decode_worker("d", [refusal("DRAINING", "ends")])
    error = refused(decode)
    assert isinstance(error, UnavailableError)
    assert (error.reason, error.retry_after) == ("DRAINING", 1.0)
