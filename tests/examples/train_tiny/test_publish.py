"""The published checkpoint: read back, it is the trained parameters at their stored precision."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from deepinfer_jax.checkpoint.digest import read_digests, write_json
from deepinfer_jax.checkpoint.reader import load_model
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.params import initialise
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import F32
from deepinfer_jax.text.tokenizer import TOKENIZER_FILE, Tokenizer
from examples.train_tiny.configuration import configuration, template
from examples.train_tiny.preparation import CONFIG_FILE
from examples.train_tiny.publish import publish
from examples.train_tiny.storage import as_stored
from examples.train_tiny.vocabulary import train_tokenizer

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    prepared, target = (tmp_path_factory.mktemp(name) for name in ("prepared", "target"))
    words = " ".join(f"word{number} tide_{number}" for number in range(3000))
    write_json(prepared / TOKENIZER_FILE, train_tokenizer([words], ModelConfig.from_dict(template())))
    raw = configuration(Tokenizer.from_directory(prepared))
    write_json(prepared / CONFIG_FILE, raw)
    config = ModelConfig.from_dict(raw)
    params = initialise(Model.describe(config), jax.random.key(3), F32)
    publish(prepared, params, config, target)
    return config, params, target


def test_what_is_read_is_what_was_trained_at_stored_precision(published):
    config, params, target = published
    read_config, read = load_model(target, F32)
    assert read_config == config
    described = Model.describe(config)
    expected = jax.jit(lambda params: as_stored(described, params))(params)
    expected = dataclasses.replace(expected, token_map=read.token_map)
    jax.tree.map(np.testing.assert_array_equal, read, expected)


def test_the_checkpoint_has_digests_and_fits_the_repository(published):
    _, _, target = published
    assert read_digests(target) is not None
    assert sum(path.stat().st_size for path in target.iterdir()) <= 12_000_000
    assert (
        json.loads((target / CONFIG_FILE).read_text(encoding="utf-8"))["quantization_config"]["expert_dtype"] == "fp4"
    )


def test_publishing_again_replaces_the_checkpoint(published):
    config, params, target = published
    prepared = target
    other = dataclasses.replace(params, norm=params.norm + 1.0)
    again = target.parent / "again"
    first = publish(prepared, params, config, again)
    second = publish(prepared, other, config, again)
    assert first != second
    _, read = load_model(again, F32)
    np.testing.assert_allclose(read.norm, other.norm, rtol=1e-2)
