"""Snapshots: every bit of a request's state arrives on another engine, and nothing that is damaged or foreign does.

Planes are random bits, in the small golden shape (window 16, groups of ratio 2, 2 and 1, blocks of 8 tokens, two draft
stages) and in released shape. Rows that hold nothing are NaN on the receiving side.
"""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer_jax.cache.records import FORMATS, PackedRows, take_rows
from deepinfer_jax.cache.sections import HEADER_BYTES, open_section, seal
from deepinfer_jax.cache.snapshot import (
    IMAGE_ID,
    ImageSpan,
    Rings,
    SnapshotMeta,
    open_meta,
    pack,
    pack_blocks,
    pack_slot,
    page_name,
    pending_name,
    section_names,
    slot_name,
    snapshot_bytes,
    unpack,
    unpack_blocks,
    unpack_slot,
)
from deepinfer_jax.errors import SnapshotError
from deepinfer_jax.model.engram import IMAGE_TOKEN
from pallas_kernels.row_formats import ROW_FORMATS
from tests.deepinfer_jax.cache.host_states import (
    BLOCK_TOKENS,
    NUMERICS,
    assert_same_rows,
    bits,
    random_blocks,
    random_slot,
    released_form,
    small_config,
    small_form,
)

WINDOW, LAYERS, ENCODER_LAYERS = 16, 13, 6
SENDER = Rings(window=21, pending=6, history=8)
TOKEN_MAP = np.random.default_rng(0).integers(0, 420, 512).astype(np.int32)
every_numerics = pytest.mark.parametrize("numerics", NUMERICS)


def tokens(length):
    return tuple(np.random.default_rng(length).integers(0, 512, length).tolist())


def meta_of(form, computed, length=None, **fields):
    length = max(computed, 1) if length is None else length
    return SnapshotMeta(form.fingerprint, tokens(length), prompt_length=1, computed=computed, **fields)


def packed(form, meta, rings=SENDER, seed=0):
    """Content as it is read from a device, and the snapshot of it."""
    blocks = random_blocks(form, form.layout.blocks_for(meta.paged) + 2, seed)
    slot = random_slot(form, rings, seed + 1)
    return blocks, slot, pack(meta, blocks, slot, form)


def is_nothing(rows, form):
    """Whether rows are NaN, poisoned packed ones by their scales."""
    if isinstance(rows, PackedRows):
        return bool((rows.scale == FORMATS[form].nan_scale).all() and not rows.data.any())
    return bool(np.isnan(rows.astype(np.float32)).all())


def assert_arrived(form, meta, blocks, slot, got_blocks, got_slot, rings):
    """Complete entries, window keys from ``starts`` on and the unfinished pairs, and nothing beside them."""
    per_group = [form.layout.block_tokens // ratio for ratio in form.layout.ratios]
    paged = max(meta.computed, meta.held)
    for block in range(form.layout.blocks_for(paged)):
        for group, ratio in enumerate(form.layout.ratios):
            offset, stop = form.layout.group_offsets[group], form.layout.group_offsets[group] + per_group[group]
            complete = min(per_group[group], max(0, paged // ratio - block * per_group[group]))
            for name, record in (("main", form.main), ("index", form.index)):
                got, want = getattr(got_blocks, name), getattr(blocks, name)
                written = (block, slice(offset, offset + complete))
                assert_same_rows(take_rows(got, written), take_rows(want, written))
                assert is_nothing(take_rows(got, (block, slice(offset + complete, stop))), record.form)
    for layer in range(form.layers):
        floor = meta.floor if layer < form.encoder_layers else max(meta.floor, meta.decoder_floor)
        seen = range(min(meta.computed, max(0, meta.computed - form.sliding_window, floor)), meta.computed)
        for position in seen:
            got, want = (layer, position % rings.window), (layer, position % SENDER.window)
            assert_same_rows(take_rows(got_slot.window, got), take_rows(slot.window, want))
        unused = sorted(set(range(rings.window)) - {position % rings.window for position in seen})
        assert is_nothing(take_rows(got_slot.window, (layer, unused)), form.window.form)
    last = meta.computed - 1
    for group, ratio in enumerate(form.layout.ratios):
        written = [last % rings.pending] if ratio == 2 and meta.computed % 2 and meta.computed >= meta.held else []
        for place in written:
            assert_same_rows(got_slot.pending[group, place], slot.pending[group, last % SENDER.pending])
        assert np.isnan(np.delete(got_slot.pending[group], written, axis=0)).all()


@st.composite
def cases(draw):
    computed = draw(st.integers(0, 90))
    more = draw(st.integers(0, 20))
    length = max(1, computed + more)
    floors = [draw(st.one_of(st.just(0), st.integers(0, length))) for _ in range(3)]
    rings = Rings(draw(st.integers(WINDOW, 40)), draw(st.integers(1, 9)), draw(st.integers(1, 12)))
    return computed, length, floors, rings


@every_numerics
@settings(max_examples=25)
@given(case=cases(), seed=st.integers(0, 99))
@example(case=(1, 1, [0, 0, 0], Rings(WINDOW, 1, 1)), seed=0)
@example(case=(0, 7, [0, 0, 0], Rings(WINDOW, 2, 3)), seed=0)
def test_every_bit_arrives_in_rings_of_any_length(numerics, case, seed):
    computed, length, (floor, decoder_floor, held), rings = case
    form = small_form(numerics)
    meta = meta_of(form, computed, length, floor=floor, decoder_floor=decoder_floor, held=held)
    blocks, slot, snapshot = packed(form, meta, seed=seed)
    assert list(snapshot) == section_names(meta, form)
    assert sum(map(len, snapshot.values())) == snapshot_bytes(meta, form)
    got_meta, got_blocks, got_slot = unpack(snapshot, rings, form, TOKEN_MAP, fill=np.nan)
    assert got_meta == meta
    assert_arrived(form, meta, blocks, slot, got_blocks, got_slot, rings)
    if rings.window >= WINDOW and computed:
        again = pack(got_meta, got_blocks, got_slot, form)
        assert again == snapshot


@every_numerics
def test_all_bytes_of_the_released_shape(numerics):
    """Main entries of 512 channels, index keys of 128, window keys of 512: 288, 68 and 528 bytes as released."""
    form = released_form(numerics)
    plain = {"f32": 4, "bf16": 2}.get(numerics)
    records = (512 * plain, 128 * plain, 512 * plain) if plain else (288, 68, 528)
    assert (form.main.size, form.index.size, form.window.size, form.pending.size) == (*records, 4096)
    meta = meta_of(form, 131, 200)
    blocks = random_blocks(form, 2, 0)
    slot = random_slot(form, Rings(134, 7, 8), 1)
    snapshot = pack(meta, blocks, slot, form)
    sizes = {name: len(content) - HEADER_BYTES for name, content in snapshot.items()}
    entry = records[0] + records[1]
    # 131 tokens are one full block and one of 3 tokens: one complete pair and three single entries.
    for group in range(4):
        assert sizes[page_name(0, group)] == (64, 64, 64, 128)[group] * entry
        assert sizes[page_name(1, group)] == (1, 1, 1, 3)[group] * entry
    assert {sizes[slot_name(layer)] for layer in range(43)} == {128 * records[2]}
    assert {sizes[pending_name(group)] for group in range(3)} == {4096}
    assert len(snapshot) == 1 + 2 * 4 + 43 + 3
    if not plain:
        assert sum(sizes[page_name(0, group)] for group in range(4)) == 890 * 128
        assert sizes[slot_name(0)] == 67_584


def test_packed_records_are_data_and_then_scales_of_each_row():
    form = released_form("released")
    meta = meta_of(form, 128)
    blocks, slot = random_blocks(form, 1, 3), random_slot(form, Rings(134, 7, 8), 4)
    snapshot = pack(meta, blocks, slot, form)
    payload = bytes(open_section("page(0, 1)", form.fingerprint, snapshot["page(0, 1)"]).payload)
    for entry in (0, 1, 63):
        main = payload[288 * entry : 288 * (entry + 1)]
        index = payload[64 * 288 + 68 * entry : 64 * 288 + 68 * (entry + 1)]
        row = form.layout.group_offsets[1] + entry
        assert main == blocks.main.data[0, row].tobytes() + blocks.main.scale[0, row].tobytes()
        assert index == blocks.index.data[0, row].tobytes() + blocks.index.scale[0, row].tobytes()
    payload = bytes(open_section("slot(42)", form.fingerprint, snapshot["slot(42)"]).payload)
    assert payload[:528] == slot.window.data[42, 0].tobytes() + slot.window.scale[42, 0].tobytes()


def test_plain_rows_are_little_endian_values():
    form = small_form("bf16")
    rows = np.asarray([[1.0, -2.0] + [0.0] * 62], form.main.dtype)
    assert form.main.to_bytes(rows)[:4] == b"\x80\x3f\x00\xc0"
    assert form.main.to_bytes(rows) == form.main.to_bytes(rows.view(np.uint16))
    assert form.main.from_bytes(form.main.to_bytes(rows)).dtype == form.main.dtype


@pytest.mark.parametrize(("form", "rows"), [("bf16", np.zeros((1, 63), np.uint16)), ("f32", np.zeros((1, 64), "u2"))])
def test_rows_of_another_width_are_not_packed(form, rows):
    with pytest.raises(ValueError, match="expected"):
        small_form(form).main.to_bytes(rows)


def test_formats_are_those_of_the_kernels():
    for name, form in FORMATS.items():
        assert form == (ROW_FORMATS[name].channels_per_byte, ROW_FORMATS[name].group, ROW_FORMATS[name].nan_scale)
    assert set(FORMATS) == set(ROW_FORMATS)
    assert IMAGE_ID == IMAGE_TOKEN


def test_pages_of_a_hit_travel_while_its_window_is_replayed():
    """48 of 64 held tokens' windows were replayed up to 51: all pages, three window keys, no unfinished pair."""
    form = small_form("f32")
    _, _, snapshot = packed(form, meta_of(form, 51, 80, floor=48, held=64))
    assert set(snapshot) == {
        "meta",
        *(page_name(block, group) for block in range(8) for group in range(3)),
        *map(slot_name, range(LAYERS)),
    }
    assert len(snapshot[page_name(7, 2)]) - HEADER_BYTES == BLOCK_TOKENS * form.page_record
    assert {len(snapshot[slot_name(layer)]) - HEADER_BYTES for layer in range(LAYERS)} == {3 * form.window.size}


def test_window_keys_below_the_floors_do_not_travel():
    """They were never computed: what stands in their places may be another request's."""
    form = small_form("bf16")
    meta = meta_of(form, 40, 60, floor=30, decoder_floor=38)
    _, _, snapshot = packed(form, meta)
    counts = [len(snapshot[slot_name(layer)]) - HEADER_BYTES for layer in range(LAYERS)]
    assert counts == [10 * form.window.size] * ENCODER_LAYERS + [2 * form.window.size] * (LAYERS - ENCODER_LAYERS)
    encoder_only = meta_of(form, 40, 60, decoder_floor=40)
    _, _, snapshot = packed(form, encoder_only)
    counts = [len(snapshot[slot_name(layer)]) - HEADER_BYTES for layer in range(LAYERS)]
    assert counts == [WINDOW * form.window.size] * ENCODER_LAYERS + [0] * (LAYERS - ENCODER_LAYERS)


@settings(max_examples=40)
@given(computed=st.integers(0, 60), ring=st.integers(1, 12), start=st.integers(0, 50), length=st.integers(1, 12))
def test_look_back_is_rebuilt_from_ids(computed, ring, start, length):
    form = small_form("f32")
    span = ImageSpan(start, start + length, b"picture")
    meta = dataclasses.replace(meta_of(form, computed, 70), images=(span,))
    _, _, snapshot = packed(form, meta)
    history = unpack_slot(snapshot, meta, Rings(WINDOW, 1, ring), form, TOKEN_MAP).history
    want = np.full(ring, IMAGE_ID)
    for position in range(max(0, computed - ring), computed):
        text = not span.start <= position < span.end
        want[position % ring] = TOKEN_MAP[meta.tokens[position]] if text else IMAGE_ID
    np.testing.assert_array_equal(history, want)
    assert history.dtype == np.int32
    assert (unpack_slot(snapshot, meta, Rings(WINDOW, 1, ring), form).history == IMAGE_ID).all()


@pytest.mark.parametrize("numerics", ["bf16", "released"])
def test_blocks_can_be_packed_and_unpacked_in_pieces(numerics):
    form = small_form(numerics)
    meta = meta_of(form, 45)
    blocks, slot, snapshot = packed(form, meta)
    pieces = pack_slot(meta, slot, form) | {"meta": meta.to_bytes()}
    for first in range(0, 6, 4):
        part = type(blocks)(*(take_rows(rows, slice(first, first + 4)) for rows in blocks))
        pieces |= pack_blocks(meta.paged, first, part, form)
    assert pieces == snapshot
    whole = unpack_blocks(snapshot, meta, 0, 6, form)
    only = {name: content for name, content in snapshot.items() if name.startswith(("page(2,", "page(3,"))}
    part = unpack_blocks(only, meta, 2, 4, form)
    for got, want in zip(part, whole, strict=True):
        assert_same_rows(got, take_rows(want, slice(2, 4)))


def test_views_of_a_larger_buffer_are_read_like_bytes():
    form = small_form("f32")
    meta = meta_of(form, 21)
    _, _, snapshot = packed(form, meta)
    shifted = {name: memoryview(b"." + content)[1:] for name, content in snapshot.items()}
    got, want = (unpack(one, SENDER, form, TOKEN_MAP) for one in (shifted, snapshot))
    assert got[0] == want[0]
    for one, other in zip((*got[1], *got[2]), (*want[1], *want[2]), strict=True):
        assert_same_rows(one, other)


def damaged(content, how, place):
    content = bytearray(content)
    place %= len(content)
    if how == "flip":
        content[place] ^= 1 << place % 8
    elif how == "cut":
        del content[place:]
    elif how == "drop":
        del content[place]
    else:
        content += b"\0"
    return bytes(content)


@pytest.mark.parametrize("numerics", ["f32", "released"])
def test_no_damaged_section_is_taken(numerics):
    """Each of all sections with one bit flipped in header, checksum and payload, cut short, or with more behind it."""
    form = small_form(numerics)
    _, _, snapshot = packed(form, meta_of(form, 19, floor=2))
    for name, content in snapshot.items():
        for how, places in (("flip", (3, 9, 20, 40, 66, HEADER_BYTES, -1)), ("cut", (0, 30, -1)), ("more", (0,))):
            for place in places:
                broken = {**snapshot, name: damaged(content, how, place)}
                if broken[name] == content:
                    continue
                with pytest.raises(SnapshotError) as refused:
                    unpack(broken, SENDER, form, TOKEN_MAP)
                assert refused.value.key == name


@settings(max_examples=200)
@given(st.data())
def test_no_damage_anywhere_goes_unnoticed(data):
    form = small_form("released")
    _, _, snapshot = packed(form, meta_of(form, 19))
    name = data.draw(st.sampled_from(sorted(snapshot)))
    how = data.draw(st.sampled_from(["flip", "cut", "drop", "more"]))
    broken = damaged(snapshot[name], how, data.draw(st.integers(0, len(snapshot[name]) - 1)))
    with pytest.raises(SnapshotError):
        unpack({**snapshot, name: broken}, SENDER, form, TOKEN_MAP)


def test_sections_open_under_their_own_names_alone():
    form = small_form("f32")
    _, _, snapshot = packed(form, meta_of(form, 33))
    for one, other in (("page(0, 0)", "page(1, 0)"), ("page(0, 0)", "page(0, 1)"), ("slot(0)", "slot(1)")):
        with pytest.raises(SnapshotError, match="belong together"):
            unpack({**snapshot, one: snapshot[other]}, SENDER, form, TOKEN_MAP)
    assert pending_name(0) in snapshot


def test_sections_of_another_time_are_refused():
    """Of the same request and name, with a good checksum, but of another number of computed tokens."""
    form = small_form("bf16")
    early, late = (packed(form, meta_of(form, computed, 50))[2] for computed in (29, 31))
    for name in ("page(3, 2)", "slot(4)", "pending(1)"):
        with pytest.raises(SnapshotError, match="records of"):
            unpack({**late, name: early[name]}, SENDER, form, TOKEN_MAP)


@pytest.mark.parametrize("name", ["meta", "page(1, 2)", "slot(12)", "pending(1)"])
def test_a_missing_section_is_named(name):
    form = small_form("f32")
    _, _, snapshot = packed(form, meta_of(form, 11))
    with pytest.raises(SnapshotError, match="missing") as refused:
        unpack({key: content for key, content in snapshot.items() if key != name}, SENDER, form)
    assert refused.value.key == name


def test_a_section_too_many_is_named():
    form = small_form("f32")
    _, _, snapshot = packed(form, meta_of(form, 12))
    with pytest.raises(SnapshotError, match="pending"):
        unpack({**snapshot, "pending(0)": b""}, SENDER, form)


@pytest.mark.parametrize("name", ["meta", "page(0, 0)", "slot(3)", "pending(0)"])
def test_another_fingerprint_is_refused(name):
    form, foreign = small_form("f32"), small_form("f32", "other weights")
    _, _, snapshot = packed(form, meta_of(form, 11))
    _, _, other = packed(foreign, meta_of(foreign, 11))
    with pytest.raises(SnapshotError, match="fingerprint") as refused:
        unpack({**snapshot, name: other[name]}, SENDER, form)
    assert refused.value.key == name
    assert refused.value.exit_code == 5


def test_another_version_is_refused(monkeypatch):
    form = small_form("f32")
    _, _, snapshot = packed(form, meta_of(form, 11))
    monkeypatch.setattr("deepinfer_jax.cache.sections.SCHEMA_VERSION", 2)
    with pytest.raises(SnapshotError, match="version 1.*accepted: version 2"):
        open_meta(snapshot, form)


def test_a_ring_that_is_too_short_is_refused():
    form = small_form("f32")
    _, _, snapshot = packed(form, meta_of(form, 30))
    with pytest.raises(ValueError, match="a ring of 15 rows cannot hold 16"):
        unpack(snapshot, Rings(15, 2, 2), form)


METAS = st.builds(
    lambda length, prompt, computed, hits, cuts: (length, prompt, computed, tuple(hits), sorted(cuts)),
    st.integers(1, 60),
    st.integers(0, 59),
    st.integers(0, 60),
    st.lists(st.integers(0, 59), max_size=3),
    st.sets(st.integers(0, 60), max_size=6),
)


@given(METAS, st.integers(0, 60), st.integers(0, 60), st.integers(0, 60), st.binary(max_size=40))
def test_meta_comes_back(parts, floor, decoder_floor, held, digest):
    length, prompt, computed, hits, cuts = parts
    spans = [ImageSpan(a, b, digest) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if b <= length]
    meta = SnapshotMeta(
        fingerprint=b"f" * 32,
        tokens=tokens(length),
        prompt_length=1 + prompt % length,
        computed=min(computed, length),
        floor=min(floor, length),
        decoder_floor=min(decoder_floor, length),
        held=min(held, length),
        replays=tuple(1 + hit % length for hit in hits),
        images=tuple(spans),
    )
    assert SnapshotMeta.from_bytes(meta.to_bytes(), b"f" * 32) == meta


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_length", 0),
        ("prompt_length", 6),
        ("computed", -1),
        ("computed", 6),
        ("computed", True),
        ("floor", 6),
        ("decoder_floor", -1),
        ("held", 6),
        ("replays", (0,)),
        ("images", (ImageSpan(3, 3, b""),)),
        ("images", (ImageSpan(0, 6, b""),)),
        ("images", (ImageSpan(2, 4, b""), ImageSpan(3, 5, b""))),
        ("tokens", (1, 2, 3, 4, -5)),
        ("tokens", (1, 2, 3, 4, 1 << 31)),
        ("tokens", ()),
        ("fingerprint", b"short"),
    ],
)
def test_meta_that_contradicts_itself_is_refused(field, value):
    good = SnapshotMeta(b"f" * 32, (1, 2, 3, 4, 5), prompt_length=2, computed=4)
    with pytest.raises(SnapshotError):
        dataclasses.replace(good, **{field: value})


def resealed(document, ids=b"\1\0\0\0", length=None):
    content = (
        document
        if isinstance(document, bytes)
        else json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    )
    length = len(content) if length is None else length
    return seal("meta", b"f" * 32, length.to_bytes(4, "little") + content + ids)


GOOD = {"prompt_length": 1, "computed": 0, "floor": 0, "decoder_floor": 0, "held": 0, "replays": [], "images": []}


@pytest.mark.parametrize(
    "content",
    [
        resealed(json.dumps(GOOD).encode()),
        resealed({**GOOD, "more": 1}),
        resealed({key: value for key, value in GOOD.items() if key != "floor"}),
        resealed({**GOOD, "images": [[0, 1]]}),
        resealed({**GOOD, "images": [[0, 1, "zz"]]}),
        resealed({**GOOD, "images": [[0, 1, "AA"]]}),
        resealed({**GOOD, "floor": None}),
        resealed({**GOOD, "floor": 0.0}),
        resealed({**GOOD, "computed": True}),
        resealed({**GOOD, "replays": [1, "1"]}),
        resealed({**GOOD, "replays": 3}),
        resealed([]),
        resealed(b"{"),
        resealed(b"\xff"),
        resealed(b"[" * 100_000),
        resealed(GOOD, ids=b"\1\0\0"),
        resealed(GOOD, length=1 << 31),
        seal("meta", b"f" * 32, b""),
    ],
)
def test_meta_with_a_good_seal_and_other_content_is_refused(content):
    assert SnapshotMeta.from_bytes(resealed(GOOD), b"f" * 32).tokens == (1,)
    with pytest.raises(SnapshotError):
        SnapshotMeta.from_bytes(content, b"f" * 32)


def test_the_small_shape_is_what_these_tests_say():
    form = small_form("f32")
    assert (form.sliding_window, form.layers, form.encoder_layers) == (WINDOW, LAYERS, ENCODER_LAYERS)
    assert form.layout.ratios == (2, 2, 1)
    assert form.layout.block_tokens == BLOCK_TOKENS
    assert small_config().draft_stages == 2
    assert len(bits(form.empty_blocks(1).main)) == 1
