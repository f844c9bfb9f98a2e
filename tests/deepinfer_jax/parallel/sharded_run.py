"""A program: golden prompts through the sharded step on four CPU devices, and through the plain step on one.

``python -m tests.deepinfer_jax.parallel.sharded_run RESULT``; a process of its own, because the number of devices is
fixed when JAX starts. RESULT gets the logits ``DEVICE.WAY`` of every request, and what the devices hold, by name.
"""

# ruff: noqa: E402  # what is imported after the settings must see them

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import install_import_hook

DEVICES = 4
REQUESTS = (("p200", 42), ("ptext", 30), ("p3w_plus1", 49), ("pw_plus1", 17))  # golden prompt and tokens, by device
BLOCK_TOKENS = 8
BLOCKS = 8
PREFILLED = 14

if __name__ == "__main__":
    # Importing it sets strict dtypes and ranks and the compilation cache.
    import tests.conftest  # noqa: F401

    jax.config.update("jax_num_cpu_devices", DEVICES)
    install_import_hook(["deepinfer_jax", "pallas_kernels"], "beartype.beartype")

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import State, initial_state
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import F32
from deepinfer_jax.parallel.layouts import (
    Layout,
    expert_and_data_parallel,
    padded,
    parameter_specs,
    shardings,
    state_specs,
)
from deepinfer_jax.parallel.mesh import layout_mesh
from deepinfer_jax.parallel.step import sharded_step
from deepinfer_jax.runtime.advance import advance
from deepinfer_jax.runtime.batch import Batch, Chunk, StepShape, pack
from deepinfer_jax.runtime.step import row_logits
from tests.checkpoints import golden_model, prompts

SHAPE = StepShape(decode_rows=1, prefill_tiles=1, tile_rows=16)
TABLE = np.asarray([5, 0, 3, 7, 1, 6, 2, 4], np.int32)


def schedule() -> list[dict[int, tuple[int, int]]]:
    """Per step, each device's (start, tokens): a prompt in chunks and then one by one, the devices out of step."""
    steps: list[dict[int, tuple[int, int]]] = []
    for device, (_, length) in enumerate(REQUESTS):
        start, turn = 0, device
        while start < length:
            count = min(PREFILLED if length - start > 4 else 1, length - start)
            steps += [{} for _ in range(turn + 1 - len(steps))]
            steps[turn][device] = (start, count)
            start, turn = start + count, turn + 1
    return steps


def fresh_state(config: ModelConfig, slots: int, blocks: int) -> State:
    layout = PageLayout.of(config, BLOCK_TOKENS)
    return initial_state(config, F32, slots=slots, blocks=blocks, layout=layout, fill=np.nan)


def on_devices(config: ModelConfig, params: Model) -> dict[str, np.ndarray]:
    """The sharded step: slot 0 and blocks of its own on each device, padding of the tables poisoned."""
    layout = expert_and_data_parallel(DEVICES)
    mesh = layout_mesh(layout, jax.devices())
    described = padded(dataclasses.replace(Model.describe(config), vision=None), layout)
    params = dataclasses.replace(params, vision=None, engrams=_padded_tables(params, layout)).stacked(config)
    params = jax.device_put(params, shardings(parameter_specs(described, layout, config, F32), mesh))
    state = fresh_state(config, DEVICES, DEVICES * BLOCKS)
    state = jax.device_put(state, shardings(state_specs(state, layout), mesh))
    step = jax.jit(sharded_step(mesh, layout, described, config, F32), donate_argnums=1)
    experts = params.layers.segments[1][0].feed_forward.gate_up
    parts = [shard.data for shard in experts.addressable_shards]
    found = {
        "experts.held": np.asarray([part.shape[2] for part in parts]),
        "experts.devices": np.asarray([part.device.id for part in parts]),
        "experts.all": np.asarray(experts.shape[2]),
    }
    collected: dict[int, list[np.ndarray]] = {device: [] for device in range(DEVICES)}
    for work in schedule():
        packed = [pack(_chunks(work, device, 0), SHAPE) for device in range(DEVICES)]
        batch = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(part.batch for part in packed))
        state, logits = step(params, state, batch, np.tile(TABLE, (DEVICES, 1)))
        for device, (_, count) in work.items():
            begin = device * SHAPE.rows + packed[device].starts[0]
            collected[device].append(np.asarray(logits)[begin : begin + count])
    found |= {f"{device}.sharded": np.concatenate(rows) for device, rows in collected.items()}
    return found


def on_one_device(config: ModelConfig, params: Model) -> dict[str, np.ndarray]:
    """The plain step: all requests side by side, each in the slot and on the blocks of its device's number."""
    shape = StepShape(DEVICES * SHAPE.decode_rows, DEVICES * SHAPE.prefill_tiles, SHAPE.tile_rows)
    tables = np.stack([device * BLOCKS + TABLE for device in range(DEVICES)])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        advanced = advance(params, state, batch.to_rows(), jnp.asarray(tables), config, F32)
        return advanced.state, row_logits(params, advanced.hidden)

    state = fresh_state(config, DEVICES, DEVICES * BLOCKS)
    collected: dict[int, list[np.ndarray]] = {device: [] for device in range(DEVICES)}
    for work in schedule():
        chunks = [chunk for device in work for chunk in _chunks(work, device, device)]
        batch, starts, _ = pack(chunks, shape)
        state, logits = step(state, batch)
        for (device, (_, count)), begin in zip(work.items(), starts, strict=True):
            collected[device].append(np.asarray(logits)[begin : begin + count])
    return {f"{device}.single": np.concatenate(rows) for device, rows in collected.items()}


def _chunks(work: dict[int, tuple[int, int]], device: int, slot: int) -> list[Chunk]:
    if device not in work:
        return []
    start, count = work[device]
    return [Chunk(slot, start, prompts()[REQUESTS[device][0]][start : start + count])]


def _padded_tables(params: Model, layout: Layout) -> tuple:
    parts = layout.parts("engram_rows")
    return tuple(
        dataclasses.replace(
            memory,
            table=jnp.pad(memory.table, ((0, -memory.table.shape[0] % parts), (0, 0)), constant_values=np.nan),
        )
        for memory in params.engrams
    )


def main(result: str) -> None:
    config, params = golden_model("bf16", "f32")
    np.savez(result, **on_devices(config, params), **on_one_device(config, params))


if __name__ == "__main__":
    main(sys.argv[1])
