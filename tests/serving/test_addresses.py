"""Addresses that servers listen on: which can be had."""

import socket

import pytest

from deepinfer_jax.errors import ConfigError
from serving.addresses import check_free


@pytest.fixture
def port():
    """One that a server listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def refusal(address):
    with pytest.raises(ConfigError) as caught:
        check_free(address, "server.listen")
    assert caught.value.key == "server.listen"
    return str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_port_that_another_server_has_is_refused(port, host):
    assert "accepted: an address that is free" in refusal(f"{host}:{port}")


def test_a_port_is_free_again_once_its_server_has_ended():
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        with socket.create_connection(place), server.accept()[0]:
            pass
    check_free(f"127.0.0.1:{place[1]}", "server.listen")


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "0.0.0.0:0"])
def test_any_free_port_can_be_had(address):
    check_free(address, "server.listen")


def test_an_address_of_another_machine_is_refused():
    # RFC 5737 keeps it for documentation.
    assert "accepted: an address that is free" in refusal("192.0.2.1:0")
    assert "accepted: an address of this machine" in refusal("no..name:1")


def test_a_path_is_refused_where_somebody_listens_or_nobody_can(tmp_path):
    assert f"there is no directory {tmp_path / 'none'}" in refusal(f"unix:{tmp_path / 'none' / 's'}")
    (tmp_path / "file").touch()
    assert "is no socket" in refusal(f"unix:{tmp_path / 'file'}")
    path = tmp_path / "s"
    check_free(f"unix:{path}", "server.listen")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        assert "another process listens on it" in refusal(f"unix:{path}")
    # What an ended process left.
    assert path.is_socket()
    check_free(f"unix:{path}", "server.listen")
