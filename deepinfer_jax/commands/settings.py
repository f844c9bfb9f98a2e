"""Environment settings with which a command's process runs faster. What the user has set, even to nothing, stays.

*Allocator.* XLA allocates every large intermediate array anew. The GNU C library hands memory of that size back to the
system at once, so that each page is faulted in and cleared again; with these settings it keeps the memory, in huge
pages where there are any. They are read when a process starts, so a command starts itself once more.

*Compilation cache.* Compiled steps are kept between runs. An empty ``JAX_COMPILATION_CACHE_DIR`` turns that off.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

ALLOCATOR = "GLIBC_TUNABLES"
TUNABLES = (
    "glibc.malloc.hugetlb=1",
    "glibc.malloc.mmap_threshold=4294967296",
    "glibc.malloc.trim_threshold=8589934592",
)
CACHE = "JAX_COMPILATION_CACHE_DIR"
CACHED_FROM = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
CACHED_FROM_SECONDS = 0.5

OWN = "DEEPINFER_JAX_SETTINGS"
"""Names of the variables that a command set itself; that it is there says that the process was started again."""


def process_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What to set for a process that starts with ``environment``."""
    settings = {}
    if ALLOCATOR not in environment and sys.platform == "linux":
        settings[ALLOCATOR] = ":".join(TUNABLES)
    if CACHE not in environment:
        home = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME", ""), ".cache")
        if Path(home).is_absolute():
            settings[CACHE] = os.path.join(home, "deepinfer-jax", "compiled")
            if CACHED_FROM not in environment:
                settings[CACHED_FROM] = str(CACHED_FROM_SECONDS)
    return settings


def outer_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment as the user gave it, without what a command set itself."""
    own = {OWN, *environment.get(OWN, "").split()}
    return {name: value for name, value in environment.items() if name not in own}


def start_with_settings() -> None:
    """Start this process again with :func:`process_settings`; does nothing where it was, or where all are set."""
    settings = process_settings(os.environ)
    if OWN in os.environ or not settings:
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | settings | {OWN: " ".join(settings)})
