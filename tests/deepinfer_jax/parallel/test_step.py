"""The sharded step on four CPU devices: its logits, and that experts are really spread.

Numerics f32, replay exact, not deterministic; golden prompts, whose selection gaps are at least 5e-5 (asserted by the
transformer's tests). Caches and padded table rows start as NaN: nothing may read them.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.deepinfer_jax.parallel.sharded_run import DEVICES, REQUESTS
from tests.golden import tensors

REPOSITORY = Path(__file__).resolve().parents[3]
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    result = tmp_path_factory.mktemp("sharded") / "run.npz"
    command = [sys.executable, "-m", "tests.deepinfer_jax.parallel.sharded_run", str(result)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return tensors(result)


@pytest.mark.parametrize("device", range(DEVICES))
def test_logits_equal_those_of_one_device(run: dict[str, np.ndarray], device: int) -> None:
    assert run[f"{device}.sharded"].shape == run[f"{device}.single"].shape
    assert np.abs(run[f"{device}.sharded"] - run[f"{device}.single"]).max() <= TOLERANCE


@pytest.mark.parametrize("device", range(DEVICES))
def test_logits_are_the_golden_ones(run: dict[str, np.ndarray], device: int) -> None:
    name, length = REQUESTS[device]
    want = tensors("tiny-a/logits_f32.safetensors")[name][:length]
    assert np.abs(run[f"{device}.sharded"] - want).max() <= TOLERANCE


def test_every_device_holds_its_own_experts_only(run: dict[str, np.ndarray]) -> None:
    assert run["experts.held"].tolist() == [run["experts.all"] // DEVICES] * DEVICES
    assert sorted(run["experts.devices"].tolist()) == list(range(DEVICES))
