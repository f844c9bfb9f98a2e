"""From settings and free bytes to blocks of the page pools. No model runs."""

import dataclasses
import math
import sys

import jax
import pytest

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine_build import build_engine
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.memory import available_bytes, block_bytes, free_bytes, page_blocks
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.settings import EngineSettings
from tests.configurations import raw_preset
from tests.running_engines import tiny_model

MEMORY = """MemTotal:       24637320 kB
MemFree:          101000 kB
MemAvailable:    2000000 kB
Cached:          5000000 kB
"""


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A device as far as its memory goes."""

    platform: str
    stats: dict[str, int] | None

    def memory_stats(self):
        return self.stats


@pytest.fixture
def information(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text(MEMORY)
    return path


def refusal(action) -> str:
    with pytest.raises(ConfigError) as refused:
        action()
    return str(refused.value)


def never():
    raise AssertionError("asked for free bytes that do not matter")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"blocks": 7, "memory_fraction": 0.5, "memory": 1000}, 7),
        ({"memory_fraction": 0.5, "memory": 1}, 50),
        ({"memory_fraction": 0.505}, 50),
        ({"memory_fraction": 1.0}, 100),
        ({"memory_fraction": 0.01}, 1),
        ({"memory": 100}, 1),
        ({"memory": 1999}, 19),
        ({}, (1 << 28) // 100),
    ],
)
def test_blocks_come_before_the_fraction_and_the_fraction_before_the_bytes(settings, expected):
    settings = EngineSettings(**settings)
    decides = settings.blocks is None and settings.memory_fraction is not None
    assert page_blocks(settings, 100, (lambda: 10_000) if decides else never) == expected


def test_less_than_a_block_is_refused_with_both_sizes():
    sentence = "configuration key 'memory' is 99; accepted: bytes for at least one block, 100"
    assert refusal(lambda: page_blocks(EngineSettings(memory=99), 100, never)) == sentence
    sentence = (
        "configuration key 'memory_fraction' is '0.5 of 199 free bytes'; accepted: bytes for at least one block, 100"
    )
    assert refusal(lambda: page_blocks(EngineSettings(memory_fraction=0.5), 100, lambda: 199)) == sentence


def test_a_model_without_pages_has_one_block_of_nothing():
    assert page_blocks(EngineSettings(memory_fraction=0.5), 0, lambda: 10_000) == 1


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, math.nan, math.inf])
def test_fractions_have_a_range(fraction):
    sentence = f"configuration key 'memory_fraction' is {fraction}; accepted: above 0 to 1"
    assert refusal(lambda: EngineSettings(memory_fraction=fraction)) == sentence


def test_a_device_that_reports_its_memory_is_believed(information):
    large = Accelerator("gpu", {"bytes_limit": 9000, "bytes_in_use": 2000, "peak_bytes_in_use": 8000})
    small = Accelerator("gpu", {"bytes_limit": 9000, "bytes_in_use": 4000})
    assert free_bytes([large], information) == 7000
    assert free_bytes([large, small], information) == 5000


def test_processors_share_what_the_system_has(information):
    assert available_bytes(information) == 2_000_000 * 1024
    assert free_bytes([Accelerator("cpu", None)], information) == 2_000_000 * 1024
    assert free_bytes([Accelerator("cpu", None)] * 8, information) == 250_000 * 1024


def test_memory_that_nobody_knows_is_a_typed_error(information, tmp_path):
    remedy = "accepted: a fraction of memory that the device reports (give blocks or memory)"
    for device, place in (
        (Accelerator("tpu", None), information),
        (Accelerator("tpu", {"bytes_in_use": 5}), information),
        (Accelerator("cpu", None), tmp_path / "absent"),
    ):
        assert refusal(lambda device=device, place=place: free_bytes([device], place)).endswith(remedy)
    odd = tmp_path / "odd"
    for text in ("", "MemAvailable: many\n", "MemAvailable: 5 MB\n", "Available: 5 kB\n"):
        odd.write_text(text)
        assert available_bytes(odd) is None


def test_the_sizes_of_released_blocks():
    """State of 890 bytes a token as released and 3,200 in bfloat16; the state specification, section 4."""
    config = ModelConfig.from_dict(raw_preset("v4.1-flash"))
    layout = PageLayout.of(config)
    sizes = {name: block_bytes(config, Numerics.preset(name), layout) for name in ("released", "bf16", "f32")}
    assert sizes == {"released": 890 * 128, "bf16": 3200 * 128, "f32": 6400 * 128}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no other system says what it has available")
def test_an_engine_takes_its_share_of_this_machine():
    config, numerics, params = tiny_model("f32")
    size = block_bytes(config, numerics, PageLayout.of(config))
    free = free_bytes(jax.local_devices()[:1])
    # Others use the machine too; only the order of magnitude is known.
    fraction = 40 * size / free
    settings = dataclasses.replace(EngineSettings.for_one(96), blocks=None, memory_fraction=fraction)
    blocks = build_engine(params, config, numerics, settings).books.pool.blocks
    assert 10 < blocks < 160
