"""Running commands in this process and in one of their own, and a miniature checkpoint that can chat."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from deepinfer_jax.checkpoint.reader import load_model
from deepinfer_jax.cli import main
from deepinfer_jax.commands import console
from deepinfer_jax.commands import generate as generate_module
from deepinfer_jax.engine import Engine
from deepinfer_jax.engine_build import build_engine
from tests.golden import DATA
from tests.quick_compilation import QUICK_ENVIRONMENT

REPOSITORY = DATA.parent.parent
# A test run in the background inherits an ignored SIGINT; a command at a terminal does not.
START = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("deepinfer_jax.cli", run_name="__main__", alter_sys=True)
"""
CHAT_TOKENS = ("<｜System｜>", "<think>", "</think>", "｜DSML｜")


@pytest.fixture
def run() -> Callable[..., Result]:
    """Run a command line in this process, so that compiled steps are shared between tests."""

    def invoke(*arguments: object, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture(scope="session", autouse=True)
def weights_read_once() -> Iterator[None]:
    """Read every checkpoint once in this process; processes of their own read theirs."""
    read = functools.cache(load_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "load_model", lambda *arguments, progress, **options: read(*arguments, **options))
        yield


@pytest.fixture(scope="session", autouse=True)
def steps_compiled_once() -> Iterator[None]:
    """Engines of the same model and settings share a device, which begins with an empty state every time."""
    first: dict[tuple, tuple[object, Engine]] = {}

    def build(params, config, numerics, settings, *, tokenizer=None):
        key = id(params), config, numerics, settings
        if key not in first:
            first[key] = params, build_engine(params, config, numerics, settings)
        device = first[key][1]._device
        device.reset()
        form, blocks = first[key][1].receiver.form, settings.blocks
        return Engine(device, config, settings, blocks=blocks, form=form, costs={}, tokenizer=tokenizer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate_module, "build_engine", build)
        yield


@pytest.fixture
def start() -> Callable[..., subprocess.Popen]:
    """Start a command line in a process of its own, with byte streams that hold nothing back."""

    def popen(*arguments: object) -> subprocess.Popen:
        environment = (
            os.environ
            | QUICK_ENVIRONMENT
            | {
                "PYTHONPATH": str(REPOSITORY),
                "JAX_COMPILATION_CACHE_DIR": str(REPOSITORY / ".jax_cache"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
        )
        return subprocess.Popen(
            [sys.executable, "-c", START, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )

    return popen


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The golden checkpoint in place of the model that comes with the library."""
    directory = DATA / "tiny-a" / "quant"
    monkeypatch.setattr("deepinfer_jax.checkpoint.default_model.FOLDER", str(directory))
    return directory


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden checkpoint with the chat format's control tokens in place of its last four text tokens.

    The configuration stays the same, and with it the compiled steps: each of the eight tokens is a class of its own.
    """
    directory = tmp_path_factory.mktemp("chat")
    source = DATA / "tiny-a" / "quant"
    for path in source.iterdir():
        if path.name != "tokenizer.json":
            (directory / path.name).symlink_to(path)
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    first = 508 - len(CHAT_TOKENS)
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {spelling: number for spelling, number in vocabulary.items() if number < first}
    content["model"]["merges"] = content["model"]["merges"][: -len(CHAT_TOKENS)]
    model = content["added_tokens"][0]
    content["added_tokens"] += [
        model | {"id": first + place, "content": spelling, "special": False}
        for place, spelling in enumerate(CHAT_TOKENS)
    ]
    content["added_tokens"].sort(key=lambda token: token["id"])
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


@pytest.fixture
def incomplete_model(tmp_path: Path) -> Path:
    """A checkpoint whose configuration describes one layer more than its files hold."""
    directory = tmp_path / "incomplete"
    directory.mkdir()
    source = DATA / "tiny-a" / "bf16"
    for path in source.iterdir():
        if path.name != "config.json":
            (directory / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["num_hidden_layers"] += 1
    config["text_config"]["compress_ratios"].insert(10, 1)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
