"""A program: compile a small configuration for a few CPU devices as `make aot` compiles the released one.

``python -m tests.deepinfer_jax.bench.reduced_compile DEVICES RESULT``; a process of its own, because the number of
devices is fixed when JAX starts.
"""

import dataclasses
import json
import sys
from pathlib import Path

from deepinfer_jax.bench.abstract_step import Workload, compile_step
from deepinfer_jax.bench.targets import GIB, Target
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import F32


def main(devices: int, result: str) -> None:
    # Nothing is allocated, so pools may be larger than this machine's memory.
    target = Target("cpu", "a few CPU devices", "cpu", devices, 64 * GIB)
    figures = compile_step(target, ModelConfig.preset("mini-40"), F32, Workload(rows=2, context=512))
    Path(result).write_text(json.dumps(dataclasses.asdict(figures)))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
