"""States of random bits for tests of their transfer: planes as an engine reads them, their plan and their sections."""

import dataclasses
import functools

from deepinfer_jax.cache.snapshot import Rings, SnapshotMeta, pack
from serving.kv_sections import StatePlan
from tests.deepinfer_jax.cache.host_states import random_blocks, random_slot, small_form

RINGS = Rings(window=21, pending=6, history=8)
FORM = small_form("f32q")


@dataclasses.dataclass(frozen=True)
class RandomState:
    """A complete state of ``computed`` tokens."""

    meta: SnapshotMeta
    blocks: object
    slot: object
    plan: StatePlan
    snapshot: dict[str, bytes]


@functools.lru_cache(maxsize=64)
def random_state(computed: int, seed: int = 0, form=FORM) -> RandomState:
    meta = SnapshotMeta(form.fingerprint, tuple(range(computed + 1)), prompt_length=max(1, computed), computed=computed)
    blocks = random_blocks(form, form.layout.blocks_for(computed), seed)
    slot = random_slot(form, RINGS, seed)
    plan = StatePlan.of(form, computed, computed + 1)
    content = pack(meta, blocks, slot, form)
    return RandomState(meta, blocks, slot, plan, {section.name: content[section.name] for section in plan.sections})
