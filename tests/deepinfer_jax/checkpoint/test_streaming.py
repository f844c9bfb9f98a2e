"""Memory and interruption at size: a table of 3 GB in a sparse file is read, converted, killed, resumed and restored.

Every step runs in a process of its own, which measures itself: peak anonymous and shared memory above its start, less
the arrays that it was asked for.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.checkpoint.converted import read_manifest
from deepinfer_jax.checkpoint.digest import read_digests
from deepinfer_jax.checkpoint.pieces import Plane
from deepinfer_jax.checkpoint.released import ReleasedStorage
from tests.golden import DATA
from tests.large_checkpoint import TABLE, write_large

REPOSITORY = DATA.parent.parent
READER_LIMIT, CONVERSION_LIMIT = 512, 1024  # MiB
KILLED_BEHIND = 12  # bundles


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with `released`, which has a table of 96 million rows."""
    directory = tmp_path_factory.mktemp("large")
    write_large(directory / "released", 16_000_000)
    table = directory / "released" / "table.safetensors"
    assert table.stat().st_size > 3e9
    assert table.stat().st_blocks * 512 < 1e6
    return directory


def environment(devices: int = 1) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_COMPILATION_CACHE_DIR": str(REPOSITORY / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }


def run(work: Path, step: str, devices: int = 1) -> dict[str, float]:
    """The figures of one step of `tests.large_checkpoint`."""
    command = [sys.executable, "-m", "tests.large_checkpoint", str(work), step]
    process = subprocess.run(
        command, env=environment(devices), cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False
    )
    assert process.returncode == 0, process.stderr
    figures = json.loads(process.stdout)[step]
    print(step, figures)
    return figures


@pytest.fixture(scope="module")
def read(work: Path) -> dict[str, float]:
    """Figures of the direct read, packed, onto one device."""
    return run(work, "load released 1")


@pytest.fixture(scope="module")
def killed(work: Path) -> dict[str, int]:
    """A conversion killed in the middle: what was noted as finished, and when its bundles were made."""
    command = [sys.executable, "-m", "deepinfer_jax.cli", "convert", str(work / "released"), str(work / "converted")]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    notes = work / "converted" / "conversion"
    while len(list(notes.glob("*-*.json"))) < KILLED_BEHIND:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (work / "converted" / "arrays.json").exists()
    finished = [path.stem for path in notes.glob("*-*.json")]
    assert len(finished) < 40
    return {name: (work / "converted" / "arrays" / name).stat().st_mtime_ns for name in finished}


@pytest.fixture(scope="module")
def resumed(work: Path, killed: dict[str, int]) -> dict[str, float]:
    """Figures of the conversion that went on."""
    return run(work, "convert")


def test_reading_holds_nothing_but_the_arrays(read):
    assert read["resident"] > 3e9 / 2**20
    assert read["above"] < READER_LIMIT


def test_a_killed_conversion_goes_on(work, killed, resumed):
    """What was finished is not written again, and the digests are those of the source, hashed here anew."""
    target = work / "converted"
    assert {name: (target / "arrays" / name).stat().st_mtime_ns for name in killed} == killed
    assert not (target / "conversion").exists()
    manifest = read_manifest(target)
    assert {path.name for path in (target / "arrays").iterdir()} == manifest.bundles.keys()
    assert len(manifest.arrays[f"{TABLE}.weight"][Plane.DATA].parts) > 45
    assert ReleasedStorage.open(work / "released").verify() == read_digests(target).weights_id
    assert read_digests(target) == read_digests(work / "released")


def test_conversion_holds_a_few_bundles(resumed):
    assert resumed["peak"] < CONVERSION_LIMIT


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_restoring_holds_the_arrays_and_a_few_bundles(devices, work, read, resumed):
    """Restored to one device and spread over eight: every row in its place, and the logits of the direct read."""
    step = f"restore released {devices}"
    figures = run(work, step, devices)
    assert figures["resident"] >= read["resident"]
    assert figures["above"] < READER_LIMIT
    direct, restored = (np.load(work / f"{name}.npy") for name in ("load-released-1", step.replace(" ", "-")))
    assert direct.std() > 0.1
    if devices == 1:
        np.testing.assert_array_equal(restored, direct)
    assert np.abs(restored - direct).max() <= 2e-4
