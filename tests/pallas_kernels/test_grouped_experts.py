"""Grouped experts: both implementations against a float64 loop over rows and experts, and against each other."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import clamped_swiglu, grouped_experts

run = jax.jit(grouped_experts, static_argnames=("limit", "tile_rows", "implementation"))
ROWS, CHOSEN, EXPERTS, HIDDEN, WIDTH = 11, 2, 5, 6, 4
LIMIT = 0.8

every_implementation = pytest.mark.parametrize("implementation", ["tiled", "dense"])


def silu(values):
    return values / (1 + np.exp(-values))


def reference(inputs, experts, weights, gate_up, down, limit):
    """The definition, one row and expert at a time, in float64."""
    outputs = np.zeros((len(inputs), down.shape[1]))
    for row, place in np.ndindex(experts.shape):
        expert = experts[row, place]
        if 0 <= expert < len(gate_up):
            gate, up = np.split(gate_up[expert].astype(np.float64) @ inputs[row], 2)
            hidden = silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit) * weights[row, place]
            outputs[row] += down[expert].astype(np.float64) @ hidden
    return outputs


def random_case(seed, rows=ROWS, experts=None):
    random = np.random.default_rng(seed)
    chosen = random.integers(-1, EXPERTS, (rows, CHOSEN)) if experts is None else np.asarray(experts)
    return (
        random.standard_normal((rows, HIDDEN)).astype(np.float32),
        chosen.astype(np.int32),
        random.standard_normal(chosen.shape).astype(np.float32),
        random.standard_normal((EXPERTS, 2 * WIDTH, HIDDEN)).astype(np.float32),
        random.standard_normal((EXPERTS, HIDDEN, WIDTH)).astype(np.float32),
    )


def assert_close(actual, expected):
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-5)


def test_random_cases_reach_both_clamps():
    """Or the limit would be untested."""
    inputs, _, _, gate_up, _ = random_case(0)
    gate, up = np.split(np.einsum("rc,ewc->rew", inputs, gate_up), 2, axis=-1)
    for values in (gate, -gate, up, -up):
        assert 0.1 < (values > LIMIT).mean() < 0.6


@every_implementation
@given(seed=st.integers(0, 2**32 - 1))
def test_any_choice(implementation, seed):
    """Ids of -1 among the others, and the same expert twice in a row."""
    case = random_case(seed)
    assert_close(run(*case, limit=LIMIT, implementation=implementation), reference(*case, LIMIT))


@pytest.mark.parametrize("tile_rows", [None, 1, 2, 3, 8, 64])
@pytest.mark.parametrize(
    "experts",
    [
        np.full((ROWS, CHOSEN), 3),
        np.full((ROWS, CHOSEN), -1),
        np.full((ROWS, CHOSEN), EXPERTS),
        np.tile([[0, EXPERTS - 1]], (ROWS, 1)),
        np.concatenate([np.full((ROWS - 1, CHOSEN), -1), [[4, 4]]]),
        np.arange(ROWS * CHOSEN).reshape(ROWS, CHOSEN) % EXPERTS,
        np.where(np.arange(ROWS)[:, None] < 8, [[1, 2]], [[2, -7]]),
    ],
    ids=["one expert", "none", "beyond", "first and last", "one row", "even", "a full tile"],
)
def test_tiled_equals_dense(tile_rows, experts):
    case = random_case(1, experts=experts)
    tiled = run(*case, limit=LIMIT, tile_rows=tile_rows, implementation="tiled")
    assert_close(tiled, reference(*case, LIMIT))
    assert_close(tiled, run(*case, limit=LIMIT, implementation="dense"))


@every_implementation
@pytest.mark.parametrize("outside", [-1, -100, EXPERTS, 2**31 - 1])
def test_ids_out_of_range_contribute_nothing(implementation, outside):
    experts = np.tile([[2, outside]], (ROWS, 1))
    experts[4] = outside
    case = random_case(2, experts=experts)
    outputs = run(*case, limit=LIMIT, implementation=implementation)
    assert_close(outputs, reference(*case, LIMIT))
    np.testing.assert_array_equal(outputs[4], np.zeros(HIDDEN))


@every_implementation
def test_padding_rows_may_hold_anything(implementation):
    """NaN in a row without experts reaches no other row; the result of that row itself is discarded."""
    case = random_case(3, experts=np.where(np.arange(ROWS)[:, None] % 3 == 0, -1, [[1, 3]]))
    clean = np.asarray(run(*case, limit=LIMIT, implementation=implementation))
    used = case[1][:, 0] >= 0
    inputs, weights = case[0].copy(), case[2].copy()
    inputs[~used] = weights[~used] = np.nan
    poisoned = np.asarray(run(inputs, case[1], weights, *case[3:], limit=LIMIT, implementation=implementation))
    np.testing.assert_array_equal(poisoned[used], clean[used])
    if implementation == "tiled":
        np.testing.assert_array_equal(poisoned[~used], np.zeros_like(poisoned[~used]))


@every_implementation
def test_experts_that_no_row_chose_may_hold_anything(implementation):
    """Only the tiled implementation leaves their weights unread."""
    case = random_case(4, experts=np.tile([[1, 3]], (ROWS, 1)))
    gate_up, down = case[3].copy(), case[4].copy()
    gate_up[[0, 2, 4]] = down[[0, 2, 4]] = np.nan if implementation == "tiled" else 1e3
    outputs = run(*case[:3], gate_up, down, limit=LIMIT, implementation=implementation)
    assert_close(outputs, reference(*case, LIMIT))


@pytest.mark.parametrize("tile_rows", [1, 4, 8])
def test_a_row_alone_equals_the_row_in_any_batch(tile_rows):
    """Bit for bit: the tile is constant, so neither the batch nor the row's place in a tile changes its result."""
    random = np.random.default_rng(5)
    hidden, width = 96, 64
    inputs = random.standard_normal((40, hidden)).astype(np.float32)
    experts = random.integers(0, 3, (40, CHOSEN)).astype(np.int32)
    weights = random.random((40, CHOSEN), np.float32)
    matrices = (
        random.standard_normal((3, 2 * width, hidden)).astype(np.float32),
        random.standard_normal((3, hidden, width)).astype(np.float32),
    )
    options = {"limit": 10.0, "tile_rows": tile_rows, "implementation": "tiled"}
    together = np.asarray(run(inputs, experts, weights, *matrices, **options))
    shuffled = random.permutation(40)
    again = run(inputs[shuffled], experts[shuffled], weights[shuffled], *matrices, **options)
    np.testing.assert_array_equal(again, together[shuffled])
    for row in range(0, 40, 7):
        part = slice(row, row + 1)
        np.testing.assert_array_equal(
            run(inputs[part], experts[part], weights[part], *matrices, **options), together[part]
        )


def test_the_weight_multiplies_before_the_rounding():
    """In bfloat16 the hidden activation is rounded with its weight, once, and products accumulate in float32."""
    random = np.random.default_rng(6)
    hidden, width = 64, 32
    inputs, gate_up, down = (
        random.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for shape in ((ROWS, hidden), (1, 2 * width, hidden), (1, hidden, width))
    )
    weights = random.random((ROWS, 1), np.float32)
    experts = np.zeros((ROWS, 1), np.int32)
    gate, up = np.split(inputs.astype(np.float64) @ gate_up[0].astype(np.float64).T, 2, axis=1)
    activation = silu(np.minimum(gate, 2.0)) * np.clip(up, -2.0, 2.0)
    weighted = (activation * weights).astype(ml_dtypes.bfloat16).astype(np.float64)
    expected = weighted @ down[0].astype(np.float64).T
    other = (activation.astype(ml_dtypes.bfloat16).astype(np.float64) @ down[0].astype(np.float64).T) * weights
    for implementation in ("tiled", "dense"):
        outputs = run(inputs, experts, weights, gate_up, down, limit=2.0, implementation=implementation)
        assert outputs.dtype == jnp.float32
        error = np.abs(outputs - expected)
        # A hidden value next to a rounding boundary may fall on its other side: a few elements, by one bfloat16 step.
        assert np.median(error) < 1e-5
        assert np.median(np.abs(outputs - other)) > 1e-3


def test_dense_is_differentiable():
    """Gradients of every float argument against central differences of the float64 definition."""
    inputs, experts, weights, gate_up, down = random_case(7, rows=3, experts=[[0, 4], [2, -1], [2, 2]])
    arguments = [item.astype(np.float64) for item in (inputs, weights, gate_up, down)]

    def loss(inputs, weights, gate_up, down):
        outputs = grouped_experts(
            inputs, jnp.asarray(experts), weights, gate_up, down, limit=LIMIT, implementation="dense"
        )
        return jnp.square(outputs).sum()

    def loss_by_definition(inputs, weights, gate_up, down):
        return (reference(inputs, experts, weights, gate_up, down, LIMIT) ** 2).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(inputs, weights, gate_up, down)
    for place, gradient in enumerate(gradients):
        assert np.isfinite(gradient).all()
        expected = central_differences(loss_by_definition, arguments, place)
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-3)
    unused = [1, 3]
    np.testing.assert_array_equal(gradients[2][jnp.array(unused)], np.zeros((2, 2 * WIDTH, HIDDEN)))


def central_differences(function, arguments, place, step=1e-5):
    """The gradient of a scalar float64 function with respect to one of its arguments, value by value."""
    gradient = np.zeros_like(arguments[place])
    for index in np.ndindex(gradient.shape):
        ends = []
        for sign in (1.0, -1.0):
            moved = arguments[place].copy()
            moved[index] += sign * step
            ends.append(function(*arguments[:place], moved, *arguments[place + 1 :]))
        gradient[index] = (ends[0] - ends[1]) / (2 * step)
    return gradient


def test_tiled_is_the_default():
    case = random_case(8)
    np.testing.assert_array_equal(run(*case, limit=LIMIT), run(*case, limit=LIMIT, implementation="tiled"))


@pytest.mark.parametrize("rows", [1, 2, 5, 70])
def test_any_number_of_rows(rows):
    """The default tile follows the number of rows."""
    case = random_case(11, rows=rows)
    assert_close(run(*case, limit=LIMIT), reference(*case, LIMIT))


@every_implementation
def test_eager_equals_compiled(implementation):
    case = random_case(9)
    eager = grouped_experts(*map(jnp.asarray, case), limit=LIMIT, implementation=implementation)
    assert_close(run(*case, limit=LIMIT, implementation=implementation), eager)


def test_the_gate_is_clamped_from_above_only():
    gate = np.array([-50.0, -2.0, 0.0, 2.0, 50.0], np.float32)
    up = np.array([1.0, 50.0, 1.0, -50.0, 1.0], np.float32)
    values = clamped_swiglu(jnp.concatenate([gate, up])[None], 1.5)[0]
    expected = [silu(-50.0), silu(-2.0) * 1.5, 0.0, silu(1.5) * -1.5, silu(1.5)]
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(
    ("place", "shape"),
    [(0, (ROWS, HIDDEN + 1)), (1, (ROWS - 1, CHOSEN)), (2, (ROWS, 1)), (3, (EXPERTS, WIDTH, 3)), (4, (1, HIDDEN, 4))],
)
def test_shapes_that_disagree_are_refused(place, shape):
    case = [jnp.asarray(item) for item in random_case(10)]
    case[place] = jnp.zeros(shape, case[place].dtype)
    with pytest.raises(Exception, match="rows|hidden|chosen|experts"):
        grouped_experts(*case, limit=LIMIT)


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 40])
def test_experts_as_one_array_each_give_the_same_bits(rows):
    """Small steps branch over the experts, larger ones loop; both equal the loop over stacked experts."""
    inputs, experts, weights, gate_up, down = random_case(rows, rows)
    stacked = run(inputs, experts, weights, gate_up, down, limit=LIMIT, tile_rows=max(8, rows))
    split = run(inputs, experts, weights, tuple(gate_up), tuple(down), limit=LIMIT, tile_rows=max(8, rows))
    looped = run(inputs, experts, weights, tuple(gate_up), tuple(down), limit=LIMIT, tile_rows=4)
    np.testing.assert_array_equal(split, stacked)
    assert_close(looped, reference(inputs, experts, weights, gate_up, down, LIMIT))
    assert_close(split, reference(inputs, experts, weights, gate_up, down, LIMIT))


def test_dense_refuses_split_experts():
    inputs, experts, weights, gate_up, down = random_case(0)
    with pytest.raises(NotImplementedError, match="stacked"):
        run(inputs, experts, weights, tuple(gate_up), tuple(down), limit=LIMIT, implementation="dense")
