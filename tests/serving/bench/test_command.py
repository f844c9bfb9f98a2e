"""The command: its options, what it prints, and its exit code."""

import dataclasses
import json
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from deepinfer_jax.commands import bench
from serving.bench.cluster import Addresses, measured_configuration
from serving.bench.report import Report
from serving.bench.run import PARTS
from serving.bench.streams import StreamFigures
from serving.bench.wide_model import write_wide_model
from serving.commands import bench_serve
from serving.configuration import ModelSection, load_configuration
from serving.errors import refusal

STREAMS = StreamFigures(streams=4, prompt=16, tokens=10, held=4, answering=4, equal=4, failed=0, seconds=2.0)
REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def ran(monkeypatch):
    """Run the command; ``result`` is what its parts give, an error is raised. The calls come back with the output."""
    monkeypatch.setattr(bench_serve, "interrupt_on_signals", lambda: None)

    def run(*options, result=None):
        calls = []

        def run_parts(*arguments, **named):
            calls.append((*arguments, named))
            if isinstance(result, Exception):
                raise result
            return result or Report("m")

        monkeypatch.setattr(bench_serve, "run_parts", run_parts)
        return CliRunner().invoke(bench_serve.command, options), calls

    return run


def test_everything_is_measured_unless_parts_are_named(ran):
    result, ((model, parts, sizes, _, named),) = ran()
    assert (result.exit_code, model, parts, named["running"]) == (0, ModelSection(), PARTS, None)
    assert (sizes.streams, sizes.long_prompt) == (128, 4000)
    _, ((model, parts, sizes, _, named),) = ran(
        "--parts", "streams,input", "--streams", "5", "--address", "h:1", "--decode", "h:2", "--numerics", "bf16"
    )
    assert (parts, sizes.streams, model.numerics) == (("streams", "input"), 5, "bf16")
    assert named["running"] == Addresses(gateway="h:1", decode="h:2")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--parts", "streams,speed"], "'speed' is none of overhead, input"),
        (["--decode", "h:1"], "--prefill and --decode go with --address"),
        (["--model", ".", "--preset", "mini-40"], "at most one of --model and --preset"),
    ],
)
def test_options_that_do_not_fit_are_named(ran, options, sentence):
    result, calls = ran(*options)
    assert (result.exit_code, calls) == (2, [])
    assert sentence in result.stderr


def test_a_stream_that_differs_is_exit_code_1(ran):
    result, _ = ran("--json", result=Report("m", streams=STREAMS))
    assert result.exit_code == 0
    assert json.loads(result.stdout)["streams"]["equal"] == 4
    result, _ = ran(result=Report("m", streams=dataclasses.replace(STREAMS, equal=3)))
    assert result.exit_code == 1
    assert "4 streams of 16 + 10 tokens: equal to the engine alone  3" in result.stdout


def test_a_server_that_refuses_is_one_sentence(ran):
    result, _ = ran(result=refusal("NO_WORKER", "no worker is there"))
    assert (result.exit_code, result.stderr) == (1, "Error: NO_WORKER: no worker is there\n")


def test_other_packages_add_benchmarks(monkeypatch):
    entries = [EntryPoint("serve", "serving.commands.bench_serve:command", bench.BENCH_GROUP)]
    monkeypatch.setattr(bench, "entry_points", lambda group: entries if group == bench.BENCH_GROUP else [])
    context = click.Context(bench.command)
    assert {"model", "offline", "serve"} <= set(bench.command.list_commands(context))
    assert bench.command.get_command(context, "serve") is bench_serve.command
    assert bench.command.get_command(context, "nothing") is None
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.entry-points."{bench.BENCH_GROUP}"]\nserve = "{entries[0].value}"\n' in text


@pytest.mark.parametrize("streams", [None, 16])
def test_servers_read_the_configuration_that_is_measured(tmp_path, streams):
    file = tmp_path / "server.toml"
    wanted = measured_configuration(ModelSection(numerics="bf16"), streams=streams)
    file.write_text(wanted.toml(), encoding="utf-8")
    assert load_configuration(file, {}) == wanted
    assert (wanted.engine.deterministic, wanted.engine.slots) == (streams is not None, streams or 2)


def test_a_wide_model_has_the_released_widths(tmp_path):
    section = write_wide_model(tmp_path / "wide")
    config = json.loads(Path(section.directory, "config.json").read_text(encoding="utf-8"))["text_config"]
    assert (config["head_dim"], config["index_head_dim"], config["max_position_embeddings"]) == (512, 128, 4096)
