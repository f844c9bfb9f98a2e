"""The numerics presets are the rows of the design's table."""

import dataclasses

import jax.numpy as jnp
import pytest

from deepinfer_jax.errors import InputError
from deepinfer_jax.numerics import NUMERICS_NAMES, Numerics

CACHES = {"window_keys_fp8", "main_entries_fp4", "index_queries_fp4", "index_keys_fp4"}
WEIGHTS = {"packed_weights", "linear_inputs_fp8"}
SWITCHES = CACHES | WEIGHTS | {"output_down_inputs_fp8"}

# name -> compute dtype, and the quantisation boundaries that exist. The release rounds the inputs of linear layers, but
# not those of wo_a.
PRESETS = {
    "f32": (jnp.float32, set()),
    "f32q": (jnp.float32, CACHES),
    "bf16": (jnp.bfloat16, set()),
    "released": (jnp.bfloat16, CACHES | WEIGHTS),
}


def test_every_preset_is_listed():
    assert PRESETS.keys() == set(NUMERICS_NAMES)


@pytest.mark.parametrize("name", PRESETS)
def test_preset(name):
    numerics = Numerics.preset(name)
    dtype, switches = PRESETS[name]
    assert numerics.name == name
    assert numerics.dtype == jnp.dtype(dtype)
    assert {switch for switch in SWITCHES if getattr(numerics, switch)} == switches


def test_the_table_covers_every_switch():
    assert {field.name for field in dataclasses.fields(Numerics)} == {"name", "compute", *SWITCHES}


def test_presets_are_constant_and_hashable():
    assert Numerics.preset("f32q") is Numerics.preset("f32q")
    assert len({Numerics.preset(name) for name in NUMERICS_NAMES}) == len(NUMERICS_NAMES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Numerics.preset("f32").compute = "bfloat16"


@pytest.mark.parametrize("name", ["", "F32", "float32"])
def test_an_unknown_preset_is_refused(name):
    with pytest.raises(InputError) as refused:
        Numerics.preset(name)
    assert str(refused.value) == f"input 'numerics' is {name!r}; accepted: one of {', '.join(PRESETS)}"
