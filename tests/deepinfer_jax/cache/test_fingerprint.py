"""Fingerprints: whatever changes a state's content changes them, and nothing else does."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.cache.fingerprint import cache_format, state_fingerprint
from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import initial_state
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import BF16, F32, F32Q, NUMERICS_NAMES, RELEASED, Numerics
from pallas_kernels import CachedRows
from tests.deepinfer_jax.cache.host_states import small_config

REPOSITORY = Path(__file__).resolve().parents[3]
RELEASE = ModelConfig.preset("v4.1-flash")


def of(config=RELEASE, numerics=RELEASED, weights="0123", block_tokens=128):
    return state_fingerprint(weights, config, numerics, block_tokens)


def other(value):
    """A value of the same kind that is not the same."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value, 1)
    return value + 1


def variants(section, name=""):
    """Every field of a dataclass changed alone, and of those inside it; None instead of a whole section too."""
    for field in dataclasses.fields(section):
        value, path = getattr(section, field.name), f"{name}{field.name}"
        if dataclasses.is_dataclass(value):
            yield path, dataclasses.replace(section, **{field.name: None})
            for inner, changed in variants(value, f"{path}."):
                yield inner, dataclasses.replace(section, **{field.name: changed})
        elif value is not None and not isinstance(value, str):
            yield path, dataclasses.replace(section, **{field.name: other(value)})


CONFIGS = dict(variants(RELEASE))
SWITCHES = dict(variants(RELEASED)) | {"compute": dataclasses.replace(RELEASED, compute="float32")}


def test_it_is_the_same_in_every_process_and_release():
    """Written down once: when it changes, no stored block or held snapshot can be read any more."""
    assert of().hex() == "25ba57bbc588616acbac9bf4ebbb1ada15ec1a3ed7b8937f4c4d3b406210209e"
    assert len(of()) == 32


@pytest.mark.parametrize("path", CONFIGS)
def test_every_field_of_the_configuration_counts(path):
    assert of(CONFIGS[path]) != of()


@pytest.mark.parametrize("path", SWITCHES)
def test_every_numerics_switch_counts(path):
    assert of(numerics=SWITCHES[path]) != of()


def test_all_these_differ_from_each_other():
    found = [of(config) for config in CONFIGS.values()] + [of(numerics=numerics) for numerics in SWITCHES.values()]
    assert len(set(found)) == len(found)
    assert len(SWITCHES) == len(dataclasses.fields(Numerics)) - 1
    assert len({of(numerics=numerics) for numerics in (F32, F32Q, BF16, RELEASED)}) == 4


def test_weights_and_block_tokens_count():
    assert len({of(), of(weights="0124"), of(block_tokens=64)}) == 3


def test_the_name_of_the_numerics_does_not_count():
    assert of(numerics=dataclasses.replace(RELEASED, name="mine")) == of()


@pytest.mark.parametrize("name", NUMERICS_NAMES)
def test_the_storage_formats_are_those_of_the_state(name):
    numerics = Numerics.preset(name)
    state = initial_state(small_config(), numerics, slots=1, blocks=1, layout=PageLayout.of(small_config(), 8))
    for cache in ("main", "index", "window"):
        kept = getattr(state, cache)
        assert cache_format(cache, numerics) == (kept.name if isinstance(kept, CachedRows) else None)


@pytest.mark.parametrize("name", NUMERICS_NAMES)
def test_the_compute_dtype_is_that_of_jax(name):
    import jax.numpy as jnp

    numerics = Numerics.preset(name)
    assert numerics.dtype == jnp.dtype(numerics.compute) == np.dtype(getattr(jnp, numerics.compute))


@pytest.mark.parametrize("module", ["fingerprint", "records", "sections", "snapshot", "store"])
def test_jax_is_not_loaded(module):
    program = f"import sys, deepinfer_jax.cache.{module}; sys.exit('jaxlib' in sys.modules or 'flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=False).returncode == 0
