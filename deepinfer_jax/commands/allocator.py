"""Settings of the C library's allocator with which XLA runs faster on a CPU.

XLA allocates every large intermediate array anew. The GNU C library hands memory of that size back to the system at
once, so that each page is faulted in and cleared again; with these settings it keeps the memory, in huge pages where
there are any. They are read when a process starts, so a command gives them to the processes that it starts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
TUNABLES = (
    "glibc.malloc.hugetlb=1",
    "glibc.malloc.mmap_threshold=4294967296",
    "glibc.malloc.trim_threshold=8589934592",
)


def allocator_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What to set for a process that starts with ``environment``: nothing where the user did, and only on Linux."""
    if VARIABLE in environment or sys.platform != "linux":
        return {}
    return {VARIABLE: ":".join(TUNABLES)}
