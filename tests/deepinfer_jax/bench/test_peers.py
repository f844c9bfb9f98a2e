"""What peers are started with, installing one, and the drivers as files."""

import ast
import dataclasses
import json
import sys
import zipfile
from pathlib import Path

import pytest

from deepinfer_jax.bench import peers
from deepinfer_jax.bench.peers import PEERS, check_installed, machine_command, own_commands
from deepinfer_jax.bench.process import EngineError, EngineProcess
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from tests.engines import DRIVERS, ENVIRONMENT, one_layer_configuration, place

# The C interface of fastllm's library, over a made-up engine: prompts come in one after the other, and each token takes
# a moment. Ids of -1 end a request.
FAKE_FTLLM = """
import time
class Library:
    def __init__(self):
        self.free, self.queues, self.asked = time.perf_counter(), {}, []
    def launch_response_llm_model(self, model, count, ids, most, least, *rest):
        assert most == least, "an end-of-text token could stop the request"
        self.free = max(self.free, time.perf_counter()) + 0.05
        self.queues[len(self.queues)] = [self.free + 0.01 * token for token in range(most)]
        self.asked.append(tuple(ids))
        assert len(set(self.asked)) == len(self.asked), "a prompt came back"
        return len(self.queues) - 1
    def can_fetch_response_llm_model(self, model, handle):
        queue = self.queues[handle]
        return not queue or queue[0] <= time.perf_counter()
    def fetch_response_llm_model(self, model, handle):
        return 5 if self.queues[handle] and self.queues[handle].pop(0) else -1
class Model:
    model = 0
    def set_max_batch(self, batch): ...
    def stop_token_ctypes(self, stops): return 0, None
fastllm_lib = Library()
def set_cpu_threads(threads): ...
def set_device_map(device, experts=False): ...
def model(directory, **options): return Model()
"""


def wheel(directory: Path, name: str, files: dict[str, str]) -> Path:
    """A package that pip installs without an index."""
    path = directory / f"{name}-1.0-py3-none-any.whl"
    information = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    return path


def test_a_peer_is_installed_once_into_an_environment_of_its_own(tmp_path):
    where, notes = place(tmp_path), []
    wheel(tmp_path, "rival", {"rival.py": "speed = 7\n"})
    options = ("--no-index", "--find-links", str(tmp_path))
    peer = dataclasses.replace(PEERS["torch"], name="rival", requirements=(*options, "rival==1.0"))
    commands = peer.commands(where, None, notes.append)
    assert [command.title for command in commands] == ["rival f32", "rival bf16"]
    assert len(notes) == 1
    assert "rival: installing" in notes[0]
    python = Path(commands[0].arguments[0])
    assert python == tmp_path / "environments" / "rival" / "bin" / "python"
    assert list(python.parents[1].glob("lib/python3*/site-packages/rival.py")) != []
    assert peer.commands(where, None, notes.append) == commands
    assert len(notes) == 1
    # Other requirements need another installation.
    other = dataclasses.replace(peer, requirements=(*options, "rival==2.0"))
    with pytest.raises(EngineError, match=r"python ended with status 1: ERROR: No matching distribution .*rival==2"):
        other.commands(where, None, notes.append)
    assert len(notes) == 2
    assert not (python.parents[1] / "installed.txt").exists()


def test_peers_run_their_driver_in_their_environment(tmp_path):
    where = dataclasses.replace(place(tmp_path), environment={"PYTHONPATH": "elsewhere", "HOME": "home"})
    installed = tmp_path / "installed"
    for name, peer in PEERS.items():
        if name != "fastllm":
            for command in peer.commands(where, installed, print):
                interpreter, driver, config, dtype, *_ = command.arguments
                assert (command.name, interpreter) == (name, str(installed / "bin" / "python"))
                assert Path(driver).parent == DRIVERS
                assert json.loads(Path(config).read_text(encoding="utf-8"))["model_type"] == (
                    "deepseek_v4" if name == "torch" else "deepseek_v41"
                )
                assert dtype == {"f32": "float32", "bf16": "bfloat16"}[command.numerics]
                # This project is not visible there.
                assert command.environment == {"HOME": "home"}
                assert command.processors == 2
    assert [command.arguments[-1] for command in PEERS["torch"].commands(where, installed, print)] == ["2", "2"]


def test_fastllm_gets_a_checkpoint_of_its_own(tmp_path, monkeypatch):
    tiny = tmp_path / "tiny.json"
    tiny.write_text(json.dumps(one_layer_configuration()), encoding="utf-8")
    monkeypatch.setattr(peers, "_preset_file", lambda: tiny)
    where, notes = place(tmp_path), []
    (command,) = PEERS["fastllm"].commands(where, tmp_path, notes.append)
    directory, threads, batch = command.arguments[2:]
    assert (threads, batch) == ("1", "8")
    config = ModelConfig.from_directory(directory)
    assert (config.quantised, config.hidden_size) == (True, 32)
    assert (Path(directory) / "tokenizer_config.json").is_file()
    assert len(notes) == 1
    PEERS["fastllm"].commands(where, tmp_path, notes.append)
    assert len(notes) == 1
    (one_processor,) = PEERS["fastllm"].commands(dataclasses.replace(where, processors=1), tmp_path, notes.append)
    assert one_processor.arguments[-2] == "1"


def test_this_engine_finds_itself_and_the_settings_it_is_given(tmp_path):
    where = dataclasses.replace(
        place(tmp_path), environment={"PYTHONPATH": "elsewhere", "A": "1"}, own_settings={"A": "2", "B": "3"}
    )
    f32, bf16 = own_commands(where, ("f32", "bf16"))
    root = str(Path(peers.__file__).resolve().parents[2])
    assert f32.environment == {"A": "2", "B": "3", "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{root}:elsewhere"}
    assert f32.arguments[-2:] == ("peer-50m", "f32")
    assert bf16.title == "deepinfer-jax bf16"
    assert machine_command(where).arguments == (sys.executable, "-m", "deepinfer_jax.bench.machine")


def test_environments_that_a_user_names_are_checked(tmp_path):
    (tmp_path / "bin").mkdir()
    with pytest.raises(InputError, match=r"'environment' is 'tensorflow'; accepted: one of torch, mlx, fastllm"):
        check_installed({"tensorflow": tmp_path})
    with pytest.raises(InputError, match=r"'environment mlx' is .*; accepted: a virtual environment with a bin/python"):
        check_installed({"mlx": tmp_path})
    (tmp_path / "bin" / "python").touch()
    check_installed({"mlx": tmp_path})


@pytest.mark.parametrize("path", sorted(DRIVERS.glob("*.py")), ids=lambda path: path.name)
def test_drivers_stand_alone(path):
    """They run in environments without this project, on Pythons from 3.10."""
    module = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    imported = {node.module for node in ast.walk(module) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(module) if isinstance(node, ast.Import) for alias in node.names}
    others = {name.split(".")[0] for name in imported} - set(sys.stdlib_module_names) - {"line_protocol", "run_fastllm"}
    libraries = {
        "run_torch.py": {"torch", "transformers"},
        "run_mlx.py": {"mlx", "mlx_lm"},
        "run_fastllm.py": {"ftllm", "numpy"},
    }
    assert others == libraries.get(path.name, set())


def test_every_driver_belongs_to_a_peer():
    assert {peer.driver for peer in PEERS.values()} == {path.name for path in DRIVERS.glob("run_*.py")}


def test_fastllm_is_measured_from_all_prompts_read_to_the_last_token(tmp_path):
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "ftllm").mkdir()
    (packages / "ftllm" / "__init__.py").touch()
    (packages / "ftllm" / "llm.py").write_text(FAKE_FTLLM, encoding="utf-8")
    information = packages / "ftllm-1.9.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ftllm\nVersion: 1.9.0\n", encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(one_layer_configuration()), encoding="utf-8")
    (command,) = own_commands(place(tmp_path), ("f32",))
    command = dataclasses.replace(
        command,
        arguments=(sys.executable, str(DRIVERS / "run_fastllm.py"), str(tmp_path), "1", "8"),
        environment=ENVIRONMENT | {"PYTHONPATH": str(packages)},
    )
    with EngineProcess(command, tmp_path / "log", 60.0) as engine:
        assert engine.facts == {"versions": {"ftllm": "1.9.0"}}
        alone = engine.turn(1, 16, 8, seed=1, seconds=60.0)
        assert alone.decode_tokens == 8
        assert alone.prefill_seconds == pytest.approx(0.05, rel=0.9)
        assert 0.07 < alone.decode_seconds < 0.5
        several = engine.turn(3, 16, 8, seed=2, seconds=60.0)
    # The first prompts decode while the others wait; that is not counted.
    assert several.prefill_seconds >= 0.15
    assert 8 <= several.decode_tokens < 3 * 8
