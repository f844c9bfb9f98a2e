"""Every field of a request has an effect or is refused: none is passed over in silence.

A gateway over a worker, real servers over a real engine. Numerics f32, deterministic, replay mode bounded, decoder
replay off.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from serving.errors import InvalidRequestError
from serving.proto.deepinfer.v1 import inference_pb2, types_pb2
from serving.proto.deepinfer.v1.inference_pb2_grpc import InferenceStub
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvEndpoint, KvHandle
from serving.status import error_from
from tests.deepinfer_jax.test_engine_machine import stream
from tests.serving.clusters import engine_worker, gateway
from tests.serving.random_requests import tokenizer

# Sub-messages that are refused as a whole.
WHOLE = {"constraint", "images", "kv", "cache.ttl"}
GIVEN = {"temperature": 1.0, "seed": 3}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def leaves(descriptor, prefix=""):
    """Names of all fields that hold values, with those of the messages around them."""
    for field in descriptor.fields:
        name = f"{prefix}{field.name}"
        of_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.message_type is None or of_map or name in WHOLE:
            yield name
        else:
            yield from leaves(field.message_type, f"{name}.")


def ask_for(changes):
    """The base request with some fields changed, whose names may have dots."""
    request = inference_pb2.GenerateRequest(
        prompt_token_ids=stream(0)[:40],
        sampling=types_pb2.SamplingParams(**GIVEN),
        stop=types_pb2.StopSpec(ignore_eos=True),
        max_tokens=12,
    )
    for name, value in changes.items():
        *path, last = name.split(".")
        place = request
        for part in path:
            place = getattr(place, part)
        if isinstance(value, dict):
            getattr(place, last).update(value)
        elif isinstance(value, list):
            del getattr(place, last)[:]
            getattr(place, last).extend(value)
        elif hasattr(value, "DESCRIPTOR"):
            getattr(place, last).CopyFrom(value)
        else:
            setattr(place, last, value)
    return request


@dataclasses.dataclass
class Told:
    """What a caller learns."""

    events: list[Any]

    def part(self, kind):
        return [getattr(event, kind) for event in self.events if event.HasField(kind)]

    @property
    def tokens(self):
        return [token for delta in self.part("delta") for token in delta.token_ids]

    @property
    def cached(self):
        return self.part("started")[0].cached_tokens

    @property
    def end(self):
        return self.part("finished")[0]


class Asking:
    """Asks a gateway; ``told`` is what came."""

    def __init__(self, stub: InferenceStub, worker: Any) -> None:
        self._stub, self.worker = stub, worker

    async def told(self, **changes: Any) -> Told:
        call = self._stub.Generate(
            ask_for({name.replace("__", "."): value for name, value in changes.items()}), timeout=60
        )
        return Told([event async for event in call])


@dataclasses.dataclass(frozen=True)
class Refused:
    """A value that is refused, by which reason; ``field`` where another one is named."""

    value: Any
    reason: str = "NOT_SUPPORTED"
    field: str = ""


@dataclasses.dataclass(frozen=True)
class Other:
    """A value that leads to other tokens; ``base``: what is changed on both sides before."""

    value: Any
    base: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Seen:
    """A check of its own."""

    check: Callable[[Asking, pytest.LogCaptureFixture], Any]


async def names_the_request(asking, caplog):
    told = await asking.told(request_id="mine")
    assert told.part("started")[0].request_id == "mine"
    assert "mine" in [getattr(record, "request_id", "") for record in caplog.records]


async def is_in_the_logs(asking, caplog):
    await asking.told(traceparent=TRACE)
    calls = [record for record in caplog.records if getattr(record, "traceparent", "") == TRACE]
    # The gateway's call and the worker's.
    assert [record.name for record in calls] == ["serving.calls"] * 2


async def comes_first(asking, caplog):
    started, throttle, engine = [], asking.worker.throttle, asking.worker.engine

    async def note(name, **changes):
        await asking.told(request_id=name, **changes)
        started.append(name)

    async def until(waiting, running):
        while True:
            asked = asyncio.create_task(engine.call(lambda inner: inner.load()))
            while not asked.done():
                throttle.allow(1)
                await asyncio.sleep(0.005)
            load = asked.result()
            if (load.waiting_requests, load.shards[0].running_requests) == (waiting, running):
                return

    throttle.allow(0)
    long = [asyncio.create_task(asking.told(max_tokens=56 - number)) for number in range(3)]
    await until(0, 3)
    later = [asyncio.create_task(note("low", priority=0))]
    await until(1, 3)
    later.append(asyncio.create_task(note("high", priority=1)))
    await until(2, 3)
    throttle.allow(float("inf"))
    await asyncio.gather(*long, *later)
    assert started == ["high", "low"]


async def keeps_apart(asking, caplog):
    cached = [(await asking.told(cache__salt=salt)).cached for salt in (b"one", b"two", b"one")]
    assert cached == [0, 0, 32]


async def reads_or_not(asking, caplog):
    await asking.told()
    assert [(await asking.told(cache__read=read)).cached for read in (True, False)] == [32, 0]


async def ends_it(asking, caplog):
    whole = await asking.told()
    text = tokenizer().decode(whole.tokens)
    told = await asking.told(stop__strings=[text[3:5]])
    assert (told.end.stop_string, told.tokens) == (text[3:5], whole.tokens[: text.index(text[3:5]) + 2])


async def counts_as_generated(asking, caplog):
    told = await asking.told(prompt_len=38)
    assert (told.part("started")[0].prompt_tokens, told.end.completion_tokens, len(told.tokens)) == (38, 12, 10)


async def is_as_long(asking, caplog):
    assert len((await asking.told(max_tokens=7)).tokens) == 7


async def gives_likeliest_tokens(asking, caplog):
    plain, told = await asking.told(), await asking.told(logprobs__generated=2)
    assert not any(delta.logprobs for delta in plain.part("delta"))
    assert [len(top.token_ids) for delta in told.part("delta") for top in delta.top] == [2] * 12


async def scores_the_prompt(asking, caplog):
    (scores,) = (await asking.told(logprobs__prompt=0)).part("prompt_logprobs")
    assert len(scores.logprobs) == 39


# Two tokens that take turns, or not.
SAME_TWICE = {"sampling.temperature": 0.0, "sampling.logit_bias": {40: 100.0, 41: 100.0}}
FIELDS = {
    "request_id": Seen(names_the_request),
    "prompt_token_ids": Other(list(stream(1)[:40])),
    "sampling.temperature": Other(0.0),
    "sampling.top_p": Other(0.1),
    "sampling.top_k": Other(1),
    "sampling.seed": Other(4),
    "sampling.min_p": Other(0.9),
    "sampling.presence_penalty": Other(2.0, SAME_TWICE),
    "sampling.frequency_penalty": Other(2.0, SAME_TWICE),
    "sampling.repetition_penalty": Other(100.0),
    "sampling.logit_bias": Other({7: 100.0}),
    "sampling.min_tokens": Other(12, {"stop.stop_token_ids": list(range(10, 25))}),
    "sampling.branch": Other(1),
    "stop.stop_token_ids": Other(list(range(10, 25))),
    "stop.ignore_eos": Other(False, {"sampling.logit_bias": {1: 100.0}}),
    "stop.strings": Seen(ends_it),
    "constraint": Refused(types_pb2.Constraint(regex="a*"), "CONSTRAINT_INVALID", "constraint.regex"),
    "images": Refused([types_pb2.Image(webp=b"x")]),
    "logprobs.generated": Seen(gives_likeliest_tokens),
    "logprobs.prompt": Seen(scores_the_prompt),
    "cache.salt": Seen(keeps_apart),
    "cache.retention_class": Refused(types_pb2.RETENTION_CLASS_CHAT),
    "cache.ttl": Refused(Duration(seconds=60)),
    "cache.read": Seen(reads_or_not),
    "cache.write": Refused(False),
    "cache.replay_mode": Refused(types_pb2.REPLAY_MODE_EXACT),
    "priority": Seen(comes_first),
    "traceparent": Seen(is_in_the_logs),
    "max_tokens": Seen(is_as_long),
    "kv": Refused(
        KvHandle(kv_id="k", fingerprint="0" * 64, mode=1, endpoints=[KvEndpoint(uri="grpc://127.0.0.1:1")]),
    ),
    "first_token": Refused(5, "INVALID_FIELD"),
    "prompt_len": Seen(counts_as_generated),
}


def test_every_field_is_looked_at_here():
    assert set(leaves(inference_pb2.GenerateRequest.DESCRIPTOR)) == set(FIELDS)


@contextlib.asynccontextmanager
async def asking():
    async with (
        engine_worker("w", mode="bounded") as worker,
        gateway(worker.address, tokenizer=tokenizer(), call_seconds=60.0) as gate,
        grpc.aio.insecure_channel(gate.address) as channel,
    ):
        yield Asking(InferenceStub(channel), worker)
        assert await worker.idle()


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_has_an_effect_or_is_refused(name, caplog):
    case, key = FIELDS[name], name.replace(".", "__")
    caplog.set_level(logging.INFO)

    async def run():
        async with asking() as caller:
            if isinstance(case, Seen):
                await case.check(caller, caplog)
            elif isinstance(case, Other):
                # Behind a bounded replay the same request may be answered otherwise.
                base = {"cache__read": False} | {at.replace(".", "__"): value for at, value in case.base.items()}
                plain, told = await caller.told(**base), await caller.told(**base, **{key: case.value})
                assert plain.tokens != told.tokens
                assert plain.tokens == (await caller.told(**base)).tokens
            else:
                with pytest.raises(grpc.RpcError) as refused:
                    await caller.told(**{key: case.value})
                error = error_from(refused.value)
                assert isinstance(error, InvalidRequestError)
                assert (error.reason, error.metadata["field"]) == (case.reason, case.field or name)

    asyncio.run(run())
