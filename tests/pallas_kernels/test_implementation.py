"""Choosing an implementation: the default, an exact name, or a refusal that says what exists; no silent fallback."""

import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels.implementation import choose

TABLE = {"slow": lambda: "slow result", "fast": lambda: "fast result"}


def zeros(*shape):
    return jnp.zeros(shape, jnp.float32)


def integers(*shape):
    return jnp.zeros(shape, jnp.int32)


# Every public op, called on the smallest valid arguments, with the implementations it has.
OPS = {
    "window_attention": (
        lambda **options: pallas_kernels.window_attention(
            zeros(1, 1, 1, 2), zeros(1, 1, 2), integers(1, 1), integers(1, 1), integers(1, 1), scale=1.0, **options
        ),
        ("reference",),
    ),
    "sparse_attention": (
        lambda **options: pallas_kernels.sparse_attention(
            zeros(1, 1, 2), zeros(1, 2), integers(1, 1), scale=1.0, **options
        ),
        ("reference",),
    ),
    "index_selection": (
        lambda **options: pallas_kernels.index_selection(
            zeros(1, 1, 1, 2), zeros(1, 1, 1), zeros(1, 1, 2), integers(1, 1), top_k=1, **options
        ),
        ("reference",),
    ),
    "paged_index_selection": (
        lambda **options: pallas_kernels.paged_index_selection(
            zeros(1, 1, 1, 2),
            zeros(1, 1, 1),
            pallas_kernels.IndexPages(zeros(1, 2), integers(1, 1), 1),
            integers(1, 1),
            top_k=1,
            **options,
        ),
        ("reference",),
    ),
    "grouped_experts": (
        lambda **options: pallas_kernels.grouped_experts(
            zeros(1, 2), integers(1, 1), zeros(1, 1), zeros(1, 4, 2), zeros(1, 2, 2), limit=1.0, **options
        ),
        ("dense", "tiled"),
    ),
    "hyper_connection_mix": (
        lambda **options: pallas_kernels.hyper_connection_mix(
            zeros(1, 2, 2), zeros(8, 4), zeros(8), zeros(3), iterations=1, epsilon=1e-6, norm_epsilon=1e-20, **options
        ),
        ("reference",),
    ),
}
every_op = pytest.mark.parametrize("op", OPS)


def test_none_is_the_default():
    assert choose("op", None, TABLE, "slow")() == "slow result"
    assert choose("op", None, TABLE, "fast")() == "fast result"


def test_a_name_is_exactly_that_one():
    assert choose("op", "fast", TABLE, "slow")() == "fast result"


@pytest.mark.parametrize("name", ["", "FAST", "slow ", "tpu"])
def test_an_unknown_name_is_refused_and_the_existing_ones_are_named(name):
    with pytest.raises(NotImplementedError) as refused:
        choose("some_op", name, TABLE, "slow")
    assert str(refused.value) == f"some_op has no implementation {name!r}; it has fast, slow"


@every_op
def test_an_op_refuses_an_implementation_it_does_not_have(op):
    call, existing = OPS[op]
    with pytest.raises(NotImplementedError) as refused:
        call(implementation="tensor-core")
    assert str(refused.value) == f"{op} has no implementation 'tensor-core'; it has {', '.join(existing)}"


@every_op
def test_an_op_has_a_default_and_every_implementation_it_names(op):
    call, existing = OPS[op]
    for implementation in (None, *existing):
        call(implementation=implementation)
