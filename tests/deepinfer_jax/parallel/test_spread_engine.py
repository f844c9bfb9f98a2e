"""The engine over eight CPU devices, each a shard with requests of its own: the same tokens as on one device.

Numerics f32, not deterministic, replay mode exact. Freed slots and blocks are filled with NaN.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict:
    result = tmp_path_factory.mktemp("spread") / "run.json"
    command = [sys.executable, "-m", "tests.deepinfer_jax.parallel.spread_engine_run", str(result)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(result.read_text(encoding="utf-8"))


def test_tokens_are_those_of_one_device(run: dict) -> None:
    assert run["eight"]["tokens"] == run["one"]["tokens"]
    assert sum(map(len, run["one"]["tokens"])) == 24 * 12


def test_log_probabilities_are_close(run: dict) -> None:
    np.testing.assert_allclose(run["eight"]["logprobs"], run["one"]["logprobs"], atol=2e-4)


def test_requests_ran_side_by_side_on_the_shards(run: dict) -> None:
    """One device has three slots for 24 branches; eight devices have as many slots as there are branches."""
    assert run["eight"]["steps"] < run["one"]["steps"] / 3


@pytest.mark.parametrize("name", ["one", "eight"])
def test_everything_is_back_and_nothing_compiled(run: dict, name: str) -> None:
    assert run[name]["used"] == [0, 0]
    assert run[name]["recompiles"] == 0
