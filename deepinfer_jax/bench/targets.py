"""Devices that a machine without them can compile for, and the wheels that this takes.

A target is a set of devices as the compiler sees it: nothing is allocated on them and nothing runs there.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from deepinfer_jax.errors import InputError

GIB = 1 << 30
REMEDY = "run `make aot`, or install deepinfer-jax[aot] on Python 3.12 or newer"


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for.

    ``platform``: JAX's name of the lowering platform. ``topology``: the platform's name for the arrangement of the
    devices. ``memory``: bytes of one device. ``wheel``: the package with the compiler, None where jaxlib has it.
    ``configuration``: of a GPU, in the compiler's text form.
    """

    name: str
    title: str
    platform: str
    devices: int
    memory: int
    topology: str = ""
    wheel: str | None = None
    configuration: str | None = None

    def check_wheel(self) -> None:
        """Find out whether this installation can compile for the target.

        Raises:
          InputError: the wheel is missing, or is not of the version that JAX needs.
        """
        if self.wheel is None:
            return
        try:
            version = importlib.metadata.version(self.wheel)
        except importlib.metadata.PackageNotFoundError:
            raise InputError("target", self.name, f"a target with its compiler, here {self.wheel}", REMEDY) from None
        if self.platform == "cuda" and version != jax.__version__:
            accepted = f"{self.wheel} {jax.__version__} to JAX {jax.__version__}, not {version}"
            raise InputError("target", self.name, accepted, REMEDY)

    def find_devices(self) -> Sequence[jax.Device]:
        """The devices as the compiler knows them. A process calls it once, before it uses JAX otherwise."""
        jax.config.update("jax_platforms", "cpu")
        if self.platform == "cpu":
            jax.config.update("jax_num_cpu_devices", self.devices)
            return jax.devices("cpu")
        described = topologies.get_topology_desc(
            platform=self.platform,
            **{"topology_name" if self.platform == "tpu" else "topology": self.topology},
            **({} if self.configuration is None else {"target_config": self.configuration}),
        )
        return described.devices


def _hopper(memory: int) -> str:
    """An H100 (SXM5) as XLA describes GPUs, from NVIDIA's data sheet and the tables of the CUDA programming guide."""
    facts = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "fpus_per_core": 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_block_optin": 227 << 10,
        "shared_memory_per_core": 228 << 10,
        "core_count": 132,
        "clock_rate_ghz": 1.98,
        "l2_cache_size": 50 << 20,
        "memory_bandwidth": 3_352_000_000_000,
        "device_memory_size": memory,
    }
    device = " ".join(f"{name}: {value}" for name, value in facts.items())
    return (
        f"gpu_device_info {{ {device} cuda_compute_capability {{ major: 9 minor: 0 }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 } '
        'runtime_version { major: 12 minor: 8 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3"'
    )


TARGETS = (
    Target("v5p", "TPU v5p, 4 x 4 x 4", "tpu", 64, 95 * GIB, "v5p:4x4x4", "libtpu"),
    Target("h100", "NVIDIA H100, 64", "cuda", 64, 80 * GIB, "8x8x1", "jax-cuda12-plugin", _hopper(80 * GIB)),
    Target("cpu", "CPU devices, 64", "cpu", 64, 80 * GIB),
)


def target_named(name: str) -> Target:
    """The target of a name.

    Raises:
      InputError: no target of that name.
    """
    for target in TARGETS:
        if target.name == name:
            return target
    raise InputError("target", name, f"one of {', '.join(target.name for target in TARGETS)}")
