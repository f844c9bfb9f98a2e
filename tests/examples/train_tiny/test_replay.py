"""Bounded replay of whole texts: against an independent implementation, and its exact cases. Numerics f32."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from deepinfer_jax.model.transformer import logits
from examples.train_tiny import replay as module
from examples.train_tiny.losses import TILE_ROWS, run_windows
from examples.train_tiny.replay import (
    EXACT,
    SCORED,
    Behind,
    Measured,
    Replay,
    compared_replays,
    cut_windows,
    losses_behind,
    markdown,
    measure,
    nothing_held,
    replay_pass,
)
from tests.checkpoints import golden_model
from tests.examples.train_tiny.test_evaluation import CONFIG, random_model
from tests.golden import DATA, document, tensors

pytestmark = pytest.mark.usefixtures("quickly_compiled")

GOLDEN = document("replay/replay_tiny_a.json")["cases"]
GOLDEN_TOLERANCE = 2e-4
GOLDEN_LENGTH = 160  # one compiled length for all cases; what follows a token does not change it
# Of the configuration: two encoder layers, with Engram, and three decoder layers.
WINDOW, DECODER_LAYERS, NGRAM = 16, 3, 3
LENGTH, PADDED, PROMPT = 96, 128, 64
# From this many kept tokens on, what the last one reads through all decoder layers is complete.
EXACT_KEEP = WINDOW + (DECODER_LAYERS - 1) * (WINDOW - 1)


passed = jax.jit(replay_pass, static_argnames=("config",))


@pytest.fixture(scope="module")
def params():
    return random_model()


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(5).integers(4, CONFIG.vocab_size, (2, LENGTH), np.int32))


@pytest.fixture(scope="module")
def exact(params, tokens):
    return passed(params, tokens, nothing_held(tokens, CONFIG), EXACT.cuts(LENGTH, WINDOW), CONFIG)


@pytest.fixture(scope="module")
def run(params, tokens, exact):
    """A replay of the tokens as a prompt, which holds entries of the exact pass: distance of its rows, and entries."""

    def run(replay, prompt=LENGTH, tokens=tokens):
        hidden, used = passed(params, tokens, exact[1], replay.cuts(prompt, WINDOW), CONFIG)
        return np.abs(hidden - exact[0]).max(axis=(0, 2)), used

    return run


def golden_logits(case):
    """Logits of the last prompt token and of those behind it, after one turn a hit."""
    config, params = golden_model("quant", "f32")
    given = tensors("replay/replay_tiny_a.npz")[f"{case['name']}.tokens"]
    tokens = np.zeros((1, GOLDEN_LENGTH), np.int32)
    tokens[0, : len(given)] = given
    tokens, prompt = jnp.asarray(tokens), case["prompt_len"]
    turns = [Replay(), *(Replay(hit) for hit in case["hits"][:-1])]
    held = nothing_held(tokens, config)
    for turn in turns:
        _, held = passed(params, tokens, held, turn.cuts(prompt, config.sliding_window), config)
    cuts = Replay(*case["hits"][-1:] or [0], case["keep"]).cuts(prompt, config.sliding_window)
    assert (int(cuts.floor), int(cuts.decoder_floor)) == (case["encoder_floor"], case["decoder_floor"])
    hidden, _ = passed(params, tokens, held, cuts, config)
    return logits(params, hidden[0, prompt - 1 : len(given)])


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_logits_are_those_of_an_independent_implementation(case):
    golden = tensors("replay/replay_tiny_a.npz")
    wanted = np.concatenate([golden[f"{case['name']}.last"][None], golden[f"{case['name']}.follow"]])
    np.testing.assert_allclose(golden_logits(case), wanted, atol=GOLDEN_TOLERANCE, rtol=0)


def test_without_cuts_the_pass_is_the_models_own(params, tokens, exact):
    """A row does not depend on what follows, so that the first of them may be computed alone."""
    output = jax.jit(lambda tokens: run_windows(params, tokens, CONFIG)[0])(tokens[:, :TILE_ROWS])
    first = exact[0][:, :TILE_ROWS].reshape(output.hidden.shape)
    np.testing.assert_allclose(first, output.hidden, atol=1e-5)


@pytest.mark.parametrize("hit", [1, 7, WINDOW])
def test_a_hit_of_at_most_a_window_is_exact(run, hit):
    distances, _ = run(Replay(hit))
    assert distances.max() < 1e-5


@pytest.mark.parametrize("hit", [WINDOW + 1, 40, 41, 64])
def test_a_longer_hit_changes_what_follows(run, hit):
    distances, _ = run(Replay(hit))
    assert distances[hit - 1 : hit + WINDOW].max() > 1e-3


@pytest.mark.parametrize("hit", [40, 41])
def test_held_entries_stay_and_later_ones_are_computed_again(run, exact, hit):
    """Group 0 is of ratio 2: of an odd hit the last token's pair is not held."""
    _, used = run(Replay(hit))
    for group, ratio in enumerate((2, 1)):
        held = hit // ratio * ratio
        for name in ("entries", "keys"):
            one, other = (
                np.asarray(getattr(source[group], name)).reshape(2, PADDED, -1)[:, ratio - 1 : LENGTH : ratio]
                for source in (used, exact[1])
            )
            np.testing.assert_array_equal(one[:, : held // ratio], other[:, : held // ratio])
    assert np.abs(one[:, hit:] - other[:, hit:]).max() > 1e-3


def test_nothing_of_rows_below_the_floor_is_read(run, tokens, exact):
    """Other tokens there change nothing behind the hit, but for those that Engram looks back to."""
    hit = 50
    floor = hit - WINDOW
    other = tokens.at[:, : floor - (NGRAM - 1)].set(7)
    same, _ = run(Replay(hit))
    changed, _ = run(Replay(hit), tokens=other)
    np.testing.assert_array_equal(changed[floor:], same[floor:])
    exact_of_other, _ = run(EXACT, tokens=other)
    assert exact_of_other[floor:].max() > 1e-3


def test_keeping_the_whole_prompt_is_exact(run):
    for keep in (LENGTH, LENGTH + 5):
        assert run(Replay(keep=keep))[0].max() < 1e-5


def test_a_long_enough_keep_is_exact_for_the_last_token_and_those_behind_it(run):
    prompt = 80
    distances, _ = run(Replay(keep=EXACT_KEEP), prompt)
    assert distances[prompt - 1 :].max() < 1e-5
    assert distances[prompt - EXACT_KEEP : prompt - 1].max() > 1e-3
    distances, _ = run(Replay(keep=WINDOW + 1), prompt)
    assert distances[prompt - 1 :].max() > 1e-3


def test_decoder_replay_never_changes_an_entry(run, exact):
    for keep in (WINDOW, 20):
        _, used = run(Replay(keep=keep))
        jax.tree.map(np.testing.assert_array_equal, used, exact[1])


def test_both_replays_together_take_the_higher_floor():
    cuts = Replay(hit=60, keep=20).cuts(70, WINDOW)
    assert (int(cuts.hit), int(cuts.floor), int(cuts.decoder_floor)) == (60, 44, 50)
    cuts = Replay(hit=70, keep=20).cuts(70, WINDOW)
    assert (int(cuts.floor), int(cuts.decoder_floor)) == (54, 54)


def test_fewer_kept_tokens_than_a_window_are_refused():
    with pytest.raises(ValueError, match="15 kept tokens; accepted: at least a window, 16"):
        Replay(keep=15).cuts(64, WINDOW)


def test_losses_behind_a_prompt_are_those_of_its_last_row_and_the_next(params, tokens, exact):
    held = nothing_held(tokens[:, :-1], CONFIG)
    losses, _ = losses_behind(params, tokens, held, EXACT.cuts(PROMPT, WINDOW), prompt=PROMPT, config=CONFIG)
    scores = np.asarray(logits(params, exact[0].reshape(-1, CONFIG.hidden_size)), np.float64).reshape(2, LENGTH, -1)
    likelihood = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    wanted = -np.log(np.take_along_axis(likelihood[:, :-1], np.asarray(tokens)[:, 1:, None], axis=2))[..., 0]
    np.testing.assert_allclose(losses, wanted[:, PROMPT - 1 :], atol=1e-5)


def test_all_replays_are_measured_behind_a_prompt(params, tokens, monkeypatch):
    monkeypatch.setattr(module, "SCORED", LENGTH - PROMPT)
    windows = np.pad(np.asarray(tokens), ((0, 0), (0, 7)))
    measured = measure(params, CONFIG, windows, prompts=(PROMPT,), batch=2)
    assert [item.replay for item in measured] == [EXACT, *compared_replays(PROMPT, WINDOW)]
    exact = measured[0].scored.perplexity
    for item in measured:
        assert item.prompt == PROMPT
        assert (abs(item.first.change) < 1e-6) == (item.replay == EXACT)
        assert item.scored.perplexity == pytest.approx(exact * np.exp(item.scored.change))


def test_what_is_compared_at_a_window_of_32():
    assert compared_replays(256, 32) == [
        Replay(hit=256),
        Replay(hit=224),
        Replay(keep=35),
        Replay(keep=38),
        Replay(hit=224, keep=35),
        Replay(hit=224, keep=38),
    ]


def test_figures_of_the_tokens_behind_a_prompt():
    exact = np.asarray([[1.0, 2.0, 9.0], [3.0, 4.0, 9.0]])
    behind = Behind.of(exact + np.asarray([[0.1, 0.3, 5.0], [0.4, 0.4, 5.0]]), exact, 2)
    assert behind.tokens == 2
    assert behind.perplexity == pytest.approx(np.exp(2.5 + 0.3))
    assert behind.change == pytest.approx(0.3)
    assert behind.error == pytest.approx(0.1)


def test_the_table_has_a_column_a_prompt_and_a_row_a_replay():
    cells = functools.partial(Behind, 32)
    measured = []
    for prompt in (64, 128):
        both = Replay(prompt - 32, 35)
        for replay, change in ((EXACT, 0.0), (Replay(prompt), 0.01), (Replay(0, 38), 0.0), (both, -0.02)):
            measured.append(Measured(prompt, replay, cells(7.5, change, 0.001), cells(8.5, change, 0.002)))
    assert markdown(measured, "first").splitlines() == [
        "| prompt, tokens | 64 | 128 |",
        "| --- | ---: | ---: |",
        "| exact, perplexity | 7.500 | 7.500 |",
        "| encoder: hit of the whole prompt | +1.01 ± 0.10 % | +1.01 ± 0.10 % |",
        "| decoder: keep 38 | +0.00 ± 0.10 % | +0.00 ± 0.10 % |",
        "| both: hit of all but 32, keep 35 | -1.98 ± 0.10 % | -1.98 ± 0.10 % |",
    ]
    assert "| exact, perplexity | 8.500 | 8.500 |" in markdown(measured, "scored")


def test_windows_are_spread_over_the_text():
    documents = [np.arange(start, start + length, dtype=np.int32) for start, length in ((0, 9), (100, 3), (200, 16))]
    assert cut_windows(documents, 4, 99)[:, 0].tolist() == [0, 4, 200, 204, 208, 212]
    assert cut_windows(documents, 4, 3)[:, 0].tolist() == [0, 200, 212]
    with pytest.raises(ValueError, match="no document of 17 tokens"):
        cut_windows(documents, 17, 1)


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_the_command_measures_held_out_text(monkeypatch, arguments):
    def fake(params, config, windows):
        assert windows.shape == (3, 768 + SCORED)
        assert (windows < config.vocab_size).all()
        return [Measured(64, EXACT, Behind(32, 7.5, 0.0, 0.0), Behind(128, 8.5, 0.0, 0.0))]

    monkeypatch.setattr(module, "measure", fake)
    model = str(DATA / "tiny-a" / "quant")
    result = CliRunner().invoke(module.main, ["--model", model, "--windows", "3", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    if arguments:
        printed = json.loads(result.output)
        assert printed["windows"] == 3
        assert printed["measured"][0]["first"]["perplexity"] == 7.5
    else:
        assert "The 128 tokens behind a prompt, 3 windows of text" in result.output
