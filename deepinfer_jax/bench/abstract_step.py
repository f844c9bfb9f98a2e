"""Compile a decode step over a mesh from shapes alone, and read what the compiler says of its memory.

As a program (``python -m deepinfer_jax.bench.abstract_step TARGET NUMERICS RESULT``) it is one compile of the released
size in a process of its own, for :mod:`deepinfer_jax.bench.aot`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from deepinfer_jax.bench.targets import Target, target_named
from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import State, initial_state
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.params import abstract
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.parallel.layouts import (
    Layout,
    expert_and_data_parallel,
    padded,
    parameter_specs,
    placed,
    state_specs,
)
from deepinfer_jax.parallel.mesh import layout_mesh
from deepinfer_jax.parallel.step import sharded_step
from deepinfer_jax.runtime.batch import Batch


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a step decodes: one token for each of ``rows`` requests a device.

    ``context``: tokens that a request's block table covers. ``cache_share``: share of a device's memory that the page
    pools fill.
    """

    rows: int = 8
    context: int = 512 * 1024
    cache_share: float = 0.2


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one compile showed. Sizes are bytes of one device, ``peak_memory`` is of the compiling process.

    ``arguments``, ``aliased``, ``temporaries``, ``outputs`` and ``code`` are the compiler's own figures; ``state`` and
    ``smallest_pool`` follow from shapes. ``pool_copies`` counts instructions that copy an array of a pool's shape.
    ``collectives`` counts instructions; one inside a loop counts once.
    """

    target: str
    numerics: str
    devices: int
    requests: int
    context: int
    parameters: int
    state: int
    smallest_pool: int
    arguments: int
    aliased: int
    temporaries: int
    outputs: int
    code: int
    memory: int
    pool_copies: int
    collectives: dict[str, int]
    lower_seconds: float
    compile_seconds: float
    processor_seconds: float
    peak_memory: int

    @property
    def needed(self) -> int:
        """Bytes of a device in use while the step runs."""
        return self.arguments + self.temporaries + self.outputs - self.aliased + self.code


def abstract_arguments(
    described: Model,
    layout: Layout,
    mesh: Mesh,
    config: ModelConfig,
    numerics: Numerics,
    workload: Workload,
    memory: int,
) -> tuple[Model, State, Batch, jax.ShapeDtypeStruct]:
    """Shapes and shardings of a step's arguments: stacked parameters, state, decode rows, block tables.

    The page pools take ``workload.cache_share`` of ``memory``, the bytes of one device.
    """
    pages, devices = PageLayout.of(config), mesh.size
    params = jax.eval_shape(lambda tree: tree.stacked(config), abstract(described, numerics))

    def state_of(blocks: int) -> State:
        requests = devices * workload.rows
        return jax.eval_shape(
            lambda: initial_state(config, numerics, slots=requests, blocks=devices * blocks, layout=pages)
        )

    block = state_of(1)
    blocks = math.ceil(workload.cache_share * memory / ((nbytes(block.main) + nbytes(block.index)) // devices))
    state = state_of(blocks)
    integers, image = (jax.ShapeDtypeStruct((devices * workload.rows,), dtype) for dtype in (jnp.int32, jnp.bool_))
    rows = Batch(
        tokens=integers,
        slots=integers,
        positions=integers,
        floors=integers,
        image=image,
        image_embeddings=None,
        tiles=((workload.rows, 1),),
    )
    tables = jax.ShapeDtypeStruct((devices * workload.rows, pages.blocks_for(workload.context)), jnp.int32)
    along_rows = layout.spec(("rows",))
    along = jax.tree.map(lambda _: along_rows, (rows, tables))
    rows, tables = placed((rows, tables), along, mesh)
    return (
        placed(params, parameter_specs(described, layout, config, numerics), mesh),
        placed(state, state_specs(state, layout), mesh),
        rows,
        tables,
    )


def compile_step(target: Target, config: ModelConfig, numerics: Numerics, workload: Workload) -> Figures:
    """Compile the decode step of a configuration for a target; once a process, see :meth:`Target.find_devices`."""
    layout = expert_and_data_parallel(target.devices)
    mesh = layout_mesh(layout, target.find_devices())
    # Images are embedded by another process than the one that decodes.
    described = padded(dataclasses.replace(Model.describe(config), vision=None), layout)
    arguments = abstract_arguments(described, layout, mesh, config, numerics, workload, target.memory)
    params, state, _, tables = arguments
    step = sharded_step(mesh, layout, described, config, numerics)
    begin = time.perf_counter()
    # Draft stages are resident though the forward pass leaves most of them unread. GPU kernels ask the mesh for the
    # chip.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(step, donate_argnums=1, keep_unused=True).trace(*arguments)
        lowered = traced.lower(lowering_platforms=(target.platform,))
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Figures(
        target=target.name,
        numerics=numerics.name,
        devices=target.devices,
        requests=tables.shape[0],
        context=workload.context,
        parameters=nbytes_on_device(params),
        state=nbytes_on_device(state),
        smallest_pool=min(nbytes_on_device(state.main), nbytes_on_device(state.index)),
        arguments=memory.argument_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        memory=target.memory,
        pool_copies=sum(
            count_copies(text, plane.sharding.shard_shape(plane.shape))
            for plane in jax.tree.leaves((state.main, state.index))
        ),
        collectives=count_collectives(text),
        lower_seconds=middle - begin,
        compile_seconds=end - middle,
        processor_seconds=used.ru_utime + used.ru_stime,
        peak_memory=used.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    )


def nbytes(tree: Any) -> int:
    """Bytes of a tree of abstract arrays on all devices."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def nbytes_on_device(tree: Any) -> int:
    """Bytes of a tree of abstract, placed arrays on one device, without the padding of a device's own layout."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def count_copies(text: str, shape: tuple[int, ...]) -> int:
    """Instructions of a compiled module that copy an array of this shape."""
    printed = f"[{','.join(map(str, shape))}]"
    return sum(printed in line for line in text.splitlines() if re.search(r" copy(?:-start)?\(", line))


def count_collectives(text: str) -> dict[str, int]:
    """Collective instructions of a compiled module by name."""
    names = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in names}
    return {name: count for name, count in counts.items() if count}


def main(target: str, numerics: str, result: str) -> None:
    """Compile the released size and write the figures as JSON."""
    figures = compile_step(
        target_named(target), ModelConfig.preset("v4.1-flash"), Numerics.preset(numerics), Workload()
    )
    Path(result).write_text(json.dumps(dataclasses.asdict(figures)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
