"""Which sections a request's state will have, in the order in which they travel, and how large each can be.

All of it follows from how many tokens are computed, so that both ends know it before the first one is: a sender sets
memory aside for a state, and a receiver refuses what cannot be part of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from deepinfer_jax.cache.records import StateFormat
from deepinfer_jax.cache.sections import HEADER_BYTES
from deepinfer_jax.cache.snapshot import META, page_name, pending_name, slot_name
from serving.errors import bad_field
from serving.proto.deepinfer.v1.kv_transfer_pb2 import (
    KV_PART_META,
    KV_PART_PAGES,
    KV_PART_PENDING,
    KV_PART_SLOTS,
    KvPart,
    KvPosition,
    KvPullRequest,
    KvRange,
)

PARTS = (KV_PART_PAGES, KV_PART_SLOTS, KV_PART_PENDING, KV_PART_META)

# Beside its token ids, ``meta`` holds some numbers, a replay for some of the blocks, and the images' spans.
_META_ROOM, _REPLAY_ROOM, _IMAGE_ROOM = 1024, 16, 256


class PlannedSection(NamedTuple):
    """A section that a state will have.

    ``part``: a ``KvPart``; ``place``: block of a page, layer of a slot section; ``group``: of a page or pending entry;
    ``least``, ``most``: bytes, equal where they are known.
    """

    name: str
    part: KvPart
    place: int
    group: int
    least: int
    most: int


@dataclasses.dataclass(frozen=True)
class StatePlan:
    """The sections of a state of ``computed`` tokens, in order."""

    computed: int
    sections: tuple[PlannedSection, ...]

    @classmethod
    def of(cls, form: StateFormat, computed: int, tokens: int, images: int = 0) -> StatePlan:
        """The plan of a state.

        Args:
          form: how it is cut into records.
          computed: tokens whose state it is.
          tokens: most token ids in its ``meta``.
          images: of the request.
        """
        blocks, groups = form.layout.blocks_for(computed), len(form.layout.ratios)
        meta = HEADER_BYTES + 4 * tokens + _META_ROOM + _REPLAY_ROOM * blocks + _IMAGE_ROOM * images
        window = HEADER_BYTES + min(computed, form.sliding_window) * form.window.size
        pending, record = HEADER_BYTES + form.pending.size, form.page_record
        open_groups = [group for group, ratio in enumerate(form.layout.ratios) if computed % ratio]
        return cls(
            computed,
            (
                *(_page(form, record, computed, block, group) for block in range(blocks) for group in range(groups)),
                *(
                    PlannedSection(slot_name(layer), KV_PART_SLOTS, layer, 0, HEADER_BYTES, window)
                    for layer in range(form.layers)
                ),
                *(
                    PlannedSection(pending_name(group), KV_PART_PENDING, 0, group, pending, pending)
                    for group in open_groups
                ),
                PlannedSection(META, KV_PART_META, 0, 0, HEADER_BYTES, meta),
            ),
        )

    @property
    def most_bytes(self) -> int:
        """Most bytes of all sections together."""
        return sum(section.most for section in self.sections)

    def select(self, request: KvPullRequest, form: StateFormat) -> list[PlannedSection]:
        """The sections that a pull asks for, the one it goes on with first.

        Raises:
          InvalidRequestError: a part, group, range or position that no state of this plan has.
        """
        unknown = [part for part in request.parts if part not in PARTS]
        if unknown:
            raise bad_field("parts", unknown[0], "1 (pages), 2 (slots), 3 (pending), 4 (meta)")
        parts = frozenset(request.parts or PARTS)
        groups = _chosen("groups", request.groups, len(form.layout.ratios))
        blocks = _range("pages", request.pages, form.layout.blocks_for(self.computed))
        layers = _range("layers", request.layers, form.layers)
        places = {KV_PART_PAGES: blocks, KV_PART_SLOTS: layers}
        chosen = [
            section
            for section in self.sections
            if section.part in parts
            and (section.part not in (KV_PART_PAGES, KV_PART_PENDING) or section.group in groups)
            and section.place in places.get(section.part, range(1))
        ]
        if request.HasField("resume"):
            chosen = chosen[_resumed(request.resume, chosen) :]
        return chosen


def _page(form: StateFormat, record: int, computed: int, block: int, group: int) -> PlannedSection:
    ratio, size = form.layout.ratios[group], form.layout.block_tokens
    # A block begins on a multiple of the ratio.
    entries = min(size, computed - block * size) // ratio
    content = HEADER_BYTES + entries * record
    return PlannedSection(page_name(block, group), KV_PART_PAGES, block, group, content, content)


def _chosen(field: str, chosen: Iterable[int], count: int) -> frozenset[int]:
    """The chosen ones of ``count``; all if none is named."""
    numbers = frozenset(chosen)
    for number in numbers:
        if number >= count:
            raise bad_field(field, number, f"0 to {count - 1}")
    return numbers or frozenset(range(count))


def _range(field: str, message: KvRange, count: int) -> range:
    """A range of ``count`` places; one that reaches beyond ends there."""
    stop = message.stop or count
    if message.first > stop:
        raise bad_field(field, (message.first, message.stop), "a range that does not end before it begins")
    return range(message.first, min(stop, count))


def _resumed(position: KvPosition, sections: Sequence[PlannedSection]) -> int:
    for place, section in enumerate(sections):
        if section.name == position.section:
            if position.offset > section.most:
                raise bad_field("resume.offset", position.offset, f"at most the {section.most} bytes of {section.name}")
            return place
    raise bad_field("resume.section", position.section, "one of the sections that are asked for")
