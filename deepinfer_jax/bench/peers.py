"""Other engines that run models of this kind on a CPU: what each needs, how it is set up, and how it is started.

Each peer lives in a virtual environment of its own, made once with ``venv`` and ``pip``, and runs a 50 M model: the
preset ``peer-50m`` where it knows V4.1, and otherwise the V4 configuration of the same widths beside the drivers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from deepinfer_jax.bench.comparison import OWN_NAME
from deepinfer_jax.bench.process import EngineCommand, run_to_end
from deepinfer_jax.checkpoint.safetensors import INDEX_FILE
from deepinfer_jax.checkpoint.synthetic import synthesize
from deepinfer_jax.errors import InputError

PRESET = "peer-50m"
# Written when an installation is complete, with what was installed.
MARK = "installed.txt"

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where engines are set up and started.

    ``directory``: work directory, kept between runs. ``environment``: environment variables to start from, and
    ``own_settings`` what is set besides for this project's engine. ``processors``: how many each engine may use.
    ``max_batch``: the largest batch that will be asked for.
    """

    directory: Path
    environment: Mapping[str, str]
    own_settings: Mapping[str, str]
    processors: int
    max_batch: int

    def foreign_environment(self) -> dict[str, str]:
        """Environment variables of programs that must not find this project's packages."""
        return {name: value for name, value in self.environment.items() if name != "PYTHONPATH"}

    def log(self, name: str) -> Path:
        """Where the output of a program goes."""
        return self.directory / "logs" / f"{name}.log"


@dataclasses.dataclass(frozen=True)
class Peer:
    """One other engine.

    ``requirements``: what pip installs. ``numerics``: those it is run in, by the driver's name for them. ``arguments``
    gives the driver's arguments for a place and a numerics, and makes what they name.
    """

    name: str
    requirements: tuple[str, ...]
    driver: str
    numerics: Mapping[str, str]
    arguments: Callable[[Place, str, Progress], tuple[str, ...]]

    def commands(self, place: Place, installed: Path | None, progress: Progress) -> list[EngineCommand]:
        """Set the peer up; one command for each numerics.

        Args:
          place: where.
          installed: an environment that has the requirements already, instead of one made here.
          progress: told what is done.

        Raises:
          EngineError: the installation failed.
        """
        directory = installed or self._install(place, progress)
        driver = str(resources.files("deepinfer_jax.bench.drivers").joinpath(self.driver))
        return [
            EngineCommand(
                name=self.name,
                numerics=name,
                arguments=(str(interpreter(directory)), driver, *self.arguments(place, spelling, progress)),
                environment=place.foreign_environment(),
                processors=place.processors,
            )
            for name, spelling in self.numerics.items()
        ]

    def _install(self, place: Place, progress: Progress) -> Path:
        directory = place.directory / "environments" / self.name
        wanted = "\n".join(self.requirements) + "\n"
        mark = directory / MARK
        if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
            return directory
        progress(f"{self.name}: installing {' '.join(self.requirements)} into {directory} (once; it takes minutes)")
        log = place.log(f"{self.name}-install")
        environment = place.foreign_environment()
        run_to_end([sys.executable, "-m", "venv", "--clear", str(directory)], environment, log)
        pip = [str(interpreter(directory)), "-m", "pip", "install", "--disable-pip-version-check", *self.requirements]
        run_to_end(pip, environment, log)
        mark.write_text(wanted, encoding="utf-8")
        return directory


def interpreter(environment: Path) -> Path:
    """The Python of a virtual environment."""
    return environment / "bin" / "python"


def check_installed(environments: Mapping[str, Path]) -> None:
    """Check that environments which a user names are environments of peers.

    Raises:
      InputError: a name is no peer's, or a directory has no ``bin/python``.
    """
    for name, directory in environments.items():
        if name not in PEERS:
            raise InputError("environment", name, f"one of {', '.join(PEERS)}")
        if not interpreter(directory).is_file():
            raise InputError(f"environment {name}", str(directory), "a virtual environment with a bin/python in it")


def own_commands(place: Place, numerics: tuple[str, ...], config: str = PRESET) -> list[EngineCommand]:
    """This project's engine, one command for each numerics; ``config`` is a preset or a file."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), *filter(None, [place.environment.get("PYTHONPATH")])])
    environment = {**place.environment, **place.own_settings, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    return [
        EngineCommand(
            name=OWN_NAME,
            numerics=name,
            arguments=(sys.executable, "-m", "deepinfer_jax.bench.own_engine", config, name),
            environment=environment,
            processors=place.processors,
        )
        for name in numerics
    ]


def first_tokens_command(command: EngineCommand) -> tuple[EngineCommand, Path]:
    """Fastllm's command turned into the one of ``drivers/fastllm_first_tokens.py``, and the checkpoint it reads."""
    python, driver, directory, threads, _ = command.arguments
    other = str(Path(driver).with_name("fastllm_first_tokens.py"))
    return dataclasses.replace(command, arguments=(python, other, directory, threads)), Path(directory)


def machine_command(place: Place) -> EngineCommand:
    """The measurement of :mod:`deepinfer_jax.bench.machine`."""
    (own,) = own_commands(place, ("f32",))
    arguments = (sys.executable, "-m", "deepinfer_jax.bench.machine")
    return dataclasses.replace(own, name="machine", numerics="rates", arguments=arguments)


def _torch_arguments(place: Place, numerics: str, progress: Progress) -> tuple[str, ...]:
    del progress
    config = resources.files("deepinfer_jax.bench.drivers").joinpath("v4_50m.json")
    return str(config), numerics, str(place.processors)


def _mlx_arguments(place: Place, numerics: str, progress: Progress) -> tuple[str, ...]:
    del place, progress
    return str(_preset_file()), numerics


def _fastllm_arguments(place: Place, numerics: str, progress: Progress) -> tuple[str, ...]:
    del numerics
    directory = place.directory / f"{PRESET}-checkpoint"
    if not (directory / INDEX_FILE).is_file():
        progress(f"fastllm: writing a random checkpoint of {PRESET} to {directory}")
        synthesize(json.loads(_preset_file().read_text(encoding="utf-8")), directory, overwrite=True)
    # Beside its workers it keeps one more thread spinning; with as many workers as processors it is far slower.
    return str(directory), str(max(1, place.processors - 1)), str(place.max_batch)


def _preset_file() -> Path:
    return Path(str(resources.files("deepinfer_jax").joinpath("presets", f"{PRESET}.json")))


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        peer.name: peer
        for peer in (
            Peer(
                name="torch",
                requirements=("torch==2.13.0", "transformers==5.24.0"),
                driver="run_torch.py",
                numerics=MappingProxyType({"f32": "float32", "bf16": "bfloat16"}),
                arguments=_torch_arguments,
            ),
            Peer(
                name="mlx",
                requirements=("mlx-lm==0.32.2", "mlx[cpu]==0.32.4"),
                driver="run_mlx.py",
                numerics=MappingProxyType({"f32": "float32"}),
                arguments=_mlx_arguments,
            ),
            Peer(
                name="fastllm",
                requirements=("ftllm==1.9.0",),
                driver="run_fastllm.py",
                numerics=MappingProxyType({"fp8+fp4": ""}),
                arguments=_fastllm_arguments,
            ),
        )
    }
)
