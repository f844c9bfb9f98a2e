"""Examples that start or call servers say what they do, and refuse unknown arguments, before they do anything."""

import pytest

import examples.cluster.__main__ as cluster
import examples.demo.__main__ as demo
import examples.grpc_client.__main__ as grpc_client

EXAMPLES = {"examples.cluster": cluster, "examples.grpc_client": grpc_client, "examples.demo": demo}


class StartedError(Exception):
    """Something was started or called."""


@pytest.fixture(params=EXAMPLES)
def example(request, monkeypatch):
    """Name of an example, and a function that runs it with some arguments and returns its exit code."""

    def started(*arguments, **more):
        raise StartedError

    for name in ("Processes", "Client"):
        monkeypatch.setattr(EXAMPLES[request.param], name, started, raising=False)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["example", *arguments])
        with pytest.raises(SystemExit) as ended:
            EXAMPLES[request.param].main()
        return ended.value.code

    return request.param, run


def test_help_names_the_command_and_starts_nothing(example, capsys):
    name, run = example
    assert run("--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m {name} [-h]")


@pytest.mark.parametrize("arguments", [["--nothing"], ["one", "two"]])
def test_unknown_arguments_are_refused(example, arguments, capsys):
    _, run = example
    assert run(*arguments) == 2
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "address"), [([], cluster.PLACES[-1][1]), (["unix:a"], "unix:a")])
def test_the_client_asks_the_cluster_or_the_address_that_is_named(arguments, address, monkeypatch):
    asked = []
    monkeypatch.setattr("sys.argv", ["example", *arguments])
    monkeypatch.setattr(grpc_client, "ask", asked.append)
    grpc_client.main()
    assert asked == [address]
