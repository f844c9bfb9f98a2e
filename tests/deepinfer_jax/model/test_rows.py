"""Rows of a step: where requests begin and end, how tiles cut them, and which row holds which position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.attention import Attention, attend
from deepinfer_jax.model.indexer import Selected
from deepinfer_jax.model.params import initialise
from deepinfer_jax.model.rows import Rows, at_positions, sequence_rows
from deepinfer_jax.model.source import SequenceSource
from deepinfer_jax.numerics import F32
from deepinfer_jax.topology import LayerKind, Mode

# (slot, first position, rows) of consecutive requests; slot -1 stands for that many padding rows.
LAYOUTS = {
    "one request": [(0, 0, 7)],
    "neighbours": [(0, 3, 2), (1, 0, 4)],
    "neighbours whose positions continue each other": [(0, 3, 2), (1, 5, 3)],
    "one slot twice, with a gap": [(2, 0, 3), (2, 4, 2)],
    "decode rows": [(0, 9, 1), (1, 10, 1), (2, 0, 1)],
    "padding between and behind": [(0, 6, 3), (-1, 0, 2), (1, 1, 3), (-1, 0, 4)],
    "a first token behind padding of its slot": [(-1, 0, 3), (0, 0, 2)],
    "padding alone": [(-1, 0, 5)],
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def rows_of(layout, **fields):
    slots, positions = [], []
    for slot, start, count in layout:
        slots += [max(slot, 0)] * count
        positions += [-1] * count if slot < 0 else range(start, start + count)
    rows = len(slots)
    return Rows.of(
        jnp.arange(rows, dtype=jnp.int32),
        jnp.asarray(slots, jnp.int32),
        jnp.asarray(positions, jnp.int32),
        ((1, rows),),
        **fields,
    )


def bounds(layout):
    """First and last row of every row's request; a padding row is on its own."""
    first, last, row = [], [], 0
    for slot, _, count in layout:
        for offset in range(count):
            first.append(row + offset if slot < 0 else row)
            last.append(row + offset if slot < 0 else row + count - 1)
        row += count
    return first, last


@every_layout
def test_every_row_knows_the_ends_of_its_request(layout):
    rows, (first, last) = rows_of(layout), bounds(layout)
    np.testing.assert_array_equal(rows.first_row, first)
    np.testing.assert_array_equal(rows.last_row, last)
    assert rows.first_row.dtype == rows.last_row.dtype == jnp.int32


@every_layout
def test_compiled_rows_are_the_same(layout):
    eager = rows_of(layout)
    compiled = jax.jit(lambda rows: Rows.of(rows.tokens, rows.slots, rows.positions, rows.tiles))(eager)
    for left, right in zip(jax.tree.leaves(eager), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_array_equal(left, right)


def test_defaults_are_text_without_floor():
    rows = rows_of([(1, 4, 3), (-1, 0, 1)])
    np.testing.assert_array_equal(rows.floors, [0, 0, 0, 0])
    assert rows.floors.dtype == jnp.int32
    np.testing.assert_array_equal(rows.image, [False] * 4)
    assert rows.image_embeddings is None
    np.testing.assert_array_equal(rows.valid, [True, True, True, False])


def test_what_is_given_is_kept():
    fields = {
        "floors": jnp.asarray([2, 2], jnp.int32),
        "image": jnp.asarray([True, False]),
        "image_embeddings": jnp.ones((2, 3)),
    }
    rows = rows_of([(0, 5, 2)], **fields)
    for name, value in fields.items():
        np.testing.assert_array_equal(getattr(rows, name), value)


@pytest.mark.parametrize(("ratio", "visible"), [(1, [1, 2, 3, 4, 5, 0]), (2, [0, 1, 1, 2, 2, 0])])
def test_an_entry_is_visible_once_its_last_token_is_there(ratio, visible):
    """Specification 5.3: floor((t + 1) / r) entries; a padding row sees none."""
    rows = rows_of([(0, 0, 5), (-1, 0, 1)])
    np.testing.assert_array_equal(rows.visible_entries(ratio), visible)


def test_tile_groups_cut_the_rows_in_order():
    rows = rows_of([(0, 0, 11)]).replace(tiles=((3, 1), (2, 4)))
    groups = rows.tile_starts()
    assert [(part, shape) for part, shape, _ in groups] == [(slice(0, 3), (3, 1)), (slice(3, 11), (2, 4))]
    np.testing.assert_array_equal(groups[0][2], [0, 1, 2])
    np.testing.assert_array_equal(groups[1][2], [3, 7])
    assert {starts.dtype for _, _, starts in groups} == {jnp.dtype(jnp.int32)}


@pytest.mark.parametrize(("length", "tile_rows", "padded"), [(5, 4, 8), (8, 4, 8), (1, 16, 16), (3, 1, 3)])
def test_sequences_become_requests_padded_to_tiles(length, tile_rows, padded):
    tokens = np.arange(2 * length, dtype=np.int32).reshape(2, length) + 1
    rows = sequence_rows(jnp.asarray(tokens), tile_rows)
    assert rows.tiles == ((2 * padded // tile_rows, tile_rows),)
    for sequence in range(2):
        part = slice(sequence * padded, (sequence + 1) * padded)
        np.testing.assert_array_equal(rows.tokens[part][:length], tokens[sequence])
        np.testing.assert_array_equal(rows.slots[part], [sequence] * padded)
        np.testing.assert_array_equal(rows.positions[part], [*range(length), *[-1] * (padded - length)])
        np.testing.assert_array_equal(rows.first_row[part][:length], [part.start] * length)
        np.testing.assert_array_equal(rows.last_row[part][:length], [part.start + length - 1] * length)


@every_layout
def test_values_are_found_by_request_and_position(layout):
    """Every row asks for positions around its request: exactly those that the step holds are present."""
    rows = rows_of(layout)
    count = rows.tokens.shape[0]
    values = np.stack([np.asarray(rows.slots), np.asarray(rows.positions), np.arange(count)], axis=1)
    wanted = np.tile(np.arange(-2, 14, dtype=np.int32), (count, 1))
    got, present = jax.jit(at_positions)(values, rows, np.arange(count), wanted)
    first, last = bounds(layout)
    for row in range(count):
        start, stop = int(rows.positions[first[row]]), int(rows.positions[last[row]])
        inside = (wanted[row] >= start) & (wanted[row] <= stop) & (start >= 0)
        np.testing.assert_array_equal(present[row], inside)
        np.testing.assert_array_equal(got[row][inside, 0], np.full(inside.sum(), rows.slots[row]))
        np.testing.assert_array_equal(got[row][inside, 1], wanted[row][inside])


def test_absent_positions_take_values_from_the_request_itself():
    """What stands in for an absent value is arbitrary, but never a neighbour's: here those are NaN."""
    rows = rows_of([(0, 4, 2), (1, 4, 2), (-1, 0, 1)])
    values = jnp.asarray([jnp.nan, jnp.nan, 1.0, 2.0, jnp.nan])
    got, present = at_positions(values, rows, jnp.asarray([2]), jnp.asarray([[-1, 0, 3, 4, 5, 6, 90]]))
    np.testing.assert_array_equal(present, [[False, False, False, True, True, False, False]])
    assert np.isfinite(got).all()


def test_a_floor_hides_the_window_keys_below_it():
    """Rows from the floor on, in one window-only attention: the same where the rows below it do not exist."""
    config = ModelConfig.preset("mini-40")
    kind = LayerKind(Mode.WINDOW, 0)
    params = initialise(Attention.describe(config, "layers.0.attn", kind), jax.random.key(0), F32)
    floor, length = 5, 5 + config.sliding_window
    inputs = jnp.asarray(np.random.default_rng(0).standard_normal((length, config.hidden_size)), jnp.float32)

    @jax.jit
    def attended(inputs, rows):
        count = inputs.shape[0]
        source = SequenceSource.empty(count, count, config.head_dim, config.index_head_dim, F32.dtype)
        return attend(params, kind, 0, 0, inputs, Selected.empty(count, config), rows, source, config, F32)[0]

    floors = jnp.full(length, floor, jnp.int32)
    floored = attended(inputs, rows_of([(0, 0, length)], floors=floors))[floor:]
    begun = attended(inputs[floor:], rows_of([(0, floor, length - floor)], floors=floors[floor:]))
    free = attended(inputs, rows_of([(0, 0, length)]))[floor:]
    np.testing.assert_allclose(floored, begun, rtol=1e-5, atol=1e-5)
    different = np.abs(np.asarray(floored - free)).max(axis=1) > 1e-3
    np.testing.assert_array_equal(different, [True] * (config.sliding_window - 1) + [False])
