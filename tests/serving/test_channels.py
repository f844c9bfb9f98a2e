"""Options of channels and servers have names that the installed gRPC knows; it ignores all others."""

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from serving import lanes, worker
from serving.channels import KEEPALIVE_MS, LEAST_PING_INTERVAL_MS, RetryPolicy, client_options, server_options


def names():
    for options in (client_options(RetryPolicy()), server_options(), lanes.LANE_OPTIONS, worker.OPTIONS):
        yield from (name for name, _ in options)


@pytest.fixture(scope="module")
def library():
    return Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize("name", sorted(set(names())))
def test_options_have_names_that_grpc_knows(library, name):
    assert name.encode() + b"\0" in library


def test_clients_ping_less_often_than_servers_bear():
    options = dict(server_options())
    assert options["grpc.http2.min_ping_interval_without_data_ms"] == LEAST_PING_INTERVAL_MS < KEEPALIVE_MS
    assert options["grpc.keepalive_permit_without_calls"] == 1
