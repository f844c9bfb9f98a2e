"""Compiling without most optimisations, which takes a third less time: a fixture, and the variable that says so to JAX.

For tests that compare within tolerances, or that compare no numbers. What is equal bit for bit has to be so as users
run it, so that tests of that use what is compiled in full.
"""

from collections.abc import Iterator

import jax
import pytest

QUICK_ENVIRONMENT = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.fixture(scope="module")
def quickly_compiled() -> Iterator[None]:
    """All that a file compiles is compiled quickly."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    # JAX does not compile again what it has, though it was compiled otherwise.
    jax.clear_caches()
