"""Accelerators that a machine without them can compile for, and the wheels that this takes.

A target is a set of 64 devices as the compiler sees it. Nothing is allocated on them and nothing runs there.
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

    ``platform``: JAX's lowering platform. ``topology``: its name for the devices. ``memory``: bytes of one device.
    ``wheel``: the package that holds the compiler, or None where jaxlib does.
    """

    name: str
    title: str
    platform: str
    topology: str
    devices: int
    memory: int
    wheel: str | None = None
    configuration: str | None = None

    def check_wheel(self) -> None:
        """Find out whether this installation can compile for the target.

        Raises:
          InputError: the wheel is missing, or its version does not fit JAX's.
        """
        if self.wheel is None:
            return
        try:
            version = importlib.metadata.version(self.wheel)
        except importlib.metadata.PackageNotFoundError:
            raise InputError(
                "target", self.name, f"a target whose compiler is installed, here {self.wheel}", REMEDY
            ) from None
        if self.platform == "cuda" and version != jax.__version__:
            raise InputError(
                "target", self.name, f"{self.wheel} of JAX's version {jax.__version__}, not {version}", REMEDY
            )

    def find_devices(self) -> Sequence[jax.Device]:
        """The devices, described to the compiler. Call it before JAX has made its own."""
        if self.platform == "cpu":
            jax.config.update("jax_num_cpu_devices", self.devices)
            return jax.devices("cpu")
        options = {"target_config": self.configuration} if self.configuration else {}
        # Keyword options are the platform's own.
        if self.platform == "tpu":
            return topologies.get_topology_desc(self.topology, "tpu").devices
        return topologies.get_topology_desc(platform=self.platform, topology=self.topology, **options).devices


def _hopper(memory: int) -> str:
    """What the CUDA compiler wants to know of an H100 (SXM5), from its public data sheet and the CUDA guide."""
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
    Target("v5p", "TPU v5p, 4 x 4 x 4", "tpu", "v5p:4x4x4", 64, 95 * GIB, "libtpu"),
    Target("h100", "NVIDIA H100, 8 hosts of 8", "cuda", "8x8x1", 64, 80 * GIB, "jax-cuda12-plugin", _hopper(80 * GIB)),
    Target("cpu", "CPU devices in one process", "cpu", "", 64, 80 * GIB),
)


def target_named(name: str) -> Target:
    """The target of a name; raises InputError for an unknown one."""
    for target in TARGETS:
        if target.name == name:
            return target
    raise InputError("target", name, f"one of {', '.join(target.name for target in TARGETS)}")
