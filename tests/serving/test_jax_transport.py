"""States carried by JAX's transfer engine, in processes of their own: scenarios, and the roles of a cluster."""

import subprocess
import sys

import pytest

from deepinfer_jax.request import SamplingParams
from serving.transfer_probe import probe
from tests.serving.jax_scenarios import SCENARIOS
from tests.serving.process_clusters import (
    CONFIGURATION,
    PROCESS_ENVIRONMENT,
    SECONDS,
    Member,
    make_model,
    running_cluster,
)

PROMPT = tuple(3 + (7 * place) % 90 for place in range(141))
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=11, ignore_eos=True)
# "d2" does without the transfer engine.
MEMBERS = {
    "p": Member("prefill"),
    "d1": Member("decode"),
    "g1": Member("gateway", workers=("p", "d1")),
    "d2": Member("decode", options=("--set=kv.transports=['grpc']",)),
    "g2": Member("gateway", workers=("p", "d2")),
}


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
def cluster(tmp_path_factory):
    model, directory = make_model(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("c")
    configuration = CONFIGURATION.replace("[kv]", "[kv]\ntransports = ['jax', 'grpc']")
    with running_cluster(directory, model, MEMBERS, configuration) as cluster:
        cluster.ensure()
        yield cluster
        assert cluster.idle()


@pytest.mark.slow
@pytest.mark.parametrize(("decode", "gateway", "transport"), [("d1", "g1", "jax"), ("d2", "g2", "grpc")])
def test_a_split_request_gives_the_engines_tokens(cluster, decode, gateway, transport):
    """By the transfer engine; a worker without it takes the state of the same holder by gRPC."""
    alone = cluster.client(decode).complete(PROMPT, PARAMS)
    split = cluster.client(gateway).complete(PROMPT, PARAMS, salt=b"elsewhere")
    assert alone.tokens == split.tokens
    assert len(split.tokens) == PARAMS.max_tokens
    receipt = split.finished.receipt
    assert (receipt.prefill_worker, receipt.transport) == ("p", transport)
    assert receipt.handed_over_bytes > 0
    said = "transport jax is available" in [line["message"] for line in cluster.log(decode)]
    assert said == (transport == "jax")
