"""The whole kit on a tiny random checkpoint: recorded, computed again, compared, and what may be wrong with results.

Numerics f32 and released, full passes and greedy decoding.
"""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner, Result

from deepinfer_jax.checkpoint.synthetic import synthesize
from examples.conformance import prompts, recording
from examples.conformance.__main__ import main
from examples.conformance.comparison import CLEAR_GAP
from examples.conformance.kit import CHAIN_TOKENS, INPUTS, Kit, read_arrays, write_arrays
from tests.engines import TINY_ENGRAM, tiny_configuration

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CHANGES = {
    "vocab_size": 320,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 2, 1, 1],
    "index_source_layer_ids": [1, 2, 3],
    "candidate_topk_blocks": 4,
    "candidate_block_size": 4,
    **TINY_ENGRAM,
    "engram_compressed_vocab_size": 256,
    "max_position_embeddings": 1280,
}
PROMPTS = {
    "single",
    "code",
    "text",
    "unicode",
    "random",
    "window",
    "top_k",
    "candidates",
    "long",
    "chat",
    "thinking",
    "tools",
}


def command(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """Window 16, top-k 8, four candidate blocks of four."""
    directory = tmp_path_factory.mktemp("model")
    raw = tiny_configuration()
    raw["text_config"] |= CHANGES
    synthesize(raw, directory, overwrite=True)
    return directory


@pytest.fixture(scope="session")
def kit(model, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("kits") / "kit"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "LONGEST", 96)
        assert command("build", "--model", model, "--kit", directory).exit_code == 0
    (directory / "checkpoint").symlink_to(model)
    return directory


@pytest.fixture(scope="session")
def computed(kit, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("results") / "results"
    result = command("run", kit, directory)
    assert (result.exit_code, result.stdout) == (0, "")
    return directory


@pytest.fixture
def results(computed, tmp_path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(computed, tmp_path / "results")


def lines(result: Result, *words: str) -> list[list[str]]:
    """The words of the lines of a report that hold all of these words."""
    split = [line.split() for line in result.stdout.splitlines()]
    return [line for line in split if set(words) <= set(line)]


def change(file: Path, name: str, index: object, value: object) -> None:
    arrays = {other: np.array(array) for other, array in read_arrays(file).items()}
    arrays[name][index] = value
    write_arrays(file, arrays)


def test_a_kit_holds_every_kind_of_prompt_and_a_chain_for_each(kit):
    recorded = Kit.read(kit)
    assert set(recorded.prompts) == set(recorded.chains) == PROMPTS
    lengths = {name: len(tokens) for name, tokens in recorded.prompts.items()}
    assert (lengths["single"], lengths["window"], lengths["top_k"], lengths["candidates"]) == (1, 17, 20, 20)
    assert lengths["long"] == 96
    assert recorded.prompts["chat"] != recorded.prompts["thinking"]
    for chain in recorded.chains.values():
        assert len(chain.tokens) == len(chain.margins) == CHAIN_TOKENS
        assert chain.selection_gap >= 0
    assert sorted(path.name for path in kit.iterdir()) == sorted(
        ["checkpoint", "chains.json", "prompts.json", "taps_f32.safetensors", "taps_released.safetensors"]
    )


def test_recorded_rows_lie_ahead_of_unclear_selections_and_complete_entries(kit):
    arrays = Kit.read(kit).taps["f32"]
    traced = {name.split(".")[0] for name in arrays}
    assert traced <= {"chat", "candidates", "long"}
    assert "candidates" in traced
    for prompt in traced:
        positions = arrays[f"{prompt}.positions"]
        assert (np.diff(positions) > 0).all()
        assert (positions % 2 == 1).all()
        for layer in range(4):
            chosen = arrays[f"{prompt}.layers.{layer}.router_indices"]
            scores = arrays[f"{prompt}.layers.{layer}.router_biased_scores"]
            best = np.sort(scores, axis=1)
            assert (best[:, -2] - best[:, -3] >= CLEAR_GAP * scores.std(axis=1)).all()
            np.testing.assert_array_equal(np.sort(np.argsort(-scores, axis=1)[:, :2]), np.sort(chosen))
    last = arrays["candidates.positions"][-1]
    assert last == 19
    assert (arrays["candidates.layers.2.candidate_blocks"][-1] >= 0).all()
    assert np.isneginf(arrays["candidates.layers.3.index_score"][-1]).sum() == 4


def test_the_same_checkpoint_gives_the_same_kit(model, kit, tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "LONGEST", 96)
    recording.record_kit(model, lambda line: None).write(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (kit / path.name).read_bytes(), path.name


def test_what_was_computed_for_a_kit_passes(kit, computed):
    result = command("check", computed, "--kit", kit)
    assert result.exit_code == 0
    arrays = [name for found in Kit.read(kit).taps.values() for name in found if name.split(".")[-1] not in INPUTS]
    assert result.stdout.splitlines()[-1] == f"{len(PROMPTS) + len(arrays)} pass, 0 FAIL, 0 missing, 0 unknown"
    assert lines(result, "released", "candidates", "layers.3.attn_in", "pass")
    assert not lines(result, "layers.1.streams_in")


def test_a_disturbed_array_fails_by_name_and_no_other_does(kit, results):
    change(results / "taps_f32.safetensors", "candidates.layers.2.attn_out", (0, 3), 7.0)
    result = command("check", results, "--kit", kit)
    assert result.exit_code == 1
    (failed,) = lines(result, "FAIL")
    assert failed[:3] == ["f32", "candidates", "layers.2.attn_out"]
    assert failed[4:6] == ["1.0e-04", "FAIL"]
    assert result.stdout.splitlines()[-1].split(", ")[1] == "1 FAIL"


def test_a_disturbance_within_the_tolerance_passes(kit, results):
    arrays = read_arrays(results / "taps_f32.safetensors")
    got = arrays["candidates.layers.2.attn_out"][0, 3]
    change(results / "taps_f32.safetensors", "candidates.layers.2.attn_out", (0, 3), got + np.float32(5e-5))
    assert command("check", results, "--kit", kit).exit_code == 0


def test_arrays_may_have_wider_or_narrower_types(kit, results):
    file = results / "taps_released.safetensors"
    arrays = {name: np.array(array) for name, array in read_arrays(file).items()}
    widened = {
        name: array.astype(np.float32) if array.dtype == jnp.bfloat16 else array for name, array in arrays.items()
    }
    write_arrays(file, widened)
    assert command("check", results, "--kit", kit).exit_code == 0


def test_a_wrong_token_fails_where_its_margin_decides(kit, results):
    recorded = Kit.read(kit).chains
    name, step = next(
        (name, step)
        for name, chain in recorded.items()
        for step, margin in enumerate(chain.margins)
        if step > 0 and margin > 0.1
    )
    document = json.loads((results / "chains.json").read_text())
    document[name]["tokens"][step] += 1
    (results / "chains.json").write_text(json.dumps(document))
    result = command("check", results, "--kit", kit)
    assert result.exit_code == 1
    (failed,) = lines(result, "chain", "FAIL")
    chosen = recorded[name].tokens[step]
    assert failed[1] == name
    assert " ".join(failed[5:]) == f"step {step} chose {chosen + 1} instead of {chosen}"


def test_what_is_missing_is_listed_and_is_no_failure(kit, results):
    file = results / "taps_f32.safetensors"
    arrays = {name: np.array(array) for name, array in read_arrays(file).items()}
    del arrays["candidates.layers.0.ffn_out"]
    arrays["candidates.layers.0.ffn_output"] = np.zeros(3, np.float32)
    write_arrays(file, arrays)
    (results / "taps_released.safetensors").unlink()
    document = json.loads((results / "chains.json").read_text())
    del document["unicode"]
    (results / "chains.json").write_text(json.dumps(document))
    result = command("check", results, "--kit", kit)
    assert result.exit_code == 0
    assert lines(result, "f32", "candidates", "layers.0.ffn_out", "missing")
    assert lines(result, "chain", "unicode", "missing")
    assert lines(result, "taps_f32.safetensors", "candidates.layers.0.ffn_output", "unknown")
    assert all("missing" in line for line in lines(result, "released"))


def test_results_without_anything_do_not_pass(kit, tmp_path):
    result = command("check", tmp_path, "--kit", kit)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("0 pass, 0 FAIL, ")


def test_damage_is_reported_by_name_and_the_rest_is_compared(kit, results):
    file = results / "taps_released.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    document = json.loads((results / "chains.json").read_text())
    document["code"]["tokens"][0] = "x"
    document["text"] = []
    document["single"]["tokens"].pop()
    (results / "chains.json").write_text(json.dumps(document))
    result = command("check", results, "--kit", kit)
    assert result.exit_code == 1
    failed = [" ".join(line) for line in lines(result, "FAIL")]
    assert len(failed) == 4
    assert failed[0].endswith("FAIL 31 tokens instead of 32")
    assert failed[1:3] == [f'chains.json {name} FAIL no list of integers "tokens"' for name in ("code", "text")]
    assert failed[3].startswith("taps_released.safetensors FAIL checkpoint entry ")
    assert "the file is cut short" in failed[3]
    assert all("pass" in line for line in lines(result, "f32"))
    (results / "chains.json").write_text("{")
    (failed, *_) = lines(command("check", results, "--kit", kit), "chains.json", "FAIL")
    assert failed[:2] == ["chains.json", "FAIL"]


def test_a_damaged_kit_is_an_error_that_names_the_file(kit, computed, tmp_path):
    other = shutil.copytree(kit, tmp_path / "kit", symlinks=True)
    (other / "prompts.json").write_text("[]")
    result = command("check", computed, "--kit", other)
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith(
        f"Error: checkpoint entry '{other / 'prompts.json'}' is []; accepted: a JSON object"
    )
    (other / "prompts.json").write_text("{}")
    assert "prompts.json and chains.json of a kit" in command("check", computed, "--kit", other).stderr
    (other / "prompts.json").write_text('{"prompts": {}}')
    assert f"'single in {other / 'chains.json'}' is " in command("check", computed, "--kit", other).stderr


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        (
            "candidates.positions",
            np.asarray([1, 20], np.int32),
            "'candidates.positions' is [1, 20]; accepted",
        ),
        ("candidates.layers.2.pre_in", None, "'candidates.layers.2.pre_in' is 'missing'; accepted: an array [20, 4]"),
        ("candidates.layers.3.streams_in", np.zeros((19, 4, 32), np.float32), "is [19, 4, 32]; accepted: an array [20"),
    ],
)
def test_damaged_arrays_of_a_kit_are_refused_by_name(name, array, sentence, kit, tmp_path):
    """Without chains, and with the arrays of one numerics alone."""
    other = shutil.copytree(kit, tmp_path / "kit", symlinks=True)
    (other / "chains.json").write_text("{}")
    (other / "taps_f32.safetensors").unlink()
    file = other / "taps_released.safetensors"
    arrays = {found: np.array(value) for found, value in read_arrays(file).items()} | {name: array}
    write_arrays(file, {found: value for found, value in arrays.items() if value is not None})
    result = command("run", other, tmp_path / "results")
    assert result.exit_code == 4
    assert sentence in result.stderr


def test_a_kit_of_other_weights_is_refused(kit, tmp_path):
    other = shutil.copytree(kit, tmp_path / "kit", symlinks=True)
    document = json.loads((other / "prompts.json").read_text())
    document["weights_id"] = "0" * 64
    (other / "prompts.json").write_text(json.dumps(document))
    result = command("run", other, tmp_path / "results")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "name the checkpoint that the kit was recorded with, or build the kit anew" in result.stderr
    assert not (tmp_path / "results").exists()
