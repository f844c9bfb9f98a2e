"""The model that comes with the library: where it is found, and that it is whole and small."""

import pytest

from deepinfer_jax.checkpoint import default_model as module
from deepinfer_jax.checkpoint.default_model import default_model
from deepinfer_jax.checkpoint.digest import weights_id
from deepinfer_jax.checkpoint.reader import coverage, open_storage
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.transformer import Model
from tests.golden import DATA

SHIPPED = DATA.parent.parent / "deepinfer_jax" / "default_model"
LARGEST = 12 << 20  # bytes


def test_it_lies_inside_the_package():
    assert default_model() == SHIPPED


@pytest.mark.parametrize("folder", ["absent", "empty"])
def test_a_stripped_installation_is_told_the_remedy(folder, monkeypatch, tmp_path):
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(module, "FOLDER", str(tmp_path / folder))
    with pytest.raises(CheckpointError, match="is 'not in .*, or name a checkpoint by --model"):
        default_model()


def test_it_is_whole_small_and_has_its_digests_and_a_model_card():
    config = ModelConfig.from_directory(SHIPPED)
    covered = coverage(Model.describe(config), open_storage(SHIPPED))
    assert (covered.missing, covered.extra) == ((), ())
    assert weights_id(SHIPPED).verified
    assert config.quantised
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*")) <= LARGEST
    assert (SHIPPED / "README.md").read_text(encoding="utf-8").strip()
