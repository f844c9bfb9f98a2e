"""``inspect``: counts against published totals, the released schedule, and what it says of broken checkpoints."""

import json
import shutil

import pytest

from tests.containers import Tensor, flip_bit, place_of, write_container
from tests.golden import DATA, tensors

TINY = DATA / "tiny-a"
# Layers of the release that select for themselves, with the layer whose entries they read (model specification, 1.2).
RELEASED_SELECTIONS = {2: 2, 8: 8, 14: 14, 20: 20, 24: 20, 28: 20, 32: 20, 36: 20}


@pytest.fixture
def described(run):
    def describe(*arguments: object) -> dict:
        result = run("inspect", *arguments, "--json")
        assert (result.exit_code, result.stderr) == (0, "")
        return json.loads(result.stdout)

    return describe


def test_the_release_has_its_published_size(described):
    document = described("--preset", "v4.1-flash")
    counts = {"backbone": 551880835184, "engram": 196613849600, "draft": 14225362530, "vision": 485268480}
    assert document["parameters"] == counts | {"total": sum(counts.values())}
    assert document["tensors"] == 96085
    assert document["coverage"] is document["dtypes"] is None


def test_the_release_has_its_published_schedule(described):
    document = described("--preset", "v4.1-flash")
    schedule = document["schedule"]
    assert [layer["layer"] for layer in schedule] == list(range(40))
    assert [layer["ratio"] for layer in schedule] == [0, 0] + [2] * 18 + [1] * 20
    assert [layer["side"] for layer in schedule] == ["encoder"] * 20 + ["decoder"] * 20
    own = {layer["layer"]: layer["kv_source"] for layer in schedule if layer["mode"] in ("Full", "Reindex")}
    assert own == RELEASED_SELECTIONS
    assert [layer["layer"] for layer in schedule if layer["mode"] == "Full"] == [2, 8, 14, 20]
    assert all(layer["index_source"] == layer["layer"] for layer in schedule if layer["layer"] in own)
    assert [layer["layer"] for layer in schedule if layer["engram"] is not None] == [1, 14]
    assert [layer["layer"] for layer in schedule if layer["draft_tap"] is not None] == [37, 38, 39]
    assert [layer["layer"] for layer in schedule if layer["publishes_candidates"]] == [20]
    assert [layer["layer"] for layer in schedule if layer["inside_candidates"]] == [24, 28, 32, 36]
    covered = [range(item["first_layer"], item["last_layer"] + 1) for item in document["segments"]]
    assert [layer for layers in covered for layer in layers] == list(range(40))
    assert [item["repeats"] for item in document["segments"]] == [1, 1, 2, 1, 1, 4]
    reindex, reuse = document["segments"][-1]["runs"]
    assert (reindex["mode"], reindex["layers"], reuse["mode"], reuse["layers"]) == ("Reindex", 1, "Reuse", 3)


def test_the_state_of_the_release_has_its_published_size(described):
    """Three ratio-2 groups and one ratio-1 group of 512 + 128 channels: 2.5 entries a token."""
    state = described("--preset", "v4.1-flash")["state"]
    assert state["bf16"]["bytes_per_token"] == 2.5 * (512 + 128) * 2 == 3200
    assert state["f32"]["bytes_per_token"] == 6400
    rings = 43 * (128 + 6) * 512
    assert state["bf16"]["bytes_per_slot"] >= rings * 2
    # Beside the window rings there are only pending compressor inputs and look-back ids, float32 and int32 in both.
    assert state["f32"]["bytes_per_slot"] - state["bf16"]["bytes_per_slot"] == rings * 2


def test_a_preset_without_parts_counts_none(described):
    document = described("--preset", "peer-50m")
    assert document["parameters"]["engram"] == document["parameters"]["draft"] == document["parameters"]["vision"] == 0
    assert document["config"]["quantised"] is False


@pytest.mark.parametrize("checkpoint", ["quant", "bf16"])
def test_a_checkpoint_is_covered_and_counted(checkpoint, described):
    document = described("--model", TINY / checkpoint)
    stored = [name for file in sorted((TINY / checkpoint).glob("*.safetensors")) for name in tensors(file)]
    assert document["tensors"] == len(stored)
    coverage = document["coverage"]
    assert (coverage["described"], coverage["present"]) == (len(stored), len(stored))
    assert (coverage["complete"], coverage["missing"], coverage["extra"], coverage["tied"]) == (True, [], [], [])
    assert sum(total["tensors"] for total in document["dtypes"].values()) == len(stored)
    assert set(document["dtypes"]) == (
        {"BF16", "F32"} if checkpoint == "bf16" else {"BF16", "F32", "F8_E4M3", "F8_E8M0", "I8"}
    )


def test_without_a_model_the_shipped_one_is_described(described, run, shipped):
    assert described() == described("--model", shipped)
    assert run("inspect").stdout.splitlines()[0] == f"{shipped}"


def test_both_forms_of_a_checkpoint_hold_the_same_parameters(described):
    quantised, plain = (described("--model", TINY / checkpoint) for checkpoint in ("quant", "bf16"))
    assert quantised["parameters"] == plain["parameters"]
    # The plain form stores nothing but parameters; four bytes each where it is float32.
    stored = plain["dtypes"]["BF16"]["bytes"] // 2 + plain["dtypes"]["F32"]["bytes"] // 4
    assert plain["parameters"]["total"] == stored
    assert quantised["schedule"] == plain["schedule"]


def test_the_table_says_the_same_for_people(run):
    lines = run("inspect", "--preset", "v4.1-flash").stdout.splitlines()
    assert lines[0] == "v4.1-flash"
    table = [" ".join(line.split()) for line in lines]
    assert "backbone 551,880,835,184" in table
    assert "in tensors 96,085" in table
    assert "14 encoder 2 Full 14 14 Engram before it" in table
    assert "24 decoder 1 Reindex 20 24 selects inside candidate blocks" in table
    assert "39 decoder 1 Reuse 20 36 read by the draft head" in table
    assert "24-39 4 x [Reindex + 3 Reuse]" in table
    assert "bf16 3,200 B 5.74 MiB" in table
    assert not [line for line in lines if line != line.rstrip() or len(line) > 120]


def test_the_table_of_a_checkpoint_shows_coverage_and_dtypes(run):
    table = [" ".join(line.split()) for line in run("inspect", "--model", TINY / "quant").stdout.splitlines()]
    assert "described 1,046" in table
    assert "complete yes" in table
    assert any(line.startswith("F8_E4M3 ") for line in table)


def test_an_incomplete_checkpoint_is_described_and_ends_with_its_exit_code(run, incomplete_model):
    result = run("inspect", "--model", incomplete_model)
    assert result.exit_code == 4
    assert "complete   no" in result.stdout
    assert "layers.11." in result.stdout
    assert " others" in result.stderr
    assert result.stderr.startswith("Error: checkpoint entry 'layers.11.")
    result = run("inspect", "--model", incomplete_model, "--json")
    assert result.exit_code == 4
    coverage = json.loads(result.stdout)["coverage"]
    assert coverage["complete"] is False
    assert {name.split(".")[1] for name in coverage["missing"]} == {"11"}
    assert coverage["described"] == coverage["present"] + len(coverage["missing"])


@pytest.fixture
def writable(tmp_path):
    directory = shutil.copytree(TINY / "quant", tmp_path / "model", copy_function=shutil.copyfile)
    directory.chmod(0o755)
    return directory


def test_a_digest_gives_the_weights_a_verified_id(writable, run, described):
    """Written once, then checked; it is the only file added."""
    before = {path.name for path in writable.iterdir()}
    unverified = described("--model", writable)["weights_id"]
    assert unverified == described("--model", TINY / "quant")["weights_id"]
    assert unverified["verified"] is False
    verified = described("--model", writable, "--digest")["weights_id"]
    assert verified["verified"] is True
    assert verified["value"] != unverified["value"]
    assert {path.name for path in writable.iterdir()} == before | {"digest.json"}
    assert described("--model", writable)["weights_id"] == verified
    assert described("--model", writable, "--digest")["weights_id"] == verified
    text = run("inspect", "--model", writable).stdout
    assert f"\n  {verified['value']}\n  of the content\n" in text
    assert "unverified: of names" in run("inspect", "--model", TINY / "quant").stdout


def test_a_digest_finds_a_flipped_bit(writable, run):
    assert run("inspect", "--model", writable, "--digest").exit_code == 0
    file, first, size = place_of(writable, "mtp.1.ffn.experts.2.w1.scale")
    flip_bit(file, first + size // 2)
    result = run("inspect", "--model", writable, "--digest")
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith("Error: checkpoint entry 'mtp.1.ffn.experts.2.w1.scale' is 'SHA-256 ")
    assert str(file) in result.stderr
    assert run("inspect", "--model", writable).exit_code == 0


def test_extra_tensors_end_with_an_exit_code(writable, run):
    """Loading refuses them."""
    write_container(writable / "extra.safetensors", {"rotary.inv_freq": Tensor("F32", (1,), bytes(4))})
    index = writable / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["rotary.inv_freq"] = "extra.safetensors"
    index.write_text(json.dumps(document))
    result = run("inspect", "--model", writable)
    assert result.exit_code == 4
    assert result.stderr.startswith("Error: checkpoint entry 'rotary.inv_freq' is 'extra'")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "sentence"),
    [
        (["--preset", "mini-40", "--digest"], 2, "--digest reads a checkpoint, and a preset is none"),
        (["--model", TINY / "quant", "--preset", "mini-40"], 2, "give at most one of --model and --preset"),
        (["--model", TINY / "absent"], 2, "does not exist"),
        (["--model", TINY], 3, "accepted: a checkpoint directory that holds a config.json"),
        (["--model", TINY / "quant" / "inference"], 4, "accepted: a directory with model.safetensors"),
    ],
)
def test_refusals(arguments, exit_code, sentence, run):
    result = run("inspect", *arguments)
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert sentence in result.stderr
