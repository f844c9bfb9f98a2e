"""Split equals one engine where the two sides have different numbers of shards, in a process with several devices.

Numerics f32, deterministic, replay mode exact, decoder replay as named. With as many shards on both sides as the engine
alone has, answers are equal bit for bit; otherwise sums over devices round differently, and log-probabilities agree
within 2e-4, tokens where their choice is clear. Rings, slots, pools and tiles differ as well.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("count", "decoder", "among", "ways"),
    [
        (20, "off", "between", 2),
        pytest.param(200, "off", "among", 3, marks=pytest.mark.slow),
        pytest.param(200, "compact", "among", 5, marks=pytest.mark.slow),
    ],
)
def test_numbers_of_shards_may_differ(count, decoder, among, ways):
    command = [sys.executable, "-m", "tests.serving.spread_split_run", str(count), decoder, among]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == ways
    for name, seen in found.items():
        assert seen["requests"] == count
        assert seen["handed over inside a block"]
        assert seen["hits"]
        # Between equal numbers of shards all tokens are compared, and bit for bit.
        assert ("clear tokens" in seen) == ("others" not in name)
        assert seen.get("clear tokens", count) >= count
