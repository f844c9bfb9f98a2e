"""The engine's benchmark counts what it says, and its trace holds decode steps. Numerics f32, a tiny model."""

import gzip
import json

import numpy as np
import pytest

from deepinfer_jax.bench.offline import OfflineWorkload, measure_offline
from deepinfer_jax.errors import InputError
from deepinfer_jax.tracing import STEP_NAME
from tests.running_engines import tiny_model

pytestmark = pytest.mark.usefixtures("quickly_compiled")


def test_every_concurrency_is_a_row_and_the_trace_has_its_steps(tmp_path):
    config, numerics, params = tiny_model("f32")
    work = OfflineWorkload(
        concurrency=(2, 1),
        prompt=20,
        steps=12,
        repeats=2,
        deterministic=True,
        trace=tmp_path,
        trace_steps=3,
    )
    told = []
    runs = measure_offline(params, config, numerics, work, told.append)
    assert [run.concurrency for run in runs] == [2, 1]
    for run in runs:
        assert run.recompiles == 0
        assert run.tokens_per_second == pytest.approx(run.concurrency / run.step_ms * 1e3)
        assert run.host_share == pytest.approx(run.host_ms_per_step / run.step_ms)
        assert np.isfinite(run.time_to_first_token_ms)
    assert told[-1] == "tracing 3 steps"
    (file,) = tmp_path.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = sorted(int(event["args"]["step_num"]) for event in events if event.get("name") == STEP_NAME)
    # The step behind the last one is dispatched before that is read.
    assert len(steps) == 4
    assert steps == [*range(steps[0], steps[0] + 4)]


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"prompt": 0}, "prompt"),
        ({"steps": 0}, "steps"),
        ({"repeats": 0}, "repeats"),
        ({"trace_steps": 0}, "trace_steps"),
        ({"concurrency": ()}, "concurrency"),
        ({"concurrency": (0,)}, "concurrency"),
    ],
)
def test_work_that_means_nothing_is_refused(fields, key):
    with pytest.raises(InputError) as refused:
        OfflineWorkload(**fields)
    assert refused.value.key == key
