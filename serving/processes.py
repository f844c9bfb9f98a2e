"""Server processes on this machine: started one after the other, waited for, and stopped in order.

The first one compiles all steps and leaves them in the compilation cache, where the others of the same configuration
find them; so it is waited for before the others are started.
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

STOPPING_SECONDS = 30.0
_LOOK_SECONDS = 0.2


def interrupt_on_signals() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that it stops the servers first."""

    def interrupt(*details: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


class ProcessError(RuntimeError):
    """A server that has ended, or is not ready in time; says where its log is."""


@dataclasses.dataclass
class Process:
    """A server: its role, where it listens, the process, and its log."""

    role: str
    address: str
    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.role} {self.address}"

    def healthy(self) -> bool:
        """Whether it says that requests are welcome."""
        with grpc.insecure_channel(self.address) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2.0)
            except grpc.RpcError:
                return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def wait_healthy(self, seconds: float) -> None:
        """Wait until it is."""
        end = time.monotonic() + seconds
        while not self.healthy():
            if self.popen.poll() is not None:
                raise ProcessError(f"{self.name} has ended with status {self.popen.returncode}; see {self.log}")
            if time.monotonic() > end:
                raise ProcessError(f"{self.name} is not ready after {seconds:.0f} s; see {self.log}")
            time.sleep(_LOOK_SECONDS)

    def stop(self) -> int:
        """Have it end as SIGTERM does: what runs is finished. Returns its exit status."""
        self.popen.terminate()
        try:
            return self.popen.wait(STOPPING_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            return self.popen.wait()


class Processes:
    """The servers of one cluster. Leaving the context stops all that run, gateways first."""

    def __init__(
        self,
        directory: Path,
        options: Sequence[str],
        note: Callable[[str], None] = lambda line: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
          directory: for the logs.
          options: of ``deepinfer-jax serve``, for all of them.
          note: told what is going on.
          environment: of the processes; None is that of this one.
        """
        self._directory, self._options, self._note = directory, tuple(options), note
        self._environment = None if environment is None else dict(environment)
        self.running: list[Process] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *details: object) -> None:
        for process in reversed(self.running):
            if process.popen.poll() is None:
                status = process.stop()
                self._note(f"{process.name} has ended with status {status}")

    def start(self, role: str, address: str, *options: str) -> Process:
        """Start a server, and do not wait for it."""
        log = self._directory / f"{role}-{len(self.running)}.log"
        command = [sys.executable, "-m", "serving.commands", "serve", "--role", role, "--listen", address]
        with log.open("wb") as file:
            popen = subprocess.Popen(
                [*command, *self._options, *options],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self._environment,
                # Ctrl-C at a terminal reaches this process alone, which ends the others in order.
                start_new_session=True,
            )
        self.running.append(Process(role, address, popen, log))
        return self.running[-1]

    def start_all(self, places: Sequence[tuple[str, ...]], *, seconds: float) -> None:
        """Start servers by role, address and perhaps options of their own, and wait for them."""
        for number, (role, address, *options) in enumerate(places):
            process = self.start(role, address, *options)
            if number == 0:
                self._wait(process, seconds)
        for process in self.running[1:]:
            self._wait(process, seconds)

    def _wait(self, process: Process, seconds: float) -> None:
        begin = time.monotonic()
        process.wait_healthy(seconds)
        self._note(f"{process.name} is ready ({time.monotonic() - begin:.1f} s)")
