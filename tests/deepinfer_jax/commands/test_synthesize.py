"""``synthesize``: what it writes is a complete checkpoint, and what it refuses is said in one sentence."""

import json

import pytest

from deepinfer_jax.checkpoint.digest import weights_id
from tests.large_checkpoint import small_document


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small_document()))
    return path


def test_a_configuration_becomes_a_checkpoint(run, config_file, tmp_path):
    target = tmp_path / "model"
    result = run("synthesize", "--config", config_file, target, "--shards", 2)
    assert (result.exit_code, result.stdout) == (0, "")
    first, second = result.stderr.splitlines()
    assert first.startswith(f"{target}: quantised weights of seed 0, ")
    assert second == f"weights id {weights_id(target).value}"
    described = json.loads(run("inspect", "--model", target, "--json").stdout)
    assert described["coverage"]["complete"] is True
    assert described["weights_id"] == {"value": weights_id(target).value, "verified": True}


def test_options_choose_the_form(run, config_file, tmp_path):
    ids = {}
    for name, options in {"a": (), "b": ("--seed", 1), "c": ("--dtype", "bf16"), "d": ("--shards", 3)}.items():
        result = run("synthesize", "--config", config_file, tmp_path / name, *options, "--quiet")
        assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
        ids[name] = weights_id(tmp_path / name).value
    assert ids["a"] == ids["d"]
    assert len(set(ids.values())) == 3
    assert len(list((tmp_path / "d").glob("*.safetensors"))) == 3
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert "quantization_config" not in config


def test_overwriting_is_asked_for(run, config_file, tmp_path):
    arguments = ("synthesize", "--config", config_file, tmp_path / "model", "--quiet")
    assert run(*arguments).exit_code == 0
    result = run(*arguments, "--seed", 1)
    assert result.exit_code == 2
    assert "accepted: an absent or empty one (or overwrite it)" in result.stderr
    assert run(*arguments, "--seed", 1, "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("content", "exit_code", "sentence"),
    [
        ("{", 3, "accepted: a config.json"),
        ("[]", 3, "accepted: a JSON object"),
        ("{}", 3, "text_config"),
        ('{"text_config": {"vocab_size": "many"}}', 3, "text_config."),
    ],
)
def test_a_wrong_configuration_is_refused(content, exit_code, sentence, run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(content)
    result = run("synthesize", "--config", path, tmp_path / "model")
    assert result.exit_code == exit_code
    assert sentence in result.stderr
    assert not (tmp_path / "model").exists()


def test_one_source_is_needed(run, config_file, tmp_path):
    for options in ([], ["--config", config_file, "--preset", "mini-40"]):
        result = run("synthesize", tmp_path / "model", *options)
        assert result.exit_code == 2
        assert "exactly one of --preset and --config" in result.stderr
