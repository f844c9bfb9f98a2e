"""``python -m serving.commands.transfer_trial``: a trial of JAX's transfer engine between two processes.

The first process offers random bytes of several sizes, and starts the second one, which pulls and compares them. What
was withdrawn must fail there, since that is how a sender gets its memory back. Status 0 says that all went well.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

HOST = "127.0.0.1"
SEED = 20
SIZES = (1, 100_003, 8 << 20)
KEPT_SECONDS = 600.0
PULL_SECONDS = 20.0


class TrialError(Exception):
    """What went wrong."""


def content_of(size: int) -> bytes:
    """What is offered of a size."""
    return np.random.default_rng((SEED, size)).bytes(size)


def send() -> int:
    """Offer, and have another process pull. Returns its exit status."""
    from serving.transfer_engine import TransferEngine

    engine = TransferEngine(HOST)
    numbers = [engine.offer(engine.put(content_of(size)), KEPT_SECONDS) for size in SIZES]
    gone = engine.offer(engine.put(content_of(SIZES[-1])), KEPT_SECONDS)
    engine.withdraw(gone)
    offers = [engine.address, str(gone), *map(str, numbers)]
    return subprocess.run([sys.executable, "-m", "serving.commands.transfer_trial", *offers], check=False).returncode


async def receive(address: str, gone: int, numbers: Sequence[int]) -> None:
    """Pull and compare.

    Raises:
      TrialError: something else came, or nothing.
      TransferEngineError: a pull failed.
    """
    from serving.transfer_engine import TransferEngine, TransferEngineError

    engine = TransferEngine(HOST)
    for number, size in zip(numbers, SIZES, strict=True):
        try:
            content = await asyncio.wait_for(engine.pull(address, number, size), PULL_SECONDS)
        except TimeoutError as error:
            raise TrialError(f"{size} bytes were not pulled in {PULL_SECONDS:g} s") from error
        if engine.read(content) != content_of(size):
            raise TrialError(f"{size} bytes arrived changed")
    try:
        content = await asyncio.wait_for(engine.pull(address, gone, SIZES[-1]), PULL_SECONDS)
    except TransferEngineError:
        return
    except TimeoutError as error:
        raise TrialError("a pull of what was withdrawn does not end") from error
    if engine.read(content) == content_of(SIZES[-1]):
        raise TrialError("what was withdrawn can be pulled")


def main(arguments: Sequence[str]) -> int:
    """One of the two processes: the second one is told address and numbers. Returns the exit status."""
    # Two processes, and soon a third one, may share the memory of one device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from serving.transfer_engine import TransferEngineError

    try:
        if not arguments:
            return send()
        address, gone, *numbers = arguments
        asyncio.run(receive(address, int(gone), list(map(int, numbers))))
    except (TransferEngineError, TrialError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
