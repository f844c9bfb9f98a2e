"""A program: transfers over a state that lies on four CPU devices, compared with those of the same state on one.

``python -m tests.deepinfer_jax.runtime.sharded_transfer``; a process of its own, because the number of devices is fixed
when JAX starts. Prints ``equal`` when every bit agrees.
"""

# ruff: noqa: E402  # what is imported after the settings must see them

import jax
import numpy as np
from jaxtyping import install_import_hook

DEVICES = 4
SLOTS, BLOCKS, BLOCK_TOKENS = 8, 24, 8

if __name__ == "__main__":
    # Importing it sets strict dtypes and ranks and the compilation cache.
    import tests.conftest  # noqa: F401

    jax.config.update("jax_num_cpu_devices", DEVICES)
    install_import_hook(["deepinfer_jax", "pallas_kernels"], "beartype.beartype")

from deepinfer_jax.cache.state import State
from deepinfer_jax.parallel.layouts import expert_and_data_parallel, placed, shardings, state_specs
from deepinfer_jax.parallel.mesh import layout_mesh
from deepinfer_jax.runtime.transfer import UNUSED, Transfer
from tests.deepinfer_jax.runtime.states import assert_same_bits, fresh_state, random_content

# In the order of devices 3, 0, 2, 0, 1: across all of them, and with unused places between.
NUMBERS = np.asarray([23, UNUSED, 0, 17, 1, BLOCKS, 7, np.iinfo(np.int32).max], np.int32)


def content(state: State) -> dict[str, object]:
    return {name: getattr(state, name) for name in ("main", "index", "window", "pending", "history")}


def main(numerics: str) -> None:
    layout = expert_and_data_parallel(DEVICES)
    mesh = layout_mesh(layout, jax.devices())
    single = random_content(fresh_state(numerics, SLOTS, BLOCKS, BLOCK_TOKENS), seed=1)
    spread = jax.device_put(single, shardings(state_specs(single, layout), mesh))
    kept = jax.tree.map(lambda leaf: leaf.sharding, spread)
    alone, everyone = Transfer(single), Transfer(spread)
    described = jax.eval_shape(lambda: fresh_state(numerics, SLOTS, BLOCKS, BLOCK_TOKENS))
    abstract = Transfer(placed(described, state_specs(described, layout), mesh))
    used = np.flatnonzero((NUMBERS >= 0) & (NUMBERS < BLOCKS))
    want, got = alone.read_blocks(single, NUMBERS), everyone.read_blocks(spread, NUMBERS)
    assert_same_bits(*(jax.tree.map(lambda leaf: np.asarray(leaf)[used], planes) for planes in (want, got)))
    for slot in (0, 3, 7):
        assert_same_bits(alone.read_slot(single, slot), everyone.read_slot(spread, slot))
    moved = np.roll(NUMBERS, 3) ^ np.where(np.roll(NUMBERS, 3) >= 0, 2, 0).astype(np.int32)
    planes, slot_planes = got, everyone.read_slot(spread, 1)
    single = alone.write_blocks(single, moved, jax.tree.map(np.asarray, planes))
    spread = everyone.write_blocks(spread, moved, planes)
    single = alone.write_slot(single, 6, jax.tree.map(np.asarray, slot_planes))
    spread = abstract.write_slot(spread, 6, slot_planes)
    assert_same_bits(content(single), content(spread))
    assert jax.tree.map(lambda leaf: leaf.sharding, spread) == kept
    spread = everyone.poison_slot(everyone.poison_blocks(spread, moved), 5)
    single = alone.poison_slot(alone.poison_blocks(single, moved), 5)
    assert_same_bits(content(single), content(spread))
    local = tuple(size // DEVICES if axis == 0 else size for axis, size in enumerate(single.history.shape))
    assert [shard.data.shape for shard in spread.history.addressable_shards] == [local] * DEVICES
    for text in everyone.compiled_text().values():
        assert "all-gather" not in text


if __name__ == "__main__":
    for preset in ("f32", "bf16", "released"):
        main(preset)
    print("equal")
