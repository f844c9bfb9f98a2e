"""``bench``: options, tables and JSON, and how failures of engines end the command."""

import dataclasses
import json
import os
import shlex
import signal
from pathlib import Path

import click
import pytest

from deepinfer_jax.bench.comparison import Comparison, Failure, Fraction, Ratio, Row
from deepinfer_jax.bench.machine import MachineRates
from deepinfer_jax.bench.side_by_side import Plan
from deepinfer_jax.commands import bench, settings
from pallas_kernels import TransposedWeight
from tests.engines import one_layer_configuration

pytestmark = pytest.mark.usefixtures("quickly_compiled")

COMPARISON = Comparison(
    prompt=512,
    steps=64,
    processors=2,
    rows=(
        Row("deepinfer-jax", "bf16", 8, 3214.4, 3000.0, 512.25, 500.0, 0.5, 5),
        Row("torch", "bf16", 1, 700.0, 600.0, 41.0, 40.0, 3.0, 5),
        Row("torch", "bf16", 8, 2400.0, 2300.0, 113.0, 99.0, 1.25, 4),
    ),
    ratios=(Ratio("prefill, batch 8, bf16", "bf16", "torch bf16", 1.339, 1.3, 1.3),),
    fractions=(Fraction("bf16", 8, 0.52, 0.871),),
    machine=MachineRates(113e9, 201e9, 16.4e9),
    versions={"torch": "2.13.0", "jax": "0.12.0"},
    parameters={"torch bf16": 52},
    failures=(),
    load_average_before=0.25,
    load_average_after=1.75,
)


@pytest.fixture
def config_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(one_layer_configuration()), encoding="utf-8")
    return file


@pytest.fixture
def compared(monkeypatch):
    """What the command compares, and what it is answered."""
    calls = []

    def answer(result):
        def compare(plan, directory, **options):
            calls.append((plan, directory, options))
            return result

        monkeypatch.setattr(bench, "compare", compare)
        return calls

    return answer


def table(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_model_is_measured(run, config_file):
    workload = ("--batch", 2, "--prompt", 130, "--steps", 3, "--repeats", 1)
    result = run("bench", "model", "--config", config_file, *workload, "--json")
    assert result.exit_code == 0
    figures = json.loads(result.stdout)
    assert (figures["numerics"], figures["batch"], figures["prompt"], figures["steps"]) == ("f32", 2, 130, 3)
    for name in ("prefill_tokens_per_second", "decode_tokens_per_second", "decode_step_ms"):
        assert figures[name] > 0
        assert figures[f"{name}_median"] > 0
    assert figures["compile_seconds"] > 0
    assert figures["peak_memory_bytes"] > 0
    assert "compiling" in result.stderr
    result = run("bench", "model", "--config", config_file, *workload, "--quiet")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = table(result.stdout)
    assert lines[0] == "figure best median"
    assert [line.split()[0] for line in lines[1:]] == [
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "decode_step_ms",
        "compile_seconds",
        "peak_memory_bytes",
        "load_average",
    ]


def test_a_checkpoint_is_measured_with_its_own_weights_and_the_shipped_one_by_default(run, monkeypatch, shipped):
    measured = []

    def record(config, numerics, work, progress, params):
        measured.append((config.vocab_size, numerics.name, work.prompt, params))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure_model", record)
    workload = ("--prompt", 130, "--steps", 3)
    for named in ([], ["--model", shipped]):
        assert run("bench", "model", *named, *workload).exit_code == 130
    (first, second) = measured
    assert first == second == (512, "f32", 130, first[-1])
    assert isinstance(first[-1].head, TransposedWeight)
    monkeypatch.setattr("deepinfer_jax.commands.console.Console.load_model", None)
    result = run("bench", "model", "--prompt", 1000)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "input 'prompt + steps' is 1064; accepted: at most max_position_embeddings 1024" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "sentence"),
    [
        (["model", "--preset", "peer-50m", "--config", "CONFIG"], 2, "give at most one of --model, --preset and"),
        (["model", "--model", ".", "--preset", "peer-50m"], 2, "give at most one of --model, --preset and --config"),
        (["model", "--config", "CONFIG", "--prompt", 250], 2, "input 'prompt + steps' is 314; accepted: at most"),
        (["model", "--config", "BROKEN"], 3, "configuration key 'config.json' is"),
        (["model", "--preset", "peer-50m", "--dtype", "f64"], 2, "'f64' is not one of"),
        (["offline", "--prefix", "--replay"], 2, "give at most one of --prefix and --replay"),
        (["offline", "--prefix", "--trace", "."], 2, "--deterministic and --trace go with the plain run"),
        (["offline", "--replay", "--deterministic"], 2, "--deterministic and --trace go with the plain run"),
        (["offline", "--trace-steps", 0], 2, "Invalid value for '--trace-steps'"),
        (["peers", "--only", "vllm"], 2, "'vllm' is not one of 'torch', 'mlx', 'fastllm'"),
        (["peers", "--environment", "torch"], 2, "'torch' has not the form PEER=DIR"),
        (["peers", "--environment", "torch="], 2, "'torch=' has not the form PEER=DIR"),
        (["peers", "--environment", "jax=."], 2, "input 'environment' is 'jax'; accepted: one of torch"),
        (["peers", "--environment", "mlx=absent"], 2, "accepted: a virtual environment with a bin/python in it"),
        (["peers", "--prompt", 4096], 2, "accepted: at most max_position_embeddings 4096"),
        (["peers", "--repeats", 0], 2, "Invalid value for '--repeats'"),
    ],
)
def test_refusals(arguments, exit_code, sentence, run, config_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("BROKEN").write_text("{", encoding="utf-8")
    result = run("bench", *(config_file if argument == "CONFIG" else argument for argument in arguments))
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert sentence in result.stderr
    assert not Path("build").exists()


def test_a_busy_machine_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (3.456, 0.0, 0.0))
    result = run("bench", "peers", "--work-directory", tmp_path / "work")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "input 'load average' is 3.46; accepted: at most 1" in result.stderr
    assert "or allow more with --maximum-load" in result.stderr


def test_options_make_the_plan(run, compared, tmp_path, monkeypatch):
    calls = compared(COMPARISON)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(settings.ALLOCATOR, "glibc.malloc.check=0")
    # As after the command started itself again.
    monkeypatch.setenv(settings.CACHE, "kept")
    monkeypatch.setenv(settings.OWN, settings.CACHE)
    assert run("bench", "peers").exit_code == 0
    options = ["--only", "mlx", "--only", "torch", "--environment", "mlx=there", "--dtype", "bf16", "--batch", 4]
    options += ["--prompt", 32, "--steps", 4, "--repeats", 2, "--processors", 1, "--maximum-load", 7]
    assert run("bench", "peers", "--work-directory", "work", *options).exit_code == 0
    (default, directory, surroundings), (chosen, other, _) = calls
    assert (default, directory) == (Plan(), Path("build/peers"))
    assert chosen == Plan(
        peers=("mlx", "torch"),
        numerics=("bf16",),
        batches=(4,),
        prompt=32,
        steps=4,
        repeats=2,
        processors=1,
        maximum_load=7.0,
        environments={"mlx": tmp_path / "there"},
    )
    assert other == Path("work")
    # What the user sets for the allocator goes to all engines alike.
    assert surroundings["environment"][settings.ALLOCATOR] == "glibc.malloc.check=0"
    assert settings.CACHE not in surroundings["environment"]
    assert surroundings["own_settings"].keys() == {settings.CACHE, settings.CACHED_FROM}


def test_a_comparison_is_shown_as_tables(run, compared):
    compared(COMPARISON)
    result = run("bench", "peers")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = table(result.stdout)
    assert lines[0] == "Engines (prompt 512, 64 steps, 2 processors; tokens per second)"
    assert lines[2:5] == [
        "torch bf16 1 700 600 41.0 40.0 3.00 5",
        "deepinfer-jax bf16 8 3,214 3,000 512.2 500.0 0.50 5",
        "torch bf16 8 2,400 2,300 113.0 99.0 1.25 4",
    ]
    assert "prefill, batch 8, bf16 bf16 torch bf16 1.34 1.30 1.3" in lines
    assert "matrix product, bfloat16 201 GFLOP/s" in lines
    assert "read 16.4 GB/s" in lines
    assert "bf16 8 52% 87%" in lines
    assert lines[-4:] == ["jax 0.12.0", "torch 2.13.0", "", "load average 0.25 before, 1.75 after"]
    assert max(map(len, result.stdout.splitlines())) <= 120


def test_a_comparison_is_written_as_json(run, compared):
    compared(COMPARISON)
    document = json.loads(run("bench", "peers", "--json").stdout)
    assert document == json.loads(json.dumps(dataclasses.asdict(COMPARISON)))
    assert document["ratios"][0]["best"] == 1.339


def test_failures_of_engines_come_last_and_end_the_command(run, compared):
    failed = dataclasses.replace(COMPARISON, failures=(Failure("mlx f32", "ended with status 1: no memory"),))
    compared(dataclasses.replace(failed, ratios=(), fractions=(), machine=None))
    result = run("bench", "peers", "--quiet")
    assert result.exit_code == 1
    assert result.stderr == "Error: mlx f32: ended with status 1: no memory\n"
    assert table(result.stdout)[0].startswith("Engines")
    assert "Ratios" not in result.stdout


def test_a_terminated_comparison_unwinds(run, monkeypatch):
    ended = []

    def compare(plan, directory, **options):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            ended.append(True)

    monkeypatch.setattr(bench, "compare", compare)
    before = signal.getsignal(signal.SIGTERM)
    assert run("bench", "peers").exit_code == 143
    assert ended == [True]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("line", [line.strip() for line in bench.EPILOG.splitlines() if "deepinfer-jax bench" in line])
def test_every_example_is_accepted_by_its_subcommand(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("[]", encoding="utf-8")
    name, *words = shlex.split(line)[2:]
    subcommand = bench.command.get_command(click.Context(bench.command), name)
    with subcommand.make_context(name, words):
        pass
