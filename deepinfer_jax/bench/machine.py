"""What the machine can do at most, measured: the scale on which the speed of a model is read.

Run as a module, it says the rates in one line of the line protocol.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.bench.drivers.line_protocol import claim_output, say

GEMM_ROWS = 512
GEMM_WIDTH = 4096
# About the float32 weights of a 50 M model, so that a cache which holds the model holds this too.
READ_BYTES = 256 << 20
REPEATS = 7


@dataclasses.dataclass(frozen=True)
class MachineRates:
    """Best rates seen.

    ``gemm_*``: floating-point operations per second of a matrix product of 512 rows with a 4096 x 4096 matrix, a
    multiplication and an addition counting as two. ``read``: bytes per second of a reduction.
    """

    gemm_float32: float
    gemm_bfloat16: float
    read: float

    def gemm(self, dtype: Any) -> float:
        """The rate of matrix products in a dtype, float32 or bfloat16."""
        return self.gemm_bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else self.gemm_float32


def measure_machine(rows: int = GEMM_ROWS, width: int = GEMM_WIDTH, read_bytes: int = READ_BYTES) -> MachineRates:
    """Measure on the processors that this process may use."""
    return MachineRates(
        gemm_float32=_gemm_rate(rows, width, jnp.float32),
        gemm_bfloat16=_gemm_rate(rows, width, jnp.bfloat16),
        read=_read_rate(read_bytes),
    )


def _gemm_rate(rows: int, width: int, dtype: Any) -> float:
    """Both orders of the weight's axes are tried: libraries differ in which one they like."""
    left, right = jnp.ones((rows, width), dtype), jnp.ones((width, width), dtype)
    product = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    products = [jax.jit(functools.partial(product, equation)) for equation in ("ri,io->ro", "ri,oi->ro")]
    seconds = min(_seconds(functools.partial(compiled, left, right)) for compiled in products)
    return 2.0 * rows * width * width / seconds


def _read_rate(size: int) -> float:
    """By numpy in as many threads as there are processors, and by XLA."""
    values = np.ones(size // 4, np.float32)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = np.array_split(values, threads)
    with ThreadPoolExecutor(threads) as pool:
        by_numpy = _seconds(lambda: list(pool.map(np.max, parts)))
    array = jnp.asarray(values)
    reduce = jax.jit(jnp.max)
    return size / min(by_numpy, _seconds(lambda: reduce(array)))


def _seconds(run: Callable[[], Any]) -> float:
    """Shortest of several runs, after one that warms up."""
    times = []
    for _ in range(1 + REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def main() -> None:
    """Say the rates."""
    answers = claim_output()
    say(answers, dataclasses.asdict(measure_machine()))


if __name__ == "__main__":
    main()
