"""Servers as processes of their own: what clients see when they are killed, told to end, or started wrongly.

Workers of a tiny model, deterministic and exact, so that what goes on elsewhere must be the same to the token.
"""

import concurrent.futures
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace

import pytest

from deepinfer_jax.errors import ConfigError
from serving.client import Client
from serving.configuration import load_configuration
from serving.errors import UnavailableError
from serving.events import Delta, Finished, Started
from serving.loaded_engine import load_engine
from serving.processes import Processes
from tests.serving.process_clusters import (
    CONFIGURATION,
    LONG,
    LONG_PROMPT,
    PROCESS_ENVIRONMENT,
    PROMPT,
    SECONDS,
    SHORT,
    Member,
    make_model,
    running_cluster,
    tokens_of,
    until,
)

# A prefill worker, two decode workers and a gateway.
MEMBERS = {
    "p": Member("prefill"),
    "d1": Member("decode"),
    "d2": Member("decode"),
    "g": Member("gateway", workers=("p", "d1", "d2")),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def processes(model, tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("c"), model, MEMBERS) as cluster:
        yield cluster


@pytest.fixture
def cluster(processes):
    processes.ensure()
    yield processes
    assert processes.idle()


def test_a_request_passes_through_all_processes_and_leaves_its_trace(cluster):
    events = list(cluster.client().generate(PROMPT, SHORT, request_id="traced-1", salt=b"a"))
    receipt = events[-1].receipt
    assert (receipt.prefill_worker, receipt.transport, receipt.failovers) == ("p", "shm", 0)
    assert receipt.worker in ("d1", "d2")
    assert receipt.handed_over_bytes > 0
    assert len(tokens_of(events)) == 8
    for name, method in (("g", "Inference/Generate"), ("p", "Prefill/Prefill"), (receipt.worker, "Inference/Generate")):
        assert cluster.calls(name, "traced-1") == [(f"/deepinfer.v1.{method}", "OK")]
    (answered,) = [line for line in cluster.log("g") if line["message"] == "answered"]
    assert (answered["request_id"], answered["completion_tokens"]) == ("traced-1", 8)
    prompt = re.compile(r"\b" + r"\D{1,3}".join(map(str, PROMPT[:4])) + r"\b")
    assert prompt.search(str(PROMPT))
    assert not [name for name in cluster.running if prompt.search(cluster.running[name].log.read_text())]


def test_a_decode_worker_killed_while_it_answers_is_not_noticed(cluster):
    wanted = tokens_of(cluster.client().generate(PROMPT, LONG, salt=b"b"))
    events = cluster.client().generate(PROMPT, LONG, salt=b"c")
    seen = until(events, Delta)
    # The first token is the prefill worker's; what follows comes from the one that is killed.
    seen += until(events, Delta)
    cluster.kill(seen[0].worker)
    seen += list(events)
    assert tokens_of(seen) == wanted
    receipt = seen[-1].receipt
    assert (seen[-1].reason, seen[-1].completion_tokens, receipt.failovers) == ("length", 400, 1)
    assert receipt.worker != seen[0].worker


def test_a_prefill_worker_killed_while_a_prompt_waits_for_it_is_not_noticed(cluster):
    wanted = tokens_of(cluster.client().generate(PROMPT, SHORT, salt=b"d"))
    cluster.signal("p", signal.SIGSTOP)
    events = cluster.client().generate(PROMPT, SHORT, salt=b"e")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        seen = pool.submit(list, events)
        time.sleep(0.3)
        cluster.kill("p")
        seen = seen.result()
    assert tokens_of(seen) == wanted
    assert (seen[-1].receipt.prefill_worker, seen[-1].receipt.failovers) == ("", 0)


def test_a_prefill_worker_killed_while_it_computes_is_not_noticed(cluster):
    wanted = tokens_of(cluster.client().generate(LONG_PROMPT, SHORT, salt=b"f"))
    events = cluster.client().generate(LONG_PROMPT, SHORT, salt=b"g")
    seen = until(events, Started)
    cluster.kill("p")
    seen += list(events)
    assert tokens_of(seen) == wanted
    assert (seen[-1].receipt.prefill_worker, seen[-1].completion_tokens) == ("", 8)


def test_a_prefill_worker_killed_while_its_state_is_fetched_is_not_noticed(cluster):
    wanted = tokens_of(cluster.client().generate(LONG_PROMPT, SHORT, salt=b"h"))
    events = cluster.client().generate(LONG_PROMPT, SHORT, salt=b"i")
    seen = until(events, Started)
    # It has the handle, and stands still from here on.
    cluster.signal(seen[0].worker, signal.SIGSTOP)
    try:
        seen += until(events, Delta)
        cluster.kill("p")
    finally:
        cluster.signal(seen[0].worker, signal.SIGCONT)
    seen += list(events)
    assert tokens_of(seen) == wanted
    assert seen[-1].reason == "length"


def test_a_worker_that_is_told_to_end_finishes_what_it_has(cluster):
    wanted = tokens_of(cluster.client().generate(PROMPT, LONG, salt=b"j"))
    events = cluster.client().generate(PROMPT, LONG, salt=b"k")
    seen = until(events, Started)
    process = cluster.running[seen[0].worker]
    # The first one is of the prompt's worker: the other may not have been reached yet, and refuse.
    seen += until(events, Delta) + until(events, Delta)
    process.popen.terminate()
    # New requests go elsewhere meanwhile.
    other = cluster.client().complete(PROMPT, SHORT, salt=b"l")
    seen += list(events)
    assert tokens_of(seen) == wanted
    assert (seen[-1].receipt.worker, seen[-1].receipt.failovers) == (seen[0].worker, 0)
    assert len(other.tokens) == 8
    assert process.popen.wait(60) == 0


def test_a_gateway_that_is_told_to_end_finishes_what_it_has_and_takes_nothing_new(cluster):
    events = cluster.client().generate(PROMPT, LONG, salt=b"m")
    seen = until(events, Delta)
    cluster.running["g"].popen.terminate()
    refused = None
    while refused is None:
        # The signal takes its time.
        try:
            cluster.client().complete(PROMPT, SHORT, salt=b"n")
        except UnavailableError as error:
            refused = error
    assert refused.reason == "DRAINING"
    seen += list(events)
    assert isinstance(seen[-1], Finished)
    assert len(tokens_of(seen)) == 400
    assert cluster.running["g"].popen.wait(60) == 0


@pytest.mark.parametrize("name", ["d1", "g"])
def test_a_second_signal_refuses_what_runs_and_ends_the_process_in_order(cluster, name):
    running = cluster.client(name).generate(PROMPT, replace(LONG, max_tokens=4000), salt=b"o")
    until(running, Delta)
    process = cluster.running[name]
    process.popen.terminate()
    # Two signals that come together are one.
    while not any(line["message"] == "stopping" for line in cluster.log(name)):
        time.sleep(0.02)
    process.popen.terminate()
    with pytest.raises(UnavailableError) as refused:
        list(running)
    assert refused.value.reason == "DRAINING"
    assert process.popen.wait(60) == 130
    lines = process.log.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("{")] == []
    assert cluster.log(name)[-1]["message"] == "ended"


def test_one_process_does_everything_and_shows_its_metrics(model, tmp_path):
    path = tmp_path / "server.toml"
    path.write_text(CONFIGURATION, encoding="utf-8")
    options = ["--config", str(path), "--model", str(model), "--metrics", "127.0.0.1:0"]
    address = f"unix:{tmp_path / 's'}"
    with Processes(tmp_path, options, environment=PROCESS_ENVIRONMENT) as processes:
        process = processes.start("all", address)
        process.wait_healthy(SECONDS)
        with Client(address, timeout=SECONDS) as client:
            assert client.model_info().role == "all"
            answer = client.complete(PROMPT, SHORT)
        log = process.log.read_text(encoding="utf-8")
        port = int(re.search(r"metrics at port (\d+)", log)[1])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            metrics = page.read().decode()
        assert process.stop() == 0
    assert len(answer.tokens) == 8
    assert 'deepinfer_gateway_finished_requests_total{reason="length"} 1.0' in metrics
    assert "deepinfer_generated_tokens_total 8.0" in metrics


def serve(*options):
    command = [sys.executable, "-m", "serving.commands", "serve", *options]
    return subprocess.run(command, env=PROCESS_ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS)


def test_wrong_configurations_end_with_one_sentence(tmp_path):
    ended = serve("--set", "engine.slotz=4")
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr.count("\n") == 1
    assert "did you mean 'slots'?" in ended.stderr
    path = tmp_path / "server.toml"
    path.write_text("[server]\nrole = 'gateway'\n", encoding="utf-8")
    ended = serve("--config", str(path))
    assert (ended.returncode, ended.stderr.count("\n")) == (3, 1)


def test_addresses_that_cannot_be_had_are_refused_before_anything_is_loaded(tmp_path):
    ended = serve("--role", "gateway", "--worker", "127.0.0.1:1", "--listen", f"unix:{tmp_path / 'none' / 's'}")
    assert (ended.returncode, ended.stderr.count("\n")) == (3, 1)
    assert f"there is no directory {tmp_path / 'none'}" in ended.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for role in ("all", "prefill"):
            ended = serve("--role", role, "--model", str(tmp_path), "--listen", address)
            assert (ended.returncode, ended.stderr.count("\n")) == (3, 1)
            assert f"'server.listen' is '{address}'; accepted: an address that is free" in ended.stderr
        ended = serve("--model", str(tmp_path), "--listen", "127.0.0.1:0", "--metrics", address)
        assert (ended.returncode, ended.stderr.count("\n")) == (3, 1)
        assert f"'metrics.listen' is '{address}'; accepted: an address that is free" in ended.stderr


def test_more_context_than_the_model_has_is_refused_before_it_is_read(model):
    configuration = load_configuration(None, {"model": {"directory": str(model)}, "engine": {"max_context": 4097}})
    sentence = "'engine.max_context' is 4097; accepted: at most 4096, the model's max_position_embeddings"
    with pytest.raises(ConfigError, match=sentence):
        load_engine(configuration, "w", pytest.fail)
