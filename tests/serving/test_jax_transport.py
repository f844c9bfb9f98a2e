"""States carried by JAX's transfer engine, in processes of their own: scenarios, and the roles of a cluster."""

import json
import subprocess
import sys

import pytest

from deepinfer_jax.checkpoint.synthetic import synthesize
from deepinfer_jax.request import SamplingParams
from serving.client import Client
from serving.processes import Processes
from serving.transfer_probe import probe
from tests.engines import ENVIRONMENT, REPOSITORY, tiny_drafting_configuration
from tests.serving.jax_scenarios import SCENARIOS

PROCESS_ENVIRONMENT = ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)}
SECONDS = 300.0
PROMPT = tuple(3 + (7 * place) % 90 for place in range(141))
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=11, ignore_eos=True)
CONFIGURATION = """
[engine]
slots = 2
blocks = 100
decode_rows = [2]
prefill_tiles = [1]
block_tokens = 16
deterministic = true
[engine.replay]
mode = "exact"
[kv]
transports = ["jax", "grpc"]
[gateway]
poll_seconds = 0.2
stop_strings = false
"""


@pytest.fixture(scope="module", autouse=True)
def _engine_that_works():
    reason = probe()
    if reason:
        pytest.skip(f"transport jax is not available: {reason}")


# The others take a process each, and are part of the long campaigns.
ALWAYS = ("a_state_arrives_whole_while_it_grows", "damaged_bytes_are_found_and_pulled_by_grpc")
NAMES = [
    pytest.param(function.__name__, marks=() if function.__name__ in ALWAYS else pytest.mark.slow)
    for function in SCENARIOS
]


@pytest.mark.parametrize("name", NAMES)
def test_scenario(name):
    command = [sys.executable, "-m", "tests.serving.jax_scenarios", name]
    ended = subprocess.run(command, env=PROCESS_ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    model, directory = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("c")
    synthesize(tiny_drafting_configuration(), model, quantised=False)
    path = directory / "server.toml"
    path.write_text(CONFIGURATION, encoding="utf-8")
    options = ["--config", str(path), "--model", str(model)]
    with Processes(directory, options, environment=PROCESS_ENVIRONMENT) as running:
        prefill = running.start("prefill", f"unix:{directory / 'p'}", "--name=p")
        prefill.wait_healthy(SECONDS)
        yield running, directory
    assert [process.popen.returncode for process in running.running] == [0] * len(running.running)


def answers(processes, name, *options):
    """The answer of a decode worker by itself, and through a gateway that has the prompt computed elsewhere."""
    running, directory = processes
    decode = running.start("decode", f"unix:{directory / name}", f"--name={name}", *options)
    decode.wait_healthy(SECONDS)
    workers = [f"--worker=unix:{directory / other}" for other in ("p", name)]
    gateway = running.start("gateway", f"unix:{directory / f'g-{name}'}", *workers)
    gateway.wait_healthy(SECONDS)
    with Client(decode.address, timeout=SECONDS) as client:
        alone = client.complete(PROMPT, PARAMS)
    with Client(gateway.address, timeout=SECONDS) as client:
        split = client.complete(PROMPT, PARAMS, salt=b"elsewhere")
    assert alone.tokens == split.tokens
    assert len(split.tokens) == PARAMS.max_tokens
    assert split.finished.receipt.prefill_worker == "p"
    return decode, split.finished.receipt


@pytest.mark.slow
def test_a_split_request_gives_the_engines_tokens_by_the_transfer_engine(processes):
    decode, receipt = answers(processes, "d1")
    assert receipt.transport == "jax"
    assert receipt.handed_over_bytes > 0
    lines = [json.loads(line) for line in decode.log.read_text("utf-8").splitlines() if line.startswith("{")]
    assert "transport jax is available" in [line["message"] for line in lines]


@pytest.mark.slow
def test_a_worker_without_the_transfer_engine_takes_the_same_state_by_grpc(processes):
    _, receipt = answers(processes, "d2", "--set", 'kv.transports=["grpc"]')
    assert receipt.transport == "grpc"
