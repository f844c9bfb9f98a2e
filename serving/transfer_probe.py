"""Whether JAX's transfer engine works here: two processes try it, so that a crash or a hang is theirs alone."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from serving.configuration import KvSection

_log = logging.getLogger("serving.kv")

COMMAND = (sys.executable, "-m", "serving.commands.transfer_trial")
SECONDS = 60.0
_ROLES = ("prefill", "decode")
_LONGEST_REASON = 300


def available(section: KvSection, role: str, command: Sequence[str] = COMMAND) -> KvSection:
    """The section with those transports alone that work in this process; the log says why one does not.

    Call it before the process has its device.

    Args:
      section: how state is handed over.
      role: of the process, some of which hand nothing over.
      command: see :func:`probe`.
    """
    if "jax" not in section.transports or role not in _ROLES:
        return section
    reason = probe(command)
    if not reason:
        _log.info("transport jax is available")
        return section
    _log.warning("transport jax is not available: %s", reason)
    return dataclasses.replace(section, transports=tuple(name for name in section.transports if name != "jax"))


def probe(command: Sequence[str] = COMMAND, seconds: float = SECONDS) -> str:
    """Why the transfer engine cannot be used, in one sentence; empty if it can.

    Args:
      command: of the trial: it ends with status 0 if all went well, or says what did not on standard error.
      seconds: that it may take; afterwards it is killed, with the processes that it has started.
    """
    try:
        trial = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return f"its trial cannot be started: {error}"
    with trial:
        try:
            _, errors = trial.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"its trial was not done after {seconds:g} s"
        finally:
            # Also what the trial has left behind, and holds the pipe open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(trial.pid, signal.SIGKILL)
    if trial.returncode == 0:
        return ""
    ending = f"status {trial.returncode}"
    if trial.returncode < 0:
        ending = f"signal {signal.Signals(-trial.returncode).name}"
    # Behind the reason of a crash comes where it was.
    lines = [line for line in map(str.strip, errors.splitlines()) if line and not line.startswith(("@", "***"))]
    return f"its trial ended with {ending}: {lines[-1][:_LONGEST_REASON] if lines else 'it said nothing'}"
