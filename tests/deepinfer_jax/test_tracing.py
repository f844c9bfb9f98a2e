"""Profiles of an engine's steps: as many as were asked for, one at a time, ended whatever happens to the engine.

Deterministic f32 over a tiny model.
"""

import asyncio
import dataclasses
import gzip
import json

import jax
import numpy as np
import pytest

from deepinfer_jax.async_engine import AsyncEngine
from deepinfer_jax.errors import InputError
from deepinfer_jax.request import Request, SamplingParams
from deepinfer_jax.tracing import STEP_NAME
from tests.running_engines import fresh_engine, run

PROMPT = tuple(np.random.default_rng(7).integers(3, 95, 20).tolist())
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
REQUEST = Request(PROMPT, GREEDY)


def traced_steps(directory) -> list[int]:
    """Numbers of the steps whose dispatch is named in the one trace of a directory."""
    (file,) = directory.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return sorted(int(event["args"]["step_num"]) for event in events if event.get("name") == STEP_NAME)


def finish(engine) -> None:
    while engine.busy:
        engine.step()


def test_a_trace_holds_the_next_steps_and_ends(tmp_path):
    """The step behind the last one is dispatched before that is read."""
    engine = fresh_engine("f32")
    expected = run(engine, [REQUEST])[0].tokens
    engine = fresh_engine("f32")
    number = engine.submit(REQUEST)
    engine.step()
    engine.step()
    engine.trace(tmp_path, 2)
    news = []
    while engine.busy:
        news += engine.step()
    assert number == 0
    assert traced_steps(tmp_path) == [3, 4, 5]
    assert [token for output in news for token in output.tokens] == expected[1:]


def test_one_trace_at_a_time(tmp_path):
    engine = fresh_engine("f32")
    engine.trace(tmp_path / "one", 2)
    refused = f"input 'trace' is '{tmp_path / 'two'}'; accepted: one trace at a time (wait for the end of the one into "
    with pytest.raises(InputError) as before:
        engine.trace(tmp_path / "two", 2)
    engine.submit(REQUEST)
    engine.step()
    with pytest.raises(InputError) as while_it_runs:
        engine.trace(tmp_path / "two", 2)
    assert str(before.value) == str(while_it_runs.value) == f"{refused}{tmp_path / 'one'})"
    finish(engine)
    run(engine, [REQUEST])
    assert traced_steps(tmp_path / "one") == [1, 2, 3]
    engine.trace(tmp_path / "two", 1)
    run(engine, [REQUEST])
    assert len(traced_steps(tmp_path / "two")) == 2
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["one", "two"]


@pytest.mark.parametrize("steps", [0, -1])
def test_a_trace_has_a_step(steps, tmp_path):
    with pytest.raises(InputError, match=f"'trace steps' is {steps}; accepted: 1 or more"):
        fresh_engine("f32").trace(tmp_path, steps)


def test_a_trace_ends_when_there_is_nothing_left_to_do(tmp_path):
    engine = fresh_engine("f32")
    engine.trace(tmp_path / "one", 1000)
    for _ in range(3):
        engine.step()
    assert not any(tmp_path.iterdir())
    run(engine, [dataclasses.replace(REQUEST, params=dataclasses.replace(GREEDY, max_tokens=3))])
    assert traced_steps(tmp_path / "one") == [1, 2, 3]
    engine.trace(tmp_path / "two", 1)


def test_a_trace_ends_with_its_engine(tmp_path):
    engine = fresh_engine("f32")
    engine.trace(tmp_path / "never", 5)
    engine.close()
    engine.trace(tmp_path / "one", 1000)
    engine.submit(REQUEST)
    engine.step()
    engine.close()
    assert traced_steps(tmp_path / "one") == [1]
    finish(engine)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_profiler_that_someone_else_uses_stops_no_step(tmp_path):
    engine = fresh_engine("f32")
    engine.trace(tmp_path / "ours", 2)
    engine.submit(REQUEST)
    with jax.profiler.trace(str(tmp_path / "theirs")):
        with pytest.warns(RuntimeWarning, match="no trace into"):
            engine.step()
        finish(engine)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_the_asynchronous_engine_hands_its_refusals_on(tmp_path):
    inner = fresh_engine("f32")

    async def traced(engine):
        await engine.trace(tmp_path, 2)
        with pytest.raises(InputError, match="one trace at a time"):
            await engine.trace(tmp_path, 2)
        return [output async for output in engine.stream(REQUEST)]

    with AsyncEngine(inner) as engine:
        news = asyncio.run(traced(engine))
    assert sum(len(output.tokens) for output in news) == 8
    assert traced_steps(tmp_path) == [1, 2, 3]
