"""Parts of the benchmark on servers of a tiny model in this process."""

import asyncio
import contextlib
import dataclasses

import pytest

from deepinfer_jax.errors import InputError
from serving.bench.alone import answer_alone, check_same
from serving.bench.cluster import Addresses
from serving.bench.input_rate import measure_input
from serving.bench.overhead import measure_overhead
from serving.bench.overlap import measure_overlap
from serving.bench.streams import ask_all, measure_streams
from serving.bench.turn import greedy
from serving.proto.deepinfer.v1 import inference_pb2
from tests.running_engines import built, fresh_engine, receiver
from tests.serving.clusters import ScriptedWorker, engine_worker, gateway, serving


@contextlib.asynccontextmanager
async def cluster():
    """Addresses of a gateway and its workers, which serve on this loop: what blocks runs in threads."""
    async with (
        engine_worker("p", role="prefill") as prefill,
        engine_worker("d", role="decode", build=receiver) as decode,
        gateway(prefill.address, decode.address) as gate,
        serving(gate.service.service()) as (_, address),
    ):
        await gate.workers.found()
        yield Addresses(gateway=address, prefill=prefill.address, decode=decode.address)
        assert await prefill.idle()
        assert await decode.idle()


def on_cluster(part):
    """What a part gives, called in a thread with the addresses."""

    async def run():
        async with cluster() as addresses:
            return await asyncio.to_thread(part, addresses)

    return asyncio.run(run())


def test_states_are_handed_over_early_and_late():
    figures = on_cluster(
        lambda addresses: measure_overlap(
            addresses.prefill, addresses.decode, 90, prompt=60, turns=3, transports=("shm", "grpc")
        )
    )
    assert [one.transport for one in figures] == ["shm", "grpc"]
    for one in figures:
        assert 0 < one.outstanding_bytes <= one.bytes
        assert one.exposed_seconds > 0
    # Of so small a state some may arrive before the word when it was computed, which then is no whole hand-over.
    assert any(one.whole_seconds for one in figures)


def test_hits_are_counted():
    figures = on_cluster(lambda addresses: measure_input(addresses.gateway, 90, prompts=3, shared=64, own=6))
    assert figures.input_tokens == 210
    assert 0 < figures.hit_tokens < 210
    assert figures.without_hits < figures.with_hits


def answers(prompts, tokens):
    engine = fresh_engine("f32", build=built)
    return [answer_alone(engine, prompt, greedy(tokens)).tokens for prompt in prompts]


PROMPTS = [tuple(3 + (7 * place + seed) % 90 for place in range(20 + seed)) for seed in range(5)]


def test_streams_have_the_tokens_of_the_engine_alone():
    held, answering, seconds, served = on_cluster(lambda addresses: asyncio.run(ask_all(addresses.gateway, PROMPTS, 6)))
    assert served == answers(PROMPTS, 6)
    assert 1 <= answering <= held == len(PROMPTS)
    assert seconds > 0


class OtherTokens(ScriptedWorker):
    """Answers every request with the same tokens, but for one that fails."""

    async def Generate(self, request, call):
        self.generated.append(request)
        if len(self.generated) == 2:
            raise RuntimeError("on purpose")
        await call.write(inference_pb2.GenerateResponse(started=inference_pb2.Started(prompt_tokens=16)))
        await call.write(inference_pb2.GenerateResponse(delta=inference_pb2.TokenDelta(token_ids=[5, 6], seq=0)))
        finished = inference_pb2.Finished(reason="FINISH_REASON_LENGTH", completion_tokens=2)
        await call.write(inference_pb2.GenerateResponse(finished=finished))


def test_streams_that_differ_or_fail_are_found():
    engine = fresh_engine("f32")

    async def run():
        worker = OtherTokens("w", "all")
        async with worker.serving() as address:
            return await asyncio.to_thread(measure_streams, engine, address, streams=3, prompt=16, tokens=2)

    figures = asyncio.run(run())
    assert (figures.equal, figures.failed, figures.all_equal) == (0, 1, False)


def test_every_way_is_asked_the_same():
    engine = fresh_engine("f32")

    async def run():
        async with engine_worker("w", build=receiver) as worker:
            addresses = Addresses(decode=worker.address)
            return await asyncio.to_thread(measure_overhead, engine, addresses, prompt=20, tokens=4, turns=2)

    figures = asyncio.run(run())
    assert [way.way for way in figures.ways] == ["worker"]
    (way,) = figures.ways
    assert way.added_first_token_ms.best == pytest.approx(way.first_token_ms.best - figures.alone_first_token_ms.best)
    assert figures.alone_token_us.best > 0


def test_another_model_is_refused():
    engine = fresh_engine("f32")
    info = inference_pb2.ModelInfo(fingerprint=engine.receiver.form.fingerprint.hex())
    check_same(engine, info)
    with pytest.raises(InputError, match="a cluster of fingerprint"):
        check_same(engine, inference_pb2.ModelInfo(fingerprint="1" * 64))
    assert dataclasses.asdict(Addresses())["gateway"] is None
