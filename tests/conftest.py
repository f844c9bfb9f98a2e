"""Set-up shared by all tests: one CPU device, strict dtypes and ranks, compiled code kept between runs."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Read when jax is imported, here and in the subprocesses that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"

import hypothesis
import jax
import pytest

# A fixture.
from tests.quick_compilation import quickly_compiled  # noqa: F401

REPOSITORY = Path(__file__).resolve().parent.parent

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(REPOSITORY / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# The first example of a property pays for compilation; the same examples run everywhere, campaigns choose their own.
# One failure at a time: several would come as a group, which says less than each of them.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, report_multiple_bugs=False)
hypothesis.settings.load_profile("suite")


# Every compiled program holds some memory mappings, and Linux gives a process 65,530 of them.
MAPPINGS = 20_000


@pytest.fixture(autouse=True, scope="module")
def _compiled_code_dropped() -> Iterator[None]:
    """Drop compiled code between files when there is much; what is needed again is in the persistent cache."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def data_directory() -> Path:
    """Directory of the golden data kept with the tests."""
    return REPOSITORY / "tests" / "data"
