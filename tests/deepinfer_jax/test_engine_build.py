"""What an engine is not built from: one sentence before anything is allocated or compiled."""

import dataclasses

import jax
import pytest

from deepinfer_jax.engine_build import build_engine
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.replay import Replay
from deepinfer_jax.settings import EngineSettings
from tests.running_engines import KEEP, tiny_model

SETTINGS = dataclasses.replace(EngineSettings.for_one(64), blocks=8)


@pytest.mark.parametrize(
    ("changes", "devices", "sentence"),
    [
        ({"n_shards": 2}, None, "'n_shards' is 2; accepted: 1 on a single device (give as many devices as shards)"),
        ({"n_shards": 2}, 1, "'n_shards' is 2; accepted: the number of devices, 1"),
        (
            {"encoder_only": True, "replay": Replay("exact", "compact", KEEP)},
            1,
            "'encoder_only' is True; accepted: false over several devices",
        ),
    ],
)
def test_shards_that_cannot_be_are_refused(changes, devices, sentence):
    config, numerics, params = tiny_model("f32")
    places = None if devices is None else jax.devices()[:devices]
    with pytest.raises(ConfigError) as refused:
        build_engine(params, config, numerics, dataclasses.replace(SETTINGS, **changes), devices=places)
    assert sentence in str(refused.value)
