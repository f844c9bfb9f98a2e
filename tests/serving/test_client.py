"""The clients against real servers that play scripts: errors, retries, deadlines, cancellation."""

import asyncio
import contextlib

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from deepinfer_jax.errors import InputError
from deepinfer_jax.request import SamplingParams
from serving.async_client import AsyncClient
from serving.channels import RetryPolicy
from serving.client import Client
from serving.errors import (
    CODES,
    ContractError,
    DeadlineError,
    InvalidRequestError,
    UnavailableError,
    refusal,
)
from serving.events import Delta, Finished, Started
from tests.serving.clusters import eventually
from tests.serving.servers import ScriptedService, in_thread, messages, started

START, END = {"started": {"prompt_tokens": 1}}, {"finished": {"reason": 2, "completion_tokens": 2}}
TOKENS = {"delta": {"token_ids": [5, 6], "seq": 0}}
WHOLE = messages(START, TOKENS, END)
QUICK = RetryPolicy(first_delay=0.01)


class Collect:
    """Plays a script to one of the clients: gives its events and the service, or raises its error.

    Attributes:
        service: of the last script.
        cancelled: how many of its calls were cancelled before client and server ended, which would end all of them.
    """

    def __init__(self, client):
        self._blocking = client == "blocking"
        self.service, self.cancelled = None, 0

    def __call__(self, *turns, retries=QUICK, **settings):
        self.service = ScriptedService(*turns)
        collect = self._in_thread if self._blocking else self._here
        return collect(retries, settings), self.service

    def _in_thread(self, retries, settings):
        with in_thread(self.service) as target, Client(target, retries=retries) as client:
            try:
                return list(client.generate((1,), **settings))
            finally:
                until(lambda: not self.service.running)
                self.cancelled = self.service.cancelled

    def _here(self, retries, settings):
        async def run():
            async with started(self.service) as (_, target), AsyncClient(target, retries=retries) as client:
                try:
                    return [event async for event in client.generate((1,), **settings)]
                finally:
                    await eventually(lambda: not self.service.running)
                    self.cancelled = self.service.cancelled

        return asyncio.run(run())


@pytest.fixture(params=["blocking", "asyncio"])
def collect(request):
    return Collect(request.param)


def until(condition):
    """Wait for a condition in this thread; it fails if that takes long."""
    asyncio.run(eventually(condition))


def test_events_come_in_order(collect):
    events, service = collect(WHOLE, request_id="r", priority=3, salt=b"s")
    assert [type(event) for event in events] == [Started, Delta, Finished]
    assert (events[1].tokens, events[2].reason) == ((5, 6), "length")
    request, _ = service.calls[0]
    assert (request.request_id, request.priority, request.cache.salt) == ("r", 3, b"s")


@pytest.mark.parametrize("timeout", [None, 1000.0])
def test_every_call_has_a_deadline(collect, timeout):
    seen = []

    async def look(call):
        seen.append(call.remaining)
        for message in WHOLE:
            await call.write(message)

    collect(look, timeout=timeout)
    # gRPC rounds long ones up on the wire.
    assert 0 < seen[0] <= 1.02 * (timeout or 60)
    assert (seen[0] > 62) == (timeout is not None)


@pytest.mark.parametrize("reason", sorted(set(CODES) - {"DRAINING", "NO_WORKER", "ENGINE_STOPPED"}))
def test_a_refusal_is_raised_as_it_was(collect, reason):
    refused = refusal(reason, "so it is", field="a.b", accepted="c")
    with pytest.raises(type(refused)) as caught:
        collect([refused])
    error = caught.value
    assert (error.code, error.reason, error.message) == (refused.code, reason, "so it is")
    assert error.retry_after == refused.retry_after
    assert (error.metadata["field"], error.metadata["accepted"]) == ("a.b", "c")
    assert len(error.metadata["request_id"]) == 32


@pytest.mark.parametrize("script", [[], messages(START, TOKENS), messages(START, END, END), messages(TOKENS)])
def test_a_breach_of_the_contract_is_an_error(collect, script):
    with pytest.raises(ContractError):
        collect(script)


def unavailable():
    """Without the delay that a server may ask for."""
    return refusal("ENGINE_STOPPED", "gone")


def test_unavailable_before_the_start_is_tried_again(collect):
    events, service = collect([unavailable()], [unavailable()], WHOLE)
    assert len(service.calls) == 3
    assert [type(event) for event in events] == [Started, Delta, Finished]


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_as_many_attempts_are_made_as_allowed(collect, attempts):
    with pytest.raises(UnavailableError):
        collect([unavailable()], retries=RetryPolicy(attempts=attempts, first_delay=0.01))
    assert len(collect.service.calls) == attempts


def test_unavailable_after_the_start_is_final(collect):
    with pytest.raises(UnavailableError, match="ENGINE_STOPPED"):
        collect([*messages(START), unavailable()], WHOLE)
    assert len(collect.service.calls) == 1


@pytest.mark.parametrize("reason", ["QUEUE_FULL", "ENGINE_FAULT", "INVALID_FIELD", "KV_EXPIRED"])
def test_other_refusals_are_final(collect, reason):
    refused = refusal(reason, "x")
    with pytest.raises(type(refused)):
        collect([refused], WHOLE)
    assert len(collect.service.calls) == 1


def test_a_long_prompt_is_tried_again_too():
    service = ScriptedService([unavailable()], WHOLE)
    with in_thread(service) as target, Client(target, retries=QUICK) as client:
        client.complete((2**32 - 1,) * 1_000_000)
    assert len(service.calls) == 2


def test_nobody_there_is_unavailable():
    with Client("127.0.0.1:1", retries=QUICK) as client, pytest.raises(UnavailableError) as caught:
        client.load()
    assert (caught.value.reason, caught.value.retry_after) == ("", None)


async def forever(call):
    await call.write(messages(START)[0])
    await asyncio.Event().wait()


def test_a_deadline_ends_the_call_on_both_ends(collect):
    with pytest.raises(DeadlineError):
        collect(forever, timeout=0.3)
    assert collect.cancelled == 1


def test_closing_the_iterator_cancels_the_call():
    service = ScriptedService(forever)
    with in_thread(service) as target, Client(target) as client:
        with contextlib.closing(client.generate((1,))) as events:
            assert isinstance(next(events), Started)
        # Before client and server end, which would end it too.
        until(lambda: service.cancelled == 1)


def test_cancelling_a_task_cancels_the_call():
    service = ScriptedService(forever)

    async def cancel():
        async with started(service) as (_, target), AsyncClient(target) as client:
            begun = asyncio.Event()

            async def consume():
                async for _ in client.generate((1,)):
                    begun.set()

            task = asyncio.create_task(consume())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await eventually(lambda: service.cancelled == 1)

    asyncio.run(cancel())


def test_bad_arguments_are_refused_before_anything_is_sent():
    with Client("127.0.0.1:1") as client:
        with pytest.raises(InputError, match="timeout"):
            client.generate((1,), timeout=0.0)
        with pytest.raises(InputError, match="'n'"):
            client.generate((1,), SamplingParams(n=2))
        with pytest.raises(TypeError):
            client.generate((1,), unheard_of=1)
    with pytest.raises(InputError, match="timeout"):
        Client("127.0.0.1:1", timeout=float("inf"))
    with pytest.raises(InputError, match="attempts"):
        RetryPolicy(attempts=6)
    with pytest.raises(InputError, match="first_delay"):
        RetryPolicy(first_delay=0.0)


@pytest.mark.parametrize("others", [True, False], ids=["of another domain", "no message"])
def test_details_of_other_servers_do_no_harm(others):
    """A status whose details are not ours, or not even a message."""

    async def abort(call):
        status = Status(code=3, message="no")
        status.details.add().Pack(ErrorInfo(reason="QUOTA", domain="example.org", metadata={"field": "a"}))
        trailers = (("grpc-status-details-bin", status.SerializeToString() if others else b"\xff\xff"),)
        await call.context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no", trailers)

    with (
        in_thread(ScriptedService(abort)) as target,
        Client(target) as client,
        pytest.raises(InvalidRequestError) as caught,
    ):
        client.complete((1,))
    assert (caught.value.message, caught.value.reason, caught.value.metadata) == ("no", "", {})
