"""``logits``: the whole command against golden logits and golden taps, and its file handling. Replay exact."""

import json

import numpy as np
import pytest

from tests.golden import DATA, document, tensors

pytestmark = pytest.mark.usefixtures("quickly_compiled")

MODEL = DATA / "tiny-a" / "quant"
PROMPTS = document("tiny-a/prompts.json")
LOGIT_TOLERANCE = 2e-4
TAP_TOLERANCE = 1e-4


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest ``|got - want| / max(1, |want|)``; infinities must be equal."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(got.astype(np.float64) - want) / np.maximum(1, np.abs(want))
    return float(np.where(got == want, 0, difference).max(initial=0))


def ids(prompt: str) -> str:
    return ",".join(map(str, PROMPTS[prompt]))


@pytest.fixture(scope="module")
def tap_file(tmp_path_factory):
    return tmp_path_factory.mktemp("taps") / "taps.npz"


@pytest.fixture
def taps(run, tap_file):
    """The arrays of one run with ``--taps``."""
    if not tap_file.exists():
        result = run("logits", "--model", MODEL, "--token-ids", ids("p3w_plus1"), "--out", tap_file, "--taps")
        assert (result.exit_code, result.stdout) == (0, "")
        assert result.stderr == f"{tap_file}: logits 49x512, 177 taps, numerics f32\n"
    return tensors(tap_file)


def test_every_golden_tap_is_written_and_no_other(taps):
    assert set(taps) == set(tensors("tiny-a/taps_f32_p3w_plus1.safetensors")) | {"logits"}


def test_taps_equal_the_golden_ones(taps):
    for name, want in tensors("tiny-a/taps_f32_p3w_plus1.safetensors").items():
        got = taps[name]
        assert (got.shape, got.dtype) == (want.shape, want.dtype), name
        if name.endswith(("router_indices", "router_weights")):
            continue
        if want.dtype == np.float32:
            assert error(got, want) <= TAP_TOLERANCE, name
        else:
            np.testing.assert_array_equal(got, want, err_msg=name)


def test_router_choices_equal_the_golden_ones_in_any_order(taps):
    golden = tensors("tiny-a/taps_f32_p3w_plus1.safetensors")
    for layer in range(11):
        found = []
        for source in (taps, golden):
            experts = source[f"layers.{layer}.router_indices"]
            order = np.argsort(experts, axis=-1)
            weights = source[f"layers.{layer}.router_weights"]
            found.append([np.take_along_axis(array, order, axis=-1) for array in (experts, weights)])
        np.testing.assert_array_equal(found[0][0], found[1][0])
        assert error(found[0][1], found[1][1]) <= TAP_TOLERANCE


def test_the_logits_beside_taps_are_those_of_the_golden_run(taps):
    want = tensors("tiny-a/logits_f32.safetensors")["p3w_plus1"]
    assert taps["logits"].dtype == np.float32
    assert error(taps["logits"], want) <= LOGIT_TOLERANCE


@pytest.mark.parametrize("prompt", ["p1", "p2", "pw", "ptext"])
def test_logits_of_short_sequences_equal_the_golden_ones(prompt, run, tmp_path):
    """With taps, so that they share the compiled pass."""
    out = tmp_path / "logits.npz"
    assert run("logits", "--model", MODEL, "--token-ids", ids(prompt), "--out", out, "--taps").exit_code == 0
    want = tensors("tiny-a/logits_f32.safetensors")[prompt]
    assert np.abs(tensors(out)["logits"] - want).max() <= LOGIT_TOLERANCE


@pytest.mark.usefixtures("shipped")
def test_without_a_model_the_shipped_one_is_run(run, tmp_path):
    out = tmp_path / "logits.npz"
    assert run("logits", "--token-ids", ids("p2"), "--out", out, "--taps").exit_code == 0
    assert np.abs(tensors(out)["logits"] - tensors("tiny-a/logits_f32.safetensors")["p2"]).max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("checkpoint", ["quant", "bf16"])
def test_logits_of_a_sequence_of_several_tiles_equal_the_golden_ones(checkpoint, run, tmp_path):
    out, file = tmp_path / "logits.npz", tmp_path / "ids.json"
    file.write_text(json.dumps(PROMPTS["p200"]), encoding="utf-8")
    where, stdin = (file, None) if checkpoint == "quant" else ("-", file.read_text(encoding="utf-8"))
    arguments = ("--model", DATA / "tiny-a" / checkpoint, "--token-ids-file", where, "--out", out, "--quiet")
    result = run("logits", *arguments, stdin=stdin)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    arrays = tensors(out)
    want = tensors("tiny-a/logits_f32.safetensors")["p200"]
    assert list(arrays) == ["logits"]
    assert arrays["logits"].shape == want.shape
    assert np.abs(arrays["logits"] - want).max() <= LOGIT_TOLERANCE


def test_numerics_reach_the_model(run, tmp_path):
    """Layer 0 sees the same inputs in `f32` and `f32q`; only the latter rounds window keys to the cache format."""
    out = tmp_path / "taps.npz"
    arguments = ("--model", MODEL, "--token-ids", ids("p3w_plus1"), "--out", out, "--taps", "--numerics", "f32q")
    assert run("logits", *arguments).exit_code == 0
    got = tensors(out)
    rounded = tensors("tiny-a/taps_f32q_p3w_plus1.safetensors")
    np.testing.assert_array_equal(got["embed_out"], rounded["embed_out"])
    assert error(got["layers.0.window_kv"], rounded["layers.0.window_kv"]) <= TAP_TOLERANCE
    exact = tensors("tiny-a/taps_f32_p3w_plus1.safetensors")
    assert error(got["layers.0.window_kv"], exact["layers.0.window_kv"]) > 100 * TAP_TOLERANCE


@pytest.mark.parametrize(
    ("arguments", "exit_code", "sentence"),
    [
        ([], 2, "give the sequence by one of --token-ids and --token-ids-file"),
        (["--token-ids", "1", "--token-ids-file", "-"], 2, "give the sequence by one of"),
        (["--token-ids", "1,two"], 2, "'two' is not a token id"),
        (["--token-ids", ""], 2, "'' is not a token id"),
        (["--token-ids", "1,512"], 2, "'token id' is 512; accepted: 0 to 511"),
        (["--token-ids", "-1"], 2, "'token id' is -1; accepted: 0 to 511"),
        (["--token-ids", ",".join(["5"] * 1025)], 2, "at most max_position_embeddings 1024"),
        (["--token-ids-file", "-"], 2, "a JSON array of token ids"),
        (["--token-ids", "1", "--numerics", "fp4"], 2, "'fp4' is not one of 'f32', 'f32q', 'bf16'"),
    ],
)
def test_refused_input_leaves_no_file(arguments, exit_code, sentence, run, tmp_path):
    result = run("logits", "--model", MODEL, "--out", tmp_path / "x.npz", *arguments, stdin="[1, true]")
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert sentence in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{}", "[1.0]", "[[1]]", "[" * 100_000])
def test_a_file_that_is_no_array_of_ids_is_refused(content, run, tmp_path):
    result = run("logits", "--model", MODEL, "--out", tmp_path / "x.npz", "--token-ids-file", "-", stdin=content)
    assert result.exit_code == 2
    assert "Error: input '--token-ids-file' is " in result.stderr


def test_a_place_that_cannot_be_written_is_reported_before_anything_is_computed(run, tmp_path, monkeypatch):
    monkeypatch.setattr("deepinfer_jax.commands.console.Console.load_model", None)
    out = tmp_path / "absent" / "x.npz"
    result = run("logits", "--model", MODEL, "--token-ids", "1", "--out", out)
    assert result.exit_code == 1
    assert f"Could not open file '{out}': No such file or directory" in result.stderr


def test_a_failed_run_keeps_the_file_that_was_there(run, tmp_path, monkeypatch):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "x.npz"
    out.write_bytes(b"earlier")
    monkeypatch.setattr("deepinfer_jax.commands.logits.golden_taps", interrupted)
    result = run("logits", "--model", MODEL, "--token-ids", "1", "--out", out, "--taps")
    assert result.exit_code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]
    assert out.read_bytes() == b"earlier"


def test_a_process_of_its_own_ends_with_the_exit_code(start, incomplete_model, tmp_path):
    process = start("logits", "--model", incomplete_model, "--token-ids", "1", "--out", tmp_path / "x.npz")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (4, b""), errors.decode()
    assert errors.startswith(b"Error: checkpoint entry 'layers.11.")
    assert b"Traceback" not in errors
    assert not list(tmp_path.glob("*.npz*"))
