"""A request that leaves one engine's state as bytes and goes on in another one's equals one that was never interrupted.

Numerics named per test, deterministic, replay exact unless a test says bounded; logits and all sections are compared
bit for bit. The receiver has other slots, blocks and ring lengths, its caches start as NaN, and rows of a snapshot that
hold nothing are NaN there. The sender's blocks and slots begin as those of other requests.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import Array

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.records import StateFormat
from deepinfer_jax.cache.snapshot import (
    ImageSpan,
    Rings,
    SnapshotMeta,
    open_meta,
    pack_blocks,
    pack_slot,
    section_names,
    unpack,
)
from deepinfer_jax.cache.state import State, initial_state
from deepinfer_jax.cache.store import MemoryStore, pack_block, store_key, unpack_block
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.runtime.advance import advance
from deepinfer_jax.runtime.batch import Batch, Chunk, StepShape, pack
from deepinfer_jax.runtime.host_planes import block_planes, slot_planes
from deepinfer_jax.runtime.step import row_logits
from deepinfer_jax.runtime.transfer import BLOCKS_AT_ONCE, Transfer, batches
from tests.checkpoints import golden_model
from tests.golden import tensors

BLOCK_TOKENS, TABLE = 8, 26
SHAPE = StepShape(decode_rows=2, prefill_tiles=4, tile_rows=16)
LENGTH, WINDOW = 120, 16
SENDER, RECEIVER = "sender", "receiver"
# Slots, blocks of the pools, and drafts, which make rings of 21 and 18 rows (pending: 6 and 3, history: 8 and 5).
SIZES = {SENDER: (3, 70, 4), RECEIVER: (2, 59, 1)}


@functools.partial(jax.jit, static_argnames=("config", "numerics"), donate_argnames="state")
def step(
    params: Model, state: State, batch: Batch, tables: Array, config: ModelConfig, numerics: Numerics
) -> tuple[State, Array]:
    rows = batch.to_rows()
    advanced = advance(params, state, rows, tables, config, numerics, kept=batch.to_kept(rows), deterministic=True)
    return advanced.state, row_logits(params, advanced.hidden, deterministic=True)


class Engine:
    """One state, and what moves requests in and out of it."""

    def __init__(self, side: str, numerics: str, seed: int = 0) -> None:
        self.numerics = Numerics.preset(numerics)
        self.config, self.params = golden_model("quant" if numerics == "released" else "bf16", numerics)
        self.slots, self.blocks, drafts = SIZES[side]
        layout = PageLayout.of(self.config, BLOCK_TOKENS)
        self.form = StateFormat.of("golden", self.config, self.numerics, layout)
        self.state = initial_state(
            self.config,
            self.numerics,
            slots=self.slots,
            blocks=self.blocks,
            layout=layout,
            max_drafts=drafts,
            fill=np.nan,
        )
        numbers = np.random.default_rng(seed).permutation(self.blocks).astype(np.int32)
        self.tables = np.stack(
            [np.resize(np.roll(numbers, -slot * self.blocks // self.slots), TABLE) for slot in range(self.slots)]
        )
        self.transfer = transfer(side, numerics)

    def run(self, slot: int, tokens: tuple[int, ...], start: int, stop: int, **fields: object) -> np.ndarray:
        """Run tokens in steps of up to 50 and return their logits; ``fields`` as in ``Chunk``."""
        logits = []
        for begin in range(start, stop, 50):
            end = min(begin + 50, stop)
            parts = {name: value[begin:end] if name.startswith("image") else value for name, value in fields.items()}
            chunk, narrowed = Chunk(slot, begin, tokens[begin:end], **parts), "decoder_floor" in fields
            # Every step takes embeddings, so that tests with and without images share compiled steps.
            batch, (at,), _ = pack([chunk], SHAPE, narrowed=narrowed, embedded=self.config.hidden_size)
            self.state, rows = step(self.params, self.state, batch, self.tables, self.config, self.numerics)
            logits.append(np.asarray(rows)[at : at + end - begin])
        return np.concatenate(logits)

    def take(self, slot: int, tokens: tuple[int, ...], computed: int, **fields: object) -> dict[str, bytes]:
        """The snapshot of a request; ``fields`` as in ``SnapshotMeta``."""
        meta = SnapshotMeta(self.form.fingerprint, tokens, len(tokens), computed, **fields)
        snapshot = {"meta": meta.to_bytes()}
        used = self.tables[slot, : self.form.layout.blocks_for(meta.paged)].tolist()
        for call, numbers in enumerate(batches(used)):
            planes = jax.tree.map(np.asarray, self.transfer.read_blocks(self.state, numbers))
            snapshot |= pack_blocks(meta.paged, call * BLOCKS_AT_ONCE, planes, self.form)
        snapshot |= pack_slot(meta, jax.tree.map(np.asarray, self.transfer.read_slot(self.state, slot)), self.form)
        assert list(snapshot) == section_names(meta, self.form)
        return snapshot

    def insert(self, slot: int, snapshot: dict[str, bytes]) -> SnapshotMeta:
        """Fill a slot, and the blocks of its table, from a snapshot."""
        rings = Rings.of(self.transfer.slot_planes)
        meta, blocks, content = unpack(snapshot, rings, self.form, np.asarray(self.params.token_map), fill=np.nan)
        self.write(self.tables[slot, : self.form.layout.blocks_for(meta.paged)].tolist(), blocks)
        planes = slot_planes(content, self.transfer.slot_planes)
        self.state = self.transfer.write_slot(self.state, slot, planes)
        return meta

    def write(self, numbers, blocks) -> None:
        for places, planes in block_planes(numbers, blocks, self.transfer.block_planes):
            self.state = self.transfer.write_blocks(self.state, places, planes)


@functools.cache
def transfer(side: str, numerics: str) -> Transfer:
    config, _ = golden_model("quant" if numerics == "released" else "bf16", numerics)
    slots, blocks, drafts = SIZES[side]
    layout = PageLayout.of(config, BLOCK_TOKENS)
    return Transfer(
        initial_state(config, Numerics.preset(numerics), slots=slots, blocks=blocks, layout=layout, max_drafts=drafts)
    )


def tokens_of(request: int, length: int = LENGTH) -> tuple[int, ...]:
    return tuple(np.random.default_rng(request).integers(3, 508, length).tolist())


@functools.cache
def undisturbed(numerics: str) -> tuple[np.ndarray, dict[str, bytes]]:
    """Logits of every token of the request, and its state at the end."""
    engine = Engine(SENDER, numerics, seed=5)
    return engine.run(0, tokens_of(1), 0, LENGTH), engine.take(0, tokens_of(1), LENGTH)


def used_sender(numerics: str) -> Engine:
    """A sender whose slot 2, and blocks, another request left behind."""
    engine = Engine(SENDER, numerics)
    engine.run(2, tokens_of(2), 0, 60)
    return engine


@pytest.mark.parametrize(
    "numerics", ["f32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("f32q", "bf16", "released"))]
)
@settings(max_examples=5)
@given(cut=st.integers(1, LENGTH - 2), more=st.integers(1, 40))
@example(cut=1, more=1)
@example(cut=7, more=1)  # odd, within the first window
@example(cut=20, more=1)  # in the middle of a block, behind the window
@example(cut=64, more=33)  # at a block's end
@example(cut=101, more=1)  # all at once: odd, in the middle of a block, behind the window
def test_a_request_goes_on_elsewhere_bit_by_bit(numerics: str, cut: int, more: int) -> None:
    """Logits of all later tokens, and at the end every section of its state: draft windows and unfinished pairs too."""
    want, final = undisturbed(numerics)
    tokens = tokens_of(1)
    sender, receiver = used_sender(numerics), Engine(RECEIVER, numerics, seed=9)
    np.testing.assert_array_equal(sender.run(2, tokens, 0, cut), want[:cut])
    snapshot = sender.take(2, tokens, cut)
    meta = receiver.insert(1, snapshot)
    assert (meta.tokens, meta.computed) == (tokens, cut)
    assert receiver.take(1, tokens, cut) == snapshot
    middle = min(cut + more, LENGTH)
    np.testing.assert_array_equal(receiver.run(1, tokens, cut, middle), want[cut:middle])
    if middle < LENGTH:
        np.testing.assert_array_equal(receiver.run(1, tokens, middle, LENGTH), want[middle:])
    assert receiver.take(1, tokens, LENGTH) == final


@pytest.mark.parametrize("cut", [48, 51, 63, 64, 65, 69, 80])
def test_a_replayed_window_goes_on_elsewhere(cut: int) -> None:
    """f32, bounded: cut within or behind the replay of a hit of 64 tokens; windows reach back to keys that are not."""
    hit, tokens = 64, tokens_of(1)
    fields = {"floor": hit - WINDOW, "held": hit}

    def engine() -> Engine:
        """A request that begins on the blocks of an earlier one, in a slot with nothing but NaN."""
        built = Engine(SENDER, "f32")
        built.run(0, tokens, 0, hit)
        built.tables[1, : hit // BLOCK_TOKENS] = built.tables[0, : hit // BLOCK_TOKENS]
        # Engram looks back on the true ids, below the floor too.
        seen = np.arange(hit - WINDOW - 3, hit - WINDOW)
        ids = np.asarray(built.params.token_map)[np.asarray(tokens)[seen]]
        history = built.state.history.at[1, seen % built.state.history.shape[1]].set(ids)
        built.state = dataclasses.replace(built.state, history=history)
        return built

    alone = engine()
    want = alone.run(1, tokens, hit - WINDOW, LENGTH, **fields)
    sender, receiver = engine(), Engine(RECEIVER, "f32", seed=9)
    if cut > hit - WINDOW:
        sender.run(1, tokens, hit - WINDOW, cut, **fields)
    meta = receiver.insert(0, sender.take(1, tokens, cut, **fields, replays=(hit,)))
    assert (meta.held, meta.replays) == (hit, (hit,))
    assert np.isfinite(want).all()
    got = receiver.run(0, tokens, cut, LENGTH, floor=meta.floor, held=meta.held)
    np.testing.assert_array_equal(got, want[cut - hit + WINDOW :])


@pytest.mark.slow
def test_encoder_only_prefill_goes_on_elsewhere() -> None:
    """f32, decoder replay: no window key of a decoder layer travels, the receiver runs the kept rows through all."""
    keep, tokens = 23, tokens_of(1)
    cut = LENGTH - keep
    alone = Engine(SENDER, "f32")
    want = alone.run(0, tokens, 0, LENGTH, decoder_floor=cut)[cut:]
    sender, receiver = used_sender("f32"), Engine(RECEIVER, "f32", seed=9)
    sender.run(2, tokens, 0, cut, decoder_floor=cut)
    snapshot = sender.take(2, tokens, cut, decoder_floor=cut)
    meta = receiver.insert(1, snapshot)
    got = receiver.run(1, tokens, cut, LENGTH, decoder_floor=meta.decoder_floor)
    np.testing.assert_array_equal(got, want)
    assert len(snapshot["slot(6)"]) < len(snapshot["slot(5)"])


def test_a_cut_inside_an_image_span() -> None:
    """bf16: the look-back that is rebuilt from ids stops at the span's tokens."""
    golden = tensors("tiny-a/multimodal.safetensors")
    image, tokens = golden["token_types"] >= 0, tuple(golden["input_ids"].tolist())
    fields = {"image": image, "image_embeddings": golden["embeds_f32"]}
    (places,) = np.nonzero(image)
    span = ImageSpan(int(places[0]), int(places[-1]) + 1, b"picture")
    assert image[span.start : span.end].all()
    alone = Engine(SENDER, "bf16")
    want = alone.run(0, tokens, 0, len(tokens), **fields)
    for cut in (span.start + 3, span.end + 1):
        sender, receiver = used_sender("bf16"), Engine(RECEIVER, "bf16", seed=9)
        sender.run(2, tokens, 0, cut, **fields)
        meta = receiver.insert(0, sender.take(2, tokens, cut, images=(span,)))
        assert meta.images == (span,)
        np.testing.assert_array_equal(receiver.run(0, tokens, cut, len(tokens), **fields), want[cut:])


@pytest.mark.parametrize("numerics", ["bf16", pytest.param("f32q", marks=pytest.mark.slow)])
def test_blocks_of_a_store_serve_elsewhere(numerics: str) -> None:
    """Bounded: a hit whose blocks came through a store equals one on the engine's own blocks."""
    hit, tokens = 64, tokens_of(1)
    fields = {"floor": hit - WINDOW, "held": hit}
    engine, receiver = used_sender(numerics), Engine(RECEIVER, numerics, seed=9)
    engine.run(0, tokens, 0, hit)
    store = MemoryStore(1 << 20)
    names = [store_key(bytes([block]) * 32, bounded=False) for block in range(hit // BLOCK_TOKENS)]
    (numbers,) = batches(engine.tables[0, : len(names)].tolist())
    planes = jax.tree.map(np.asarray, engine.transfer.read_blocks(engine.state, numbers))
    store.put_many([(name, pack_block(name, planes, place, engine.form)) for place, name in enumerate(names)])
    for name, value, number in zip(names, store.get_many(names), receiver.tables[1], strict=False):
        assert value is not None
        receiver.write([int(number)], unpack_block(name, value, receiver.form).planes)
    engine.tables[1, : len(names)] = engine.tables[0, : len(names)]
    want = engine.run(1, tokens, hit - WINDOW, LENGTH, **fields)
    np.testing.assert_array_equal(receiver.run(1, tokens, hit - WINDOW, LENGTH, **fields), want)


def test_arrays_given_to_a_device_are_new() -> None:
    """A device on the host's memory keeps them: writing to the snapshot's planes afterwards changes nothing."""
    receiver = Engine(RECEIVER, "f32")
    blocks, like = receiver.form.empty_blocks(3), receiver.transfer.block_planes
    ((numbers, planes),) = block_planes([4, 0, 7], blocks, like)
    assert numbers[:3].tolist() == [4, 0, 7]
    for one, other in zip(jax.tree.leaves(blocks), jax.tree.leaves(planes), strict=True):
        assert not np.shares_memory(one, other)


def test_bits_in_uint16_are_written_as_bits() -> None:
    """What JAX before 0.11 keeps on CPU."""
    form = Engine(RECEIVER, "bf16").form
    bits = jax.ShapeDtypeStruct((BLOCKS_AT_ONCE, 16, 64), np.uint16)
    index = jax.ShapeDtypeStruct((BLOCKS_AT_ONCE, 16, 32), np.uint16)
    like = dataclasses.replace(transfer(RECEIVER, "bf16").block_planes, main=bits, index=index)
    blocks = form.empty_blocks(9, fill=1.5)
    parts = list(block_planes(range(9), blocks, like))
    assert [part.main.dtype for _, part in parts] == [np.uint16] * 2
    assert (parts[0][1].main == 0x3FC0).all()
    assert (parts[1][1].main[0] == 0x3FC0).all()


def test_planes_of_another_kind_are_refused() -> None:
    like = transfer(RECEIVER, "f32")
    with pytest.raises(ValueError, match="rows of bfloat16 for a cache of float32"):
        list(block_planes([0], Engine(RECEIVER, "bf16").form.empty_blocks(1), like.block_planes))
    sender = Engine(SENDER, "f32")
    sender.run(0, tokens_of(1), 0, 3)
    snapshot = sender.take(0, tokens_of(1), 3)
    assert open_meta(snapshot, sender.form).computed == 3
    _, _, content = unpack(snapshot, Rings.of(sender.transfer.slot_planes), sender.form)
    with pytest.raises(ValueError, match="rings of shapes"):
        slot_planes(content, like.slot_planes)
