"""``convert``: what it writes serves as a model everywhere, and what it refuses is said in one sentence."""

import json
import shutil

import pytest

from deepinfer_jax.checkpoint.digest import weights_id
from tests.containers import flip_bit, place_of
from tests.golden import DATA

TINY = DATA / "tiny-a" / "quant"
NOTHING = ("--token-ids", "5", "--max-tokens", 0, "--print-ids")  # loads the weights and generates no token


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    return tmp_path_factory.mktemp("converted") / "model"


def test_a_converted_checkpoint_serves_as_a_model(run, converted):
    """It loads, and has the description of the source, and the weights id that its content has."""
    result = run("convert", TINY, converted)
    assert (result.exit_code, result.stdout) == (0, "")
    first, second = result.stderr.splitlines()
    assert first.startswith(f"{converted}: 1046 tensors, verified, ")
    assert second == f"weights id {weights_id(converted).value}"
    assert run("generate", "--model", converted, *NOTHING).exit_code == 0
    one, other = (json.loads(run("inspect", "--model", at, "--json").stdout) for at in (TINY, converted))
    assert (one.pop("weights_id")["verified"], other.pop("weights_id")["verified"]) == (False, True)
    assert one == other
    assert run("inspect", "--model", converted, "--digest").exit_code == 0
    again = run("convert", TINY, converted)
    assert again.exit_code == 0


def test_numerics_choose_the_form(run, tmp_path):
    assert run("convert", TINY, tmp_path / "out", "--numerics", "bf16", "--quiet").stderr == ""
    assert json.loads((tmp_path / "out" / "arrays.json").read_text())["numerics"] == "bf16"
    result = run("generate", "--model", tmp_path / "out", *NOTHING, "--numerics", "released")
    assert result.exit_code == 4
    assert "where weights stay packed" in result.stderr


def test_an_occupied_target_is_refused(run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    result = run("convert", TINY, tmp_path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: input '{tmp_path}' is 'a directory that is not empty'")


def test_an_unfinished_conversion_is_no_model(run, tmp_path):
    (tmp_path / "conversion").mkdir()
    shutil.copy(TINY / "config.json", tmp_path)
    result = run("inspect", "--model", tmp_path)
    assert result.exit_code == 4
    assert "an unfinished conversion" in result.stderr
    assert "run the conversion again" in result.stderr


def test_a_checkpoint_of_another_layout_is_refused(run, tmp_path):
    shutil.copy(TINY / "config.json", tmp_path)
    result = run("convert", tmp_path, tmp_path / "out")
    assert result.exit_code == 4
    assert "accepted: a directory with model.safetensors" in result.stderr


def test_a_damaged_source_ends_with_its_exit_code(run, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(TINY, source, copy_function=shutil.copyfile)
    source.chmod(0o755)
    assert run("inspect", "--model", source, "--digest").exit_code == 0
    file, first, _ = place_of(source, "norm.weight")
    flip_bit(file, first)
    result = run("convert", source, tmp_path / "out")
    assert result.exit_code == 4
    assert result.stderr.startswith("Error: checkpoint entry 'norm.weight' is 'SHA-256 ")
    assert str(file) in result.stderr
