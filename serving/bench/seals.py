"""How fast one thread seals sections and checks their seals."""

from __future__ import annotations

import os
import time

from deepinfer_jax.cache.sections import open_section, seal

_SECTION_BYTES = 1 << 15
_FINGERPRINT = bytes(32)


def seal_seconds(size: int) -> tuple[float, float]:
    """Seconds of sealing so many bytes, which are there in sections of 32 KiB, and of checking the seals."""
    payloads = [os.urandom(_SECTION_BYTES) for _ in range(max(1, size // _SECTION_BYTES))]
    begin = time.perf_counter()
    sections = [seal(str(number), _FINGERPRINT, payload) for number, payload in enumerate(payloads)]
    sealed = time.perf_counter()
    for number, section in enumerate(sections):
        open_section(str(number), _FINGERPRINT, section)
    return sealed - begin, time.perf_counter() - sealed
