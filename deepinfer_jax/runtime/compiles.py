"""Counting compilations by JAX's own events."""

from __future__ import annotations

import threading
from types import TracebackType

import jax.monitoring

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts compilations in this process, of any thread, while it is open.

    A program that comes from the persistent cache counts too: its step still waited.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    @property
    def count(self) -> int:
        """Compilations so far."""
        return self._count

    def close(self) -> None:
        """Stop counting; the count stays."""
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def __enter__(self) -> CompileCounter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hear(self, event: str, duration_secs: float, **details: str | int) -> None:
        del duration_secs, details
        if event == _COMPILE_EVENT:
            with self._lock:
                self._count += 1
