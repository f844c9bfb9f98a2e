"""Where requests go on behind a prefix hit: the rules, proven on what windows reach."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.replay import Replay, Restart, exact_start, restart
from tests.engines import tiny_drafting_configuration

CONFIG = ModelConfig.from_dict(tiny_drafting_configuration())
WINDOW, LAYERS = CONFIG.sliding_window, CONFIG.num_hidden_layers


def tainted(layers: int, window: int, start: int, stop: int) -> np.ndarray:
    """Whether each position's output behind ``layers`` layers depends on a window row below ``start``.

    Rows below ``start`` do not exist. A layer's row reads the layer's window rows, which come from the layer's inputs.
    """
    inputs = np.zeros(stop, bool)
    inputs[:start] = True
    for _ in range(layers):
        outputs = inputs.copy()
        for row in range(start, stop):
            outputs[row] |= inputs[max(0, row - window + 1) : row + 1].any()
        inputs = outputs
    return inputs


@given(st.integers(1, 6), st.integers(2, 7), st.integers(1, 60))
def test_the_exact_restart_depends_on_no_missing_row_and_one_token_later_does(layers, window, hit):
    config = dataclasses.replace(CONFIG, num_hidden_layers=layers, sliding_window=window)
    start = exact_start(Replay(), config, hit, hit + 9)
    assert start == max(0, hit - layers * (window - 1))
    if start == 0:
        return
    assert not tainted(layers, window, start, hit + 9)[hit:].any()
    assert tainted(layers, window, start + 1, hit + 9)[hit:].any()


@given(st.integers(1, 4), st.integers(2, 6), st.integers(1, 60), st.integers(1, 40), st.integers(6, 20))
def test_with_decoder_replay_encoder_rows_of_kept_positions_are_exact(layers, window, hit, more, keep):
    ratios = (2,) * layers + (1,) * 2
    config = dataclasses.replace(CONFIG, num_hidden_layers=layers + 2, compress_ratios=ratios, sliding_window=window)
    replay = Replay("exact", "compact", keep)
    prompt = hit + more
    start = exact_start(replay, config, hit, prompt)
    first = min(hit, replay.decoder_floor(prompt))
    if start == 0:
        return
    assert not tainted(layers, window, start, prompt)[first:].any()
    assert tainted(layers, window, start + 1, prompt)[first:].any()


def test_bounded_restart_goes_back_one_window_and_joins_the_list():
    assert restart(Replay("bounded"), CONFIG, 48, (32,), 60, windows_held=False) == Restart(
        start=48 - WINDOW, floor=48 - WINDOW, held=48, decoder_floor=48 - WINDOW, replays=(32, 48)
    )


def test_a_bounded_hit_of_at_most_a_window_is_exact():
    assert restart(Replay("bounded"), CONFIG, WINDOW, (), 60, windows_held=False) == Restart(0, 0, WINDOW, 0, ())


def test_held_windows_need_nothing_again():
    assert restart(Replay("bounded"), CONFIG, 48, (), 60, windows_held=True) == Restart(48, 0, 48, 0, ())


def test_held_windows_serve_decoder_replay_only_behind_the_first_kept_row():
    replay = Replay("exact", "compact", 20)
    assert restart(replay, CONFIG, 48, (), 68, windows_held=True) == Restart(48, 0, 48, 48, ())
    assert restart(replay, CONFIG, 48, (), 67, windows_held=True).start < 48


@pytest.mark.parametrize(
    ("replay", "key"),
    [
        (Replay("fuzzy"), "replay.mode"),
        (Replay("exact", "some"), "replay.decoder"),
        (Replay("exact", "compact", WINDOW + 3), "replay.keep"),
    ],
)
def test_settings_that_cannot_be_are_refused(replay, key):
    with pytest.raises(ConfigError) as refused:
        replay.check(CONFIG, max_drafts=3)
    assert refused.value.key == key


def test_a_model_without_decoder_layers_has_no_decoder_replay():
    config = dataclasses.replace(CONFIG, compress_ratios=(0, 2, 2))
    with pytest.raises(ConfigError, match="without decoder layers"):
        Replay("exact", "mask").check(config, max_drafts=3)
