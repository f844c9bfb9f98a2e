"""How many blocks an engine's page pools get: a number, a share of what the device has free, or so many bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import initial_state
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.settings import EngineSettings

_MEMORY_INFORMATION = Path("/proc/meminfo")


@runtime_checkable
class MemoryDevice(Protocol):
    """What is asked of a ``jax.Device``."""

    @property
    def platform(self) -> str:
        """``cpu``, or an accelerator."""

    def memory_stats(self) -> Any:
        """Bytes by name; None or less where the device does not say."""


def page_blocks(settings: EngineSettings, block_bytes: int, free: Callable[[], int]) -> int:
    """Blocks of each shard's pools.

    ``settings.blocks`` decides where it is given, then ``memory_fraction``, then ``memory``.

    Args:
      settings: of the engine.
      block_bytes: size of a block; 0 for a model without pages.
      free: asked for the bytes that each shard's device has free, where they matter.

    Raises:
      ConfigError: what decides does not hold a single block.
    """
    if settings.blocks is not None:
        return settings.blocks
    if settings.memory_fraction is None:
        return _fitting("memory", settings.memory, settings.memory, block_bytes)
    bytes_free = free()
    share = f"{settings.memory_fraction:g} of {bytes_free} free bytes"
    return _fitting("memory_fraction", share, int(settings.memory_fraction * bytes_free), block_bytes)


def _fitting(name: str, value: object, available: int, block_bytes: int) -> int:
    if available < block_bytes:
        raise ConfigError(name, value, f"bytes for at least one block, {block_bytes}")
    return available // block_bytes if block_bytes else 1


def block_bytes(config: ModelConfig, numerics: Numerics, layout: PageLayout) -> int:
    """Bytes of a block in both pools."""
    one = jax.eval_shape(lambda: initial_state(config, numerics, slots=1, blocks=1, layout=layout))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((one.main, one.index)))


def free_bytes(devices: Sequence[MemoryDevice], information: Path = _MEMORY_INFORMATION) -> int:
    """Bytes that are free on the fullest of some devices, which are used alike.

    Devices that report nothing and are CPUs share what the system has available.

    Args:
      devices: one shard each; what shall count as used must be there already.
      information: the system's account of its memory, in the format of Linux.

    Raises:
      ConfigError: a device does not say, and nor does the system.
    """
    shared = [device for device in devices if device.platform == "cpu"]
    return min(_free_bytes(device, len(shared), information) for device in devices)


def _free_bytes(device: MemoryDevice, sharing: int, information: Path) -> int:
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats and "bytes_in_use" in stats:
        return int(stats["bytes_limit"] - stats["bytes_in_use"])
    available = available_bytes(information) if device.platform == "cpu" else None
    if available is None:
        accepted = "a fraction of memory that the device reports"
        raise ConfigError("memory_fraction", f"on {device}, which reports none", accepted, "give blocks or memory")
    return available // sharing


def available_bytes(information: Path) -> int | None:
    """What a system with such a file can give to programs without swapping; None where it does not say."""
    try:
        lines = information.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, amount = line.partition(":")
        if name == "MemAvailable" and amount.split()[1:] == ["kB"]:
            return int(amount.split()[0]) * 1024
    return None
