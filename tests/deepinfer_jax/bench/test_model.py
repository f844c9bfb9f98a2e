"""Measuring the model itself: a tiny one, in this process."""

import numpy as np
import pytest

from deepinfer_jax.bench.model import ModelRun, Workload, draw_weights, measure_model
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.params import count
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import F32
from tests.engines import one_layer_configuration

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CONFIG = ModelConfig.from_dict(one_layer_configuration())
# A prompt that fills its tiles only in part, in shapes that no other test compiles before.
WORK = Workload(batch=3, prompt=130, steps=3, repeats=2)


def test_figures_are_rates_over_the_batch_and_agree_with_each_other():
    notes = []
    figures = measure_model(CONFIG, F32, WORK, notes.append)
    assert (figures.numerics, figures.batch, figures.prompt, figures.steps) == ("f32", 3, 130, 3)
    assert figures.parameters == count(Model.describe(CONFIG))
    for best, median in (
        (figures.prefill_tokens_per_second, figures.prefill_tokens_per_second_median),
        (figures.decode_tokens_per_second, figures.decode_tokens_per_second_median),
        (figures.decode_step_ms_median, figures.decode_step_ms),
    ):
        assert best >= median > 0
    assert figures.decode_tokens_per_second == pytest.approx(3 / (figures.decode_step_ms / 1e3))
    assert figures.peak_memory_bytes > 10 << 20
    # Compilation is not in the rates: both steps together are far shorter.
    seconds = 3 * 130 / figures.prefill_tokens_per_second + figures.decode_step_ms / 1e3
    assert figures.compile_seconds > seconds
    assert notes[-2:] == ["repeat 1 of 2", "repeat 2 of 2"]


def test_a_run_times_one_prefill_and_all_steps():
    run = ModelRun(CONFIG, F32, WORK, draw_weights(CONFIG, F32))
    assert min(run.repeat(np.random.default_rng(0), 3)) > 0


def test_a_prompt_that_does_not_fit_the_model_is_refused():
    with pytest.raises(InputError, match="'prompt \\+ steps' is 257; accepted: at most max_position_embeddings 256"):
        measure_model(CONFIG, F32, Workload(prompt=250, steps=7))


@pytest.mark.parametrize("field", ["batch", "prompt", "steps", "repeats"])
def test_a_workload_of_nothing_is_refused(field):
    with pytest.raises(InputError, match=f"'{field}' is 0; accepted: 1 or more"):
        Workload(**{field: 0})
