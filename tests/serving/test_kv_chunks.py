"""Sections cut into chunks and put together again: in any order of pulls, over broken streams, and never damaged.

States are of random bits, in the small golden shape: blocks of 8 tokens, groups of ratio 2, 2 and 1.
"""

import time
import zlib

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from deepinfer_jax.cache.snapshot import ImageSpan, SnapshotMeta, pack
from serving.errors import InvalidRequestError
from serving.kv_assembly import PullReader, join
from serving.kv_chunks import ChunkError, ChunkPacker, chunk_bytes_of, read_chunk, word_sum
from serving.kv_sections import StatePlan
from serving.kv_transport import TransferProgress
from serving.proto.deepinfer.v1.kv_transfer_pb2 import (
    KV_PART_META,
    KV_PART_PAGES,
    KV_PART_PENDING,
    KV_PART_SLOTS,
    KvChunk,
    KvPiece,
    KvPosition,
    KvPullRequest,
    KvRange,
)
from tests.serving.held_states import FORM, random_state

LENGTHS = st.integers(1, 60)
SIZES = st.integers(400, 60_000)
BLOCK_TOKENS = FORM.layout.block_tokens


def chunks_of(snapshot, sections, chunk_bytes, resume=None, *, sums=False):
    """The stream of a pull, as a sender writes it."""
    packer = ChunkPacker(chunk_bytes, sums=sums)
    for section in sections:
        offset = resume.offset if resume is not None and resume.section == section.name else 0
        yield from packer.add(section.name, snapshot[section.name], offset)
    yield packer.finish()


def pulled(state, request, chunk_bytes, breaks=()):
    """A reader that has read a pull whose streams break behind so many chunks each."""
    reader = PullReader(state.plan.select(request, FORM), chunk_bytes)
    for count in (*breaks, None):
        resumed = KvPullRequest()
        resumed.CopyFrom(request)
        if reader.position is not None:
            resumed.resume.CopyFrom(reader.position)
        stream = chunks_of(state.snapshot, state.plan.select(resumed, FORM), chunk_bytes, reader.position)
        for place, message in enumerate(stream):
            if place == count or reader.done:
                break
            reader.add(message)
        if reader.done:
            break
    reader.end()
    return reader


@settings(max_examples=60, phases=[Phase.generate])
@given(computed=LENGTHS, chunk_bytes=SIZES, breaks=st.lists(st.integers(0, 4), max_size=5))
def test_a_state_arrives_over_streams_that_break(computed, chunk_bytes, breaks):
    state = random_state(computed)
    reader = pulled(state, KvPullRequest(), chunk_bytes, breaks)
    assert join(state.plan, [reader]) == state.snapshot
    assert reader.received == sum(map(len, state.snapshot.values()))


@settings(max_examples=60, phases=[Phase.generate])
@given(data=st.data(), computed=LENGTHS)
def test_a_state_arrives_by_parallel_pulls_in_any_order(data, computed):
    state = random_state(computed)
    blocks = FORM.layout.blocks_for(computed)
    cuts = sorted(data.draw(st.sets(st.integers(1, blocks), max_size=4)) | {blocks})
    first, requests = 0, [KvPullRequest(parts=[KV_PART_PENDING, KV_PART_META])]
    for stop in cuts:
        for groups in data.draw(st.sampled_from([[[]], [[0, 2], [1]], [[2], [1], [0]]])):
            pages = KvRange(first=first, stop=stop)
            requests.append(KvPullRequest(parts=[KV_PART_PAGES], groups=groups, pages=pages))
        first = stop
    layer = data.draw(st.integers(1, FORM.layers - 1))
    for layers in (KvRange(stop=layer), KvRange(first=layer)):
        requests.append(KvPullRequest(parts=[KV_PART_SLOTS], layers=layers))
    order = data.draw(st.permutations(requests))
    readers = [pulled(state, request, data.draw(SIZES), data.draw(st.lists(st.integers(0, 3)))) for request in order]
    assert join(state.plan, readers) == state.snapshot
    with pytest.raises(ChunkError, match="was not pulled"):
        join(state.plan, readers[1:])


@settings(max_examples=25, phases=[Phase.generate])
@given(computed=st.integers(0, 90), images=st.integers(0, 2))
def test_a_plan_knows_names_order_and_sizes_of_every_state_of_its_length(computed, images):
    """Windows that began at a hit are shorter; replays and images make ``meta`` longer."""
    tokens = tuple(range(computed + 1))
    spans = [ImageSpan(place, place + 1, bytes(32)) for place in range(min(images, computed + 1))]
    state = random_state(computed)
    for floor, replays in ((0, ()), (min(3, computed), tuple(range(BLOCK_TOKENS, computed + 1, BLOCK_TOKENS)))):
        meta = SnapshotMeta(
            FORM.fingerprint, tokens, max(1, computed), computed, floor=floor, replays=replays, images=tuple(spans)
        )
        snapshot = pack(meta, state.blocks, state.slot, FORM)
        plan = StatePlan.of(FORM, computed, len(tokens), len(spans))
        assert {section.name for section in plan.sections} == set(snapshot)
        assert all(section.least <= len(snapshot[section.name]) <= section.most for section in plan.sections)
        parts = [section.part for section in plan.sections]
        assert parts == sorted(parts)
        assert parts.count(KV_PART_META) == 1


def flipped(content, place, bit):
    damaged = bytearray(content)
    damaged[place % len(content)] ^= 1 << bit
    return bytes(damaged)


@settings(max_examples=150, phases=[Phase.generate])
@given(data=st.data(), computed=st.integers(1, 30), chunk_bytes=st.integers(2000, 20_000))
def test_a_damaged_chunk_is_refused_or_harmless_and_changes_nothing(data, computed, chunk_bytes):
    """Any bit of a message: what is not noticed is no damage. The stream goes on from where it was."""
    state = random_state(computed)
    reader = PullReader(state.plan.select(KvPullRequest(), FORM), chunk_bytes)
    for message in chunks_of(state.snapshot, state.plan.sections, chunk_bytes, sums=data.draw(st.booleans())):
        if data.draw(st.booleans()):
            before = reader.position, reader.received, set(reader.sections)
            place, bit = data.draw(st.integers(0, len(message) - 1)), data.draw(st.integers(0, 7))
            try:
                reader.add(flipped(message, place, bit))
            except ChunkError:
                assert (reader.position, reader.received, set(reader.sections)) == before
            else:
                continue
        reader.add(message)
    assert join(state.plan, [reader]) == state.snapshot


@given(data=st.binary(max_size=40), place=st.integers(0, 8))
def test_sums_are_those_of_the_protocol(data, place):
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    assert word_sum(data) == sum(words) % (1 << 64)
    # Wherever it lies in memory.
    assert word_sum(memoryview(bytes(place) + data)[place:]) == word_sum(data)


def test_a_chunk_has_the_checksum_that_was_asked_for():
    state = random_state(21)
    for sums in (False, True):
        for message in chunks_of(state.snapshot, state.plan.sections, 5000, sums=sums):
            chunk = KvChunk.FromString(message)
            assert chunk.HasField("sum") == sums
            assert (chunk.sum, chunk.crc32) == ((word_sum(chunk.data), 0) if sums else (0, zlib.crc32(chunk.data)))


def made(data=b"", pieces=(), *, crc=None, last=False, **more):
    """A chunk as protobuf writes it: fields in the order of their numbers."""
    chunk = KvChunk(data=data, crc32=zlib.crc32(data) if crc is None else crc, last=last, **more)
    for section, offset, length, size in pieces:
        chunk.pieces.append(KvPiece(section=section, offset=offset, length=length, section_bytes=size))
    return chunk.SerializeToString()


def test_senders_may_write_fields_in_any_order():
    state = random_state(21)
    reader = PullReader(state.plan.select(KvPullRequest(), FORM))
    (message,) = chunks_of(state.snapshot, state.plan.sections, 1 << 20)
    chunk = KvChunk.FromString(message)
    assert chunk.SerializeToString() != message
    reader.add(chunk.SerializeToString())
    reader.end()
    assert join(state.plan, [reader]) == state.snapshot


NAME = "page(0, 0)"
SIZE = len(random_state(21).snapshot[NAME])


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (b"\xff" * 40, "is no chunk"),
        (b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "is no chunk"),
        (b"\x12\x05abc", "is no chunk"),
        (made(b"a" * 10, [(NAME, 0, 10, SIZE)], crc=1), "has not its checksum"),
        (made(b"a" * 10, [(NAME, 0, 10, SIZE)], sum=0), "has not its checksum"),
        (made(b"a" * 10, [(NAME, 0, 9, SIZE)]), "are not the 10 bytes"),
        (made(b"a" * 5001, [(NAME, 0, 5001, SIZE)]), "asked for were at most 5000"),
        (
            made() + bytes([0x7A, 0xE8, 0x07]) + bytes(1000) + made()[:0] + bytes([0x7A, 0x7F]) + bytes(127),
            "larger than",
        ),
        (made(b"a" * 10, [(NAME, 1, 10, SIZE)]), "came where byte 0"),
        (made(b"a" * 10, [("page(0, 1)", 0, 10, SIZE)]), "came where byte 0"),
        (made(b"a" * 10, [("page(9, 9)", 0, 10, SIZE)]), "came where byte 0"),
        (made(b"a" * 10, [(NAME, 0, 10, SIZE + 1)]), "cannot have"),
        (made(b"a" * 10, [(NAME, 0, 10, 1 << 62)]), "cannot have"),
        (made(b"a" * 10, [(NAME, 0, 10, 10)]), "cannot have"),
        (made(b"", [(NAME, 0, 0, SIZE)]), "are no piece"),
        (made(b"a" * (SIZE + 1), [(NAME, 0, SIZE + 1, SIZE)]), "are no piece"),
        (made(b"a" * 20, [(NAME, 0, 10, SIZE), (NAME, 9, 10, SIZE)]), "came where byte 10"),
        (made(b"a" * 20, [(NAME, 0, 10, SIZE), (NAME, 11, 10, SIZE)]), "came where byte 10"),
        (made(b"a" * 20, [(NAME, 0, 10, SIZE), (NAME, 10, 10, SIZE - 1)]), "cannot have"),
        (made(last=True), "was whole"),
    ],
)
def test_what_no_sender_of_ours_writes_is_refused(message, match):
    reader = PullReader(random_state(21).plan.select(KvPullRequest(), FORM), 5000)
    with pytest.raises(ChunkError, match=match):
        reader.add(message)
    assert (reader.position, reader.received, reader.sections, reader.done) == (None, 0, {}, False)
    with pytest.raises(ChunkError, match="ended before"):
        reader.end()


def test_nothing_comes_behind_the_end():
    state = random_state(5)
    reader = pulled(state, KvPullRequest(), 1 << 20)
    with pytest.raises(ChunkError, match="behind the last one"):
        reader.add(made(last=True))
    reader = PullReader(state.plan.sections, 1 << 20)
    packer = ChunkPacker(1 << 20)
    for section in state.plan.sections:
        assert not list(packer.add(section.name, state.snapshot[section.name]))
    (whole,) = packer.flush()
    reader.add(whole)
    assert (reader.position.section, reader.position.offset) == ("meta", len(state.snapshot["meta"]))
    with pytest.raises(ChunkError, match="behind all"):
        reader.add(made(b"a", [(NAME, 0, 1, SIZE)]))


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"parts": [5]}, "parts"),
        ({"parts": [0]}, "parts"),
        ({"groups": [3]}, "groups"),
        ({"pages": KvRange(first=2, stop=1)}, "pages"),
        ({"pages": KvRange(first=4)}, "pages"),
        ({"layers": KvRange(first=14)}, "layers"),
        ({"resume": KvPosition(section="page(3, 0)")}, "resume.section"),
        ({"resume": KvPosition(section="")}, "resume.section"),
        ({"parts": [KV_PART_META], "resume": KvPosition(section=NAME)}, "resume.section"),
        ({"resume": KvPosition(section=NAME, offset=SIZE + 1)}, "resume.offset"),
        ({"chunk_bytes": 65_535}, "chunk_bytes"),
        ({"chunk_bytes": 2_097_153}, "chunk_bytes"),
    ],
)
def test_pulls_of_what_no_state_has_are_refused(request_fields, field):
    request = KvPullRequest(**request_fields)
    plan = random_state(21).plan
    with pytest.raises(InvalidRequestError) as caught:
        (chunk_bytes_of(request), plan.select(request, FORM))
    assert caught.value.metadata["field"] == field


def test_selections_are_what_they_say():
    plan = random_state(21).plan

    def names(**fields):
        return [section.name for section in plan.select(KvPullRequest(**fields), FORM)]

    everything = names()
    assert len(everything) == 3 * 3 + 13 + 2 + 1
    assert everything[:4] == ["page(0, 0)", "page(0, 1)", "page(0, 2)", "page(1, 0)"]
    assert everything[-4:] == ["slot(12)", "pending(0)", "pending(1)", "meta"]
    assert names(parts=[KV_PART_PAGES], groups=[2], pages=KvRange(first=1)) == ["page(1, 2)", "page(2, 2)"]
    assert names(parts=[KV_PART_PAGES, KV_PART_PENDING], groups=[1], pages=KvRange(stop=1)) == [
        "page(0, 1)",
        "pending(1)",
    ]
    assert names(parts=[KV_PART_SLOTS], layers=KvRange(first=11, stop=99)) == ["slot(11)", "slot(12)"]
    assert names(parts=[KV_PART_PAGES], pages=KvRange(first=2, stop=2)) == []
    assert names(resume=KvPosition(section="slot(12)", offset=9)) == everything[-4:]


def test_an_empty_pull_is_one_empty_chunk():
    reader = PullReader([], 1 << 20)
    reader.add(ChunkPacker().finish())
    reader.end()
    assert read_chunk(ChunkPacker().finish()) == ([], b"", True, None)
    assert StatePlan.of(FORM, 0, 1).most_bytes > 0


def test_chunks_say_when_the_last_token_was_computed():
    at = time.monotonic() - 5
    moments = iter([None, at])
    packer = ChunkPacker(10, computed_at=lambda: next(moments))
    before, behind = [read_chunk(message).computed for message in packer.add(NAME, bytes(20))]
    assert (before, behind[1]) == (None, at)
    assert behind[0] >= 5


def test_a_transfer_knows_what_came_behind_the_last_token():
    now = 10.0
    progress = TransferProgress(lambda: now)
    progress.add(100)
    now = 12.0
    progress.add(20)
    assert (progress.seconds(), progress.exposed_bytes) == ((2.0, None), 0)
    now = 13.0
    progress.computed(1.5, 99.0)
    progress.computed(1.0, 99.0)  # The word took longer.
    progress.add(3)
    assert (progress.seconds(), progress.exposed_bytes) == ((3.0, 1.5), 23)
    progress.computed(9.0, 99.0)
    assert (progress.seconds(), progress.exposed_bytes) == ((3.0, 3.0), 123)
    progress.restart()
    assert (progress.received, progress.exposed_bytes) == (0, 0)
