"""What a server does around its handlers: health, reflection, deadlines, request ids, statuses, logs, and its end."""

import asyncio
import logging

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from serving.async_client import AsyncClient
from serving.channels import MESSAGE_BYTES, RetryPolicy
from serving.errors import (
    InvalidRequestError,
    OverloadedError,
    ServerFaultError,
    UnavailableError,
    refusal,
)
from serving.proto.deepinfer.v1.inference_pb2 import GenerateRequest
from serving.served_call import REQUEST_ID
from serving.server import Server
from serving.status import error_from
from tests.serving.clusters import eventually
from tests.serving.servers import NAME, ScriptedService, in_thread, messages, raw_stream, raw_unary, started

GENERATE = f"/{NAME}/Generate"
REQUEST = GenerateRequest(prompt_token_ids=[1])
WHOLE = messages({"started": {}}, {"finished": {"reason": 1}})
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def failure_of(target, content, timeout=10.0):
    with pytest.raises(grpc.RpcError) as caught:
        raw_stream(target, GENERATE, content, timeout)
    return error_from(caught.value)


def test_a_call_without_a_deadline_is_refused():
    service = ScriptedService(WHOLE)
    with in_thread(service) as target:
        error = failure_of(target, REQUEST.SerializeToString(), timeout=None)
    assert isinstance(error, InvalidRequestError)
    assert error.reason == "DEADLINE_MISSING"
    assert service.calls == []


@pytest.mark.parametrize("content", [b"\x08", b"\xff" * 40, b"\x0a\x05ab", b"\x0a\x02\xff\xfe"])
def test_bytes_that_are_no_message_are_refused(content):
    service = ScriptedService(WHOLE)
    with in_thread(service) as target:
        error = failure_of(target, content)
        assert len(raw_stream(target, GENERATE, REQUEST.SerializeToString(), 10.0)) == 2
    assert isinstance(error, InvalidRequestError)
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "request")
    assert len(service.calls) == 1


def test_too_large_a_message_is_refused():
    with in_thread(ScriptedService(WHOLE)) as target:
        error = failure_of(target, b"\0" * (MESSAGE_BYTES + 1))
    assert isinstance(error, OverloadedError)
    # gRPC's own answer: nothing says what it was, or that it may be repeated.
    assert (error.reason, error.metadata, error.retry_after) == ("", {}, None)


def test_what_nobody_foresaw_is_logged_and_tells_nothing(caplog):
    async def fail(call):
        raise ZeroDivisionError("secret")

    with in_thread(ScriptedService(fail), worker="w") as target:
        error = failure_of(target, REQUEST.SerializeToString())
    assert isinstance(error, ServerFaultError)
    assert (error.reason, error.metadata["worker"]) == ("ENGINE_FAULT", "w")
    assert "secret" not in error.message
    failed = next(record for record in caplog.records if record.levelno == logging.ERROR)
    assert failed.request_id == error.metadata["request_id"]
    assert "secret" in caplog.text


@pytest.mark.parametrize(("reason", "delay"), [("DRAINING", "1000"), ("BAD_TOKEN_ID", None)])
def test_what_may_be_tried_again_tells_clients_of_grpc_when(reason, delay):
    """In the trailer that their own retries read."""
    with in_thread(ScriptedService([refusal(reason, "so it is")])) as target, grpc.insecure_channel(target) as channel:
        call = channel.unary_stream(GENERATE)(REQUEST.SerializeToString(), timeout=10.0)
        with pytest.raises(grpc.RpcError):
            list(call)
    assert dict(call.trailing_metadata()).get("grpc-retry-pushback-ms") == delay


@pytest.mark.parametrize("given", ["mine", "a" * 128])
def test_request_ids_come_back(given):
    with in_thread(ScriptedService(WHOLE)) as target:
        _, call = raw_unary_of_stream(target, ((REQUEST_ID, given),))
    assert dict(call.trailing_metadata())[REQUEST_ID] == given


@pytest.mark.parametrize("given", [(), ((REQUEST_ID, "a" * 129),), ((REQUEST_ID, "a b"),)])
def test_other_request_ids_are_drawn(given):
    service = ScriptedService(WHOLE)
    with in_thread(service) as target:
        _, call = raw_unary_of_stream(target, (*given, ("traceparent", "00-1")))
    drawn = dict(call.trailing_metadata())[REQUEST_ID]
    assert len(drawn) == 32
    assert (service.calls[0][1].request_id, service.calls[0][1].traceparent) == (drawn, "00-1")


def raw_unary_of_stream(target, metadata):
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_stream(GENERATE)(REQUEST.SerializeToString(), timeout=10.0, metadata=metadata)
        return list(call), call


def test_every_call_is_logged_without_its_content(caplog):
    caplog.set_level(logging.INFO, "serving.calls")
    request = GenerateRequest(prompt_token_ids=[77_777], request_id="a", stop={"strings": ["secret"]})
    with in_thread(ScriptedService(WHOLE)) as target:
        raw_stream(target, GENERATE, request.SerializeToString(), 10.0)
        failure_of(target, b"\x08")
    good, bad = [record for record in caplog.records if record.name == "serving.calls"]
    assert (good.method, good.code, good.reason) == (GENERATE, "OK", "")
    assert (bad.code, bad.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert good.seconds >= 0
    everything = " ".join(str(vars(record)) for record in caplog.records)
    assert "secret" not in everything
    assert "77777" not in everything


def test_a_call_that_its_caller_leaves_is_cancelled_in_its_handler(caplog):
    caplog.set_level(logging.INFO, "serving.calls")

    async def leave():
        begun = asyncio.Event()

        async def forever(call):
            begun.set()
            await asyncio.Event().wait()

        service = ScriptedService(forever)
        async with started(service) as (server, target), grpc.aio.insecure_channel(target) as channel:
            call = channel.unary_stream(GENERATE)(REQUEST.SerializeToString(), timeout=60.0)
            await begun.wait()
            assert server.guard.running == 1
            call.cancel()
            await server.guard.idle()
        return service

    assert asyncio.run(leave()).cancelled == 1
    assert [record.code for record in caplog.records if record.name == "serving.calls"] == ["CANCELLED"]


def test_health_follows_the_server():
    async def follow():
        service = ScriptedService(WHOLE)
        seen = []
        async with started(service) as (server, target), grpc.aio.insecure_channel(target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", NAME):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10.0)
                seen.append(answer.status)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health.Check(health_pb2.HealthCheckRequest(service="x"), timeout=10.0)
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND
            watch = health.Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=60.0)
            seen.append((await watch.read()).status)
            stopping = asyncio.create_task(server.stop(10.0))
            seen.append((await watch.read()).status)
            watch.cancel()
            await stopping
        return seen

    assert asyncio.run(follow()) == [SERVING, SERVING, SERVING, NOT_SERVING]


def test_a_server_is_not_healthy_before_it_is_ready():
    async def ask():
        server = Server([ScriptedService(WHOLE).service()])
        target = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
        async with grpc.aio.insecure_channel(target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(service=NAME), timeout=10.0)
        await server.stop(0.0)
        return answer.status

    assert asyncio.run(ask()) == NOT_SERVING


def reflected(target):
    """Names of a server's services, and the file that describes the protocol's."""
    with grpc.insecure_channel(target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME),
        ]
        listed, file = stub.ServerReflectionInfo(iter(requests), timeout=10.0)
    names = {service.name for service in listed.list_services_response.service}
    return names, FileDescriptorProto.FromString(file.file_descriptor_response.file_descriptor_proto[0])


def test_reflection_describes_the_protocol():
    with in_thread(ScriptedService(WHOLE)) as target:
        names, file = reflected(target)
    assert names == {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert (file.name, file.package) == ("deepinfer/v1/inference.proto", "deepinfer.v1")


def test_reflection_can_be_left_out():
    with in_thread(ScriptedService(WHOLE), reflection_enabled=False) as target, pytest.raises(grpc.RpcError) as caught:
        reflected(target)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_draining_server_refuses_new_work_and_ends_what_runs():
    async def drain():
        release, begun = asyncio.Event(), asyncio.Event()

        async def held(call):
            begun.set()
            await release.wait()
            for message in WHOLE:
                await call.write(message)

        service = ScriptedService(held, WHOLE)
        async with started(service) as (server, target):
            once = RetryPolicy(attempts=1)
            async with AsyncClient(target, retries=once) as client:
                running = asyncio.create_task(client.complete((1,)))
                await begun.wait()
                stopping = asyncio.create_task(server.stop(60.0))
                while not server.guard.draining:
                    await asyncio.sleep(0)
                with pytest.raises(UnavailableError) as caught:
                    await client.complete((1,))
                release.set()
                answer = await running
                await stopping
        return caught.value, answer

    error, answer = asyncio.run(drain())
    assert (error.reason, error.retry_after) == ("DRAINING", 1.0)
    assert answer.finished.reason == "stop"


def test_a_server_is_idle_once_all_its_calls_have_ended():
    async def end():
        releases = [asyncio.Event() for _ in range(2)]
        waiting = iter(releases)

        async def held(call):
            await next(waiting).wait()

        service = ScriptedService(held)
        async with started(service) as (server, target), grpc.aio.insecure_channel(target) as channel:
            stub = channel.unary_stream(GENERATE)
            calls = [stub(REQUEST.SerializeToString(), timeout=60.0) for _ in releases]
            await eventually(lambda: server.guard.running == 2)
            idle = asyncio.create_task(server.guard.idle())
            releases[0].set()
            await eventually(lambda: server.guard.running == 1)
            await asyncio.sleep(0)
            assert not idle.done()
            releases[1].set()
            await idle
            assert [await call.read() for call in calls] == [grpc.aio.EOF] * 2

    asyncio.run(end())


@pytest.mark.parametrize("hurried", [False, True])
def test_what_outlives_the_grace_is_refused(hurried, caplog):
    caplog.set_level(logging.INFO, "serving.calls")

    async def cut():
        begun, at_once = asyncio.Event(), asyncio.Event()

        async def forever(call):
            begun.set()
            await asyncio.Event().wait()

        service = ScriptedService(forever)
        async with started(service) as (server, target), AsyncClient(target, retries=RetryPolicy(attempts=1)) as client:
            running = asyncio.create_task(client.complete((1,)))
            await begun.wait()
            stopping = asyncio.create_task(server.stop(600.0 if hurried else 0.0, at_once=at_once))
            if hurried:
                await eventually(lambda: server.guard.draining)
                assert not running.done()
                at_once.set()
            with pytest.raises(UnavailableError) as caught:
                await running
            await stopping
            assert server.guard.running == 0
        return service, caught.value

    service, error = asyncio.run(cut())
    assert service.cancelled == 1
    assert (error.reason, error.retry_after) == ("DRAINING", 1.0)
    assert [record.reason for record in caplog.records if record.name == "serving.calls"] == ["DRAINING"]


def test_a_handler_whose_own_time_passes_is_not_taken_for_the_end():
    with in_thread(ScriptedService([TimeoutError()])) as target:
        assert failure_of(target, REQUEST.SerializeToString()).reason == "DEADLINE_PASSED"


def test_unknown_methods_are_unimplemented():
    with in_thread(ScriptedService(WHOLE)) as target:
        for method in (f"/{NAME}/Nothing", "/deepinfer.v1.Nothing/Generate"):
            with pytest.raises(grpc.RpcError) as caught:
                raw_unary(target, method, b"", 10.0)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
            assert error_from(caught.value).reason == ""
