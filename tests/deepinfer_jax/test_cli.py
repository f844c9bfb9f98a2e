"""The command group: what it lists, where commands come from, and how failures end a process."""

import shlex
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from deepinfer_jax import __version__, cli
from deepinfer_jax.commands import bench, convert, generate, inspect, logits, synthesize
from deepinfer_jax.errors import CheckpointError, ConfigError, InputError

REPOSITORY = Path(__file__).resolve().parents[2]
EPILOGS = (cli.EPILOG, bench.EPILOG, convert.EPILOG, generate.EPILOG, inspect.EPILOG, logits.EPILOG, synthesize.EPILOG)
BUILT_IN = ["bench", "convert", "generate", "inspect", "logits", "synthesize"]
EXAMPLES = [line.strip() for epilog in EPILOGS for line in epilog.splitlines() if "deepinfer-jax " in line]


@click.command()
def probe() -> None:
    """Stand in for a command of another package."""
    click.echo("probed")


def found(monkeypatch: pytest.MonkeyPatch, *entries: EntryPoint) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: [entry for entry in entries if entry.group == group])


def run_module(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "deepinfer_jax.cli", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)


def test_help_lists_the_commands_with_examples_and_exit_codes():
    result = CliRunner().invoke(cli.main, ["--help"])
    assert result.exit_code == 0
    for command in BUILT_IN:
        assert f"\n  {command} " in result.stdout
        assert f"  deepinfer-jax {command} " in result.stdout
    assert "  130  interrupted" in result.stdout


def test_a_command_runs_from_the_source_tree():
    result = run_module("--version")
    assert (result.returncode, result.stdout.strip()) == (0, f"deepinfer-jax, version {__version__}")
    result = run_module("inspect", "--preset", "v4.1-lightning")
    assert result.returncode == 2
    assert "'v4.1-lightning' is not one of 'v4.1-flash'" in result.stderr


def test_built_in_commands_need_no_installed_metadata(monkeypatch):
    found(monkeypatch)
    assert cli.main.list_commands(click.Context(cli.main)) == BUILT_IN
    assert CliRunner().invoke(cli.main, ["logits", "--help"]).exit_code == 0


def test_other_packages_add_commands_and_replace_built_in_ones(monkeypatch):
    place = f"{__name__}:probe"
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    found(
        monkeypatch,
        EntryPoint("probe", place, cli.COMMAND_GROUP),
        EntryPoint("inspect", place, cli.COMMAND_GROUP),
        EntryPoint("foreign", place, "console_scripts"),
    )
    assert sorted(cli.command_entries()) == sorted([*BUILT_IN, "probe"])
    for name in ("probe", "inspect"):
        assert CliRunner().invoke(cli.main, [name]).stdout == "probed\n"


def test_the_entry_points_of_the_package_are_the_built_in_commands():
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split(f'[project.entry-points."{cli.COMMAND_GROUP}"]\n')[1].split("\n[")[0]
    lines = dict(line.replace('"', "").split(" = ") for line in section.strip().splitlines())
    assert {name: lines[name] for name in cli.BUILT_IN} == dict(cli.BUILT_IN)


@pytest.mark.parametrize(
    ("error", "exit_code", "sentence"),
    [
        (InputError("token id", 512, "0 to 511"), 2, "Error: input 'token id' is 512; accepted: 0 to 511\n"),
        (ConfigError("dim", 3, "4"), 3, "Error: configuration key 'dim' is 3; accepted: 4\n"),
        (CheckpointError("w", "missing", "all"), 4, "Error: checkpoint entry 'w' is 'missing'; accepted: all\n"),
        (PermissionError(13, "Permission denied", "w.bin"), 1, "Error: w.bin: Permission denied\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_failures_end_with_a_sentence_and_an_exit_code(error, exit_code, sentence, monkeypatch):
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli.main, "get_command", lambda ctx, name: click.Command(name, callback=fail))
    result = CliRunner().invoke(cli.main, ["anything"])
    assert (result.exit_code, result.stdout, result.stderr) == (exit_code, "", sentence)


def test_a_defect_keeps_its_traceback(monkeypatch):
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli.main, "get_command", lambda ctx, name: click.Command(name, callback=fail))
    assert isinstance(CliRunner().invoke(cli.main, ["anything"]).exception, ZeroDivisionError)


def test_an_unknown_command_is_a_usage_error():
    result = CliRunner().invoke(cli.main, ["serf"])
    assert result.exit_code == 2
    assert "No such command 'serf'" in result.stderr


def test_there_are_examples_of_every_command():
    assert {line.split("deepinfer-jax ")[1].split()[0] for line in EXAMPLES} >= {*BUILT_IN}


@pytest.mark.parametrize("line", EXAMPLES)
def test_every_example_of_the_help_is_accepted(line, tmp_path, monkeypatch):
    """The words are parsed and checked; nothing is run."""
    monkeypatch.chdir(tmp_path)
    for name in ("MODEL", "CONVERTED"):
        Path(name).mkdir()
    for name in ("chat.json", "config.json", "ids.json"):
        Path(name).write_text("[]", encoding="utf-8")
    words = shlex.split(line.split("deepinfer-jax ")[1].split(" | ")[0].split(" > ")[0])
    command = cli.main.get_command(click.Context(cli.main), words[0])
    with command.make_context(words[0], words[1:]):
        pass
