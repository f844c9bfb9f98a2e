"""The optimiser: which parameters Muon moves, how far, and how the rate rises and falls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model.params import Parameter, Stored
from examples.train_tiny.optimisation import Schedule, muon_and_adam

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SCHEDULE = Schedule(steps=100, batch=1, decay=40, stored_steps=10, peak_rate=1e-2, warm_up=10, weight_decay=0.0)
SHAPES = {"experts": (3, 16, 32), "matrix": (24, 16), "table": (40, 16)}
STORED = {"experts": Stored.FP4_ROWS, "matrix": Stored.FP8_BLOCKS, "table": Stored.BF16}
DESCRIBED = {name: Parameter(shape, (None,) * len(shape), STORED[name], (("x",),)) for name, shape in SHAPES.items()}


@pytest.fixture(autouse=True, scope="module")
def promotion_of_the_optimiser():
    """Optax mixes integers and floats, and arrays of different rank."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def updates():
    """What every step of a whole run adds, for a gradient that stays the same."""
    optimiser = muon_and_adam(DESCRIBED, SCHEDULE)
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    gradient = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)}
    step = jax.jit(optimiser.update)
    state, every = optimiser.init(params), []
    for _ in range(SCHEDULE.steps):
        change, state = step(gradient, state, params)
        every.append(jax.tree.map(np.asarray, change))
    return every


def test_every_quantised_matrix_is_orthogonalised_by_itself(updates):
    """All singular values of an update are about equal; those of each expert, too."""
    for matrix in (updates[50]["matrix"], *updates[50]["experts"]):
        values = np.linalg.svd(matrix, compute_uv=False)
        assert values.max() / values.min() < 2.0
    values = np.linalg.svd(updates[50]["table"], compute_uv=False)
    assert values.max() / values.min() > 2.0


def test_the_rate_rises_stays_and_falls(updates):
    sizes = {name: np.asarray([np.sqrt(np.mean(step[name] ** 2)) for step in updates]) for name in SHAPES}
    for name, size in sizes.items():
        assert size[0] == 0.0, name
        assert np.all(np.diff(size[:10]) > 0), name
        np.testing.assert_allclose(size[20:60], size[30], rtol=0.02)
        assert np.all(np.diff(size[61:]) < 0), name
        assert size[-1] < 0.06 * size[30], name
    np.testing.assert_allclose(sizes["table"][30], SCHEDULE.peak_rate, rtol=0.05)
    for name in ("matrix", "experts"):
        assert 0.1 * SCHEDULE.peak_rate < sizes[name][30] < 0.4 * SCHEDULE.peak_rate


def test_the_last_steps_see_stored_parameters():
    assert [SCHEDULE.stored(step) for step in (0, 89, 90, 99)] == [False, False, True, True]
