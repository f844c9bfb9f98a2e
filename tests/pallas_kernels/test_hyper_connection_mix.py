"""The mHC mix against golden values (converged and not) and a float64 computation of the whole operation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hyper_connection_mix
from pallas_kernels.hyper_connection_mix import split_mixes
from tests.golden import tensors

split = jax.jit(split_mixes, static_argnames=("streams", "iterations", "epsilon"))
mix = jax.jit(hyper_connection_mix, static_argnames=("iterations", "epsilon", "norm_epsilon", "implementation"))
released = functools.partial(mix, iterations=20, epsilon=1e-6, norm_epsilon=1e-20)


def sigmoid(values):
    return 1 / (1 + np.exp(-values))


def reference_split(mixes, base, scale, streams, iterations, epsilon):
    """Model specification 3.1 and 3.2 in float64; row step, column step, and so on, ending on a column step."""
    mixes, base, scale = (np.asarray(item, np.float64) for item in (mixes, base, scale))
    pre = sigmoid(mixes[:, :streams] * scale[0] + base[:streams]) + epsilon
    post = 2 * sigmoid(mixes[:, streams : 2 * streams] * scale[1] + base[streams : 2 * streams])
    comb = (mixes[:, 2 * streams :] * scale[2] + base[2 * streams :]).reshape(-1, streams, streams)
    comb = np.exp(comb - comb.max(axis=2, keepdims=True))
    comb = comb / comb.sum(axis=2, keepdims=True) + epsilon
    comb = comb / (comb.sum(axis=1, keepdims=True) + epsilon)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(axis=2, keepdims=True) + epsilon)
        comb = comb / (comb.sum(axis=1, keepdims=True) + epsilon)
    return pre, post, comb


def reference(streams, projection, base, scale, iterations, epsilon, norm_epsilon):
    flat = streams.reshape(len(streams), -1).astype(np.float64)
    factor = 1 / np.sqrt((flat**2).mean(axis=1, keepdims=True) + norm_epsilon)
    return reference_split(
        flat @ projection.T.astype(np.float64) * factor, base, scale, streams.shape[1], iterations, epsilon
    )


def random_case(seed, rows=5, streams=4, hidden=16, size=1.0):
    random = np.random.default_rng(seed)
    mixes = (2 + streams) * streams
    return (
        (random.standard_normal((rows, streams, hidden)) * size).astype(np.float32),
        (random.standard_normal((mixes, streams * hidden)) * 0.3).astype(np.float32),
        random.standard_normal(mixes).astype(np.float32),
        random.random(3, np.float32) + 0.5,
    )


def assert_close(actual, expected, tolerance=2e-6):
    for name, left, right in zip(("pre", "post", "comb"), actual, expected, strict=True):
        assert left.dtype == jnp.float32
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance, err_msg=name)


def golden_split(**options):
    golden = tensors("units/units.safetensors")
    return golden, split(
        golden["mhc.mixes"],
        golden["mhc.base"],
        golden["mhc.scale"],
        **({"streams": 4, "iterations": 20, "epsilon": 1e-6} | options),
    )


def test_golden_split():
    golden, result = golden_split()
    assert_close(result, (golden["mhc.pre"], golden["mhc.post"], golden["mhc.comb"]), 5e-7)


def test_golden_split_tells_the_iterations_and_the_epsilon_apart():
    """The golden rows include some that have not converged after 20 iterations, and the column step comes last."""
    golden, result = golden_split()
    for options in ({"iterations": 19}, {"iterations": 21}):
        assert np.abs(golden_split(**options)[1].comb - golden["mhc.comb"]).max() > 1e-3
    assert np.abs(golden_split(epsilon=1e-8)[1].comb - golden["mhc.comb"]).max() > 2e-6
    assert np.abs(result.comb.sum(axis=1) - 1).max() < 3e-6
    assert np.abs(result.comb.sum(axis=2) - 1).max() > 0.03


@pytest.mark.parametrize("streams", [1, 2, 4, 5])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_the_whole_operation(streams, iterations):
    case = random_case(streams, streams=streams)
    options = {"iterations": iterations, "epsilon": 1e-3, "norm_epsilon": 1e-20}
    assert_close(mix(*case, **options), reference(*case, **options), 5e-6)


def test_the_norm_makes_the_size_of_the_streams_irrelevant():
    case = random_case(0)
    large = (case[0] * np.float32(2**20), *case[1:])
    for left, right in zip(released(*case), released(*large), strict=True):
        np.testing.assert_array_equal(left, right)


def test_the_norm_epsilon_counts():
    case = random_case(1, size=1e-3)
    options = {"iterations": 20, "epsilon": 1e-6, "norm_epsilon": 1e-6}
    assert_close(mix(*case, **options), reference(*case, **options), 5e-6)
    assert np.abs(mix(*case, **options).pre - released(*case).pre).max() > 1e-2


def test_streams_of_zeros_are_finite():
    case = random_case(2)
    zeros = (np.zeros_like(case[0]), *case[1:])
    assert_close(released(*zeros), reference(*zeros, 20, 1e-6, 1e-20))


def test_the_projection_reads_streams_in_order():
    """Stream-major: the first hidden values of a projection row belong to stream 0."""
    streams, projection, base, scale = random_case(3, streams=2, hidden=3)
    projection[:] = 0
    projection[0, :3] = 1.0
    result = released(streams, projection, base, scale)
    factor = 1 / np.sqrt((streams.reshape(5, 6) ** 2).mean(axis=1))
    np.testing.assert_allclose(
        result.pre[:, 0], sigmoid(streams[:, 0].sum(axis=1) * factor * scale[0] + base[0]) + 1e-6, rtol=1e-5
    )


def test_comb_logits_are_source_major():
    """The mix at 2 M + j M + k leads from stream j to stream k: raising it raises comb[j, k] above all others."""
    base = np.zeros(24, np.float32)
    base[8 + 1 * 4 + 3] = 5.0
    comb = split(np.zeros((1, 24)), base, np.ones(3, np.float32), streams=4, iterations=20, epsilon=1e-6).comb[0]
    assert np.unravel_index(np.argmax(comb), (4, 4)) == (1, 3)


def test_pre_is_above_epsilon_and_post_below_two():
    streams, projection, base, scale = random_case(4)
    for sign in (-1.0, 1.0):
        result = released(streams, projection * 0, base * 0 + np.float32(sign * 100), scale)
        pre, post = (1e-6, 0.0) if sign < 0 else (1.000001, 2.0)
        np.testing.assert_allclose(result.pre, np.full((5, 4), pre), rtol=1e-6)
        np.testing.assert_allclose(result.post, np.full((5, 4), post), rtol=1e-6, atol=1e-30)


def test_rows_are_independent():
    """A padding row full of NaN changes no other row."""
    streams, *rest = random_case(5)
    clean = released(streams, *rest)
    poisoned = streams.copy()
    poisoned[[0, 3]] = np.nan
    for left, right in zip(released(poisoned, *rest), clean, strict=True):
        np.testing.assert_array_equal(np.asarray(left)[[1, 2, 4]], np.asarray(right)[[1, 2, 4]])


def test_bfloat16_streams_are_mixed_in_float32():
    streams, *rest = random_case(6)
    half = jnp.asarray(streams, jnp.bfloat16)
    assert_close(released(half, *rest), released(half.astype(jnp.float32), *rest), 1e-6)


def test_gradients_are_those_of_the_definition():
    """Through all iterations, for every argument, against central differences of the float64 definition."""
    case = random_case(7, rows=2, streams=2, hidden=3)
    coefficients = [np.random.default_rng(place).standard_normal(shape) for place, shape in enumerate([(2, 2)] * 2)]
    coefficients.append(np.random.default_rng(2).standard_normal((2, 2, 2)))

    def loss(*arguments):
        result = hyper_connection_mix(*arguments, iterations=5, epsilon=1e-3, norm_epsilon=1e-20)
        return sum(
            (leaf * jnp.asarray(item, jnp.float32)).sum() for leaf, item in zip(result, coefficients, strict=True)
        )

    def loss_by_definition(*arguments):
        result = reference(*arguments, 5, 1e-3, 1e-20)
        return sum((leaf * item).sum() for leaf, item in zip(result, coefficients, strict=True))

    exact = tuple(item.astype(np.float64) for item in case)
    for place, gradient in enumerate(jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*case)):
        expected = central_differences(loss_by_definition, exact, place)
        assert np.abs(expected).max() > 0.05
        np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-4)


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


def test_eager_equals_compiled():
    case = tuple(map(jnp.asarray, random_case(8)))
    options = {"iterations": 3, "epsilon": 1e-6, "norm_epsilon": 1e-20, "implementation": "reference"}
    assert_close(mix(*case, **options), hyper_connection_mix(*case, **options), 1e-6)


@pytest.mark.parametrize(("place", "shape"), [(0, (5, 16)), (1, (23, 64)), (2, (25,)), (3, (4,))])
def test_shapes_that_disagree_are_refused(place, shape):
    case = [jnp.asarray(item) for item in random_case(9)]
    case[place] = jnp.zeros(shape)
    with pytest.raises(Exception, match="streams|mixes|scale"):
        hyper_connection_mix(*case, iterations=2, epsilon=1e-6, norm_epsilon=1e-20)
