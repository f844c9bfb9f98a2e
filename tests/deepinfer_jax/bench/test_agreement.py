"""First tokens beside another engine: how this engine chooses, what counts, and how a peer's answer is read."""

import sys

import numpy as np
import pytest

from deepinfer_jax.bench import agreement
from deepinfer_jax.bench.process import EngineError
from deepinfer_jax.commands.bench_text import agreement_text
from deepinfer_jax.errors import InputError
from deepinfer_jax.numerics import F32
from tests.checkpoints import golden_model, prompts
from tests.golden import tensors

pytestmark = pytest.mark.usefixtures("quickly_compiled")


def test_choice_and_margin_are_those_of_the_golden_logits():
    config, params = golden_model("quant", "f32")
    golden = tensors("tiny-a/logits_f32.safetensors")
    for name in ("p2", "pw"):
        tokens, margins = agreement.first_choices(params, np.asarray([prompts()[name]], np.int32), config, F32)
        last = golden[name][-1]
        second, best = np.sort(last)[-2:]
        assert tokens.tolist() == [last.argmax()]
        assert margins[0] == pytest.approx(best - second, abs=4e-4)


def test_prompts_with_the_margin_are_taken_until_there_are_enough(monkeypatch):
    config, params = golden_model("quant", "f32")
    monkeypatch.setattr(agreement, "BATCH", 8)
    chosen, tokens, margins, drawn = agreement._clear_prompts(params, config, F32, 5, 0.1, 6, seed=0)
    assert len(chosen) == len(tokens) == len(margins) == 5
    assert min(margins) >= 0.1
    assert drawn % 8 == 0
    ours, _ = agreement.first_choices(params, np.asarray(chosen, np.int32), config, F32)
    assert ours.tolist() == tokens


def test_a_margin_that_nothing_has_is_refused(monkeypatch):
    config, params = golden_model("quant", "f32")
    monkeypatch.setattr(agreement, "BATCH", 8)
    monkeypatch.setattr(agreement, "LARGEST_DRAW", 17)
    with pytest.raises(InputError, match="'margin' is 1000.0; accepted: one that 5 of 17 random prompts have"):
        agreement._clear_prompts(params, config, F32, 5, 1000.0, 6, seed=0)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit(3)", "did not answer .*exit status 3"),
        ("print('no json')", "did not answer"),
        ("print('{}')", "did not answer .*tokens"),
        ("print('{\"tokens\": [1]}')", "answered 1 of 2 prompts"),
    ],
)
def test_a_peer_that_does_not_answer_is_an_error_that_names_its_log(program, message, tmp_path):
    log = tmp_path / "logs" / "peer.log"
    with pytest.raises(EngineError, match=f"{message}.*see {log}"):
        agreement._answers((sys.executable, "-c", program), {}, log, [[1], [2]])


def test_a_peer_reads_the_prompts_and_its_tokens_are_returned(tmp_path):
    program = "import json, sys; print(json.dumps({'tokens': [sum(p) for p in json.load(sys.stdin)]}))"
    answers = agreement._answers((sys.executable, "-c", program), {}, tmp_path / "peer.log", [[1, 2], [5]])
    assert answers == [3, 5]


def test_the_text_lists_what_differs():
    result = agreement.Agreement("fastllm", "released", 48, 0.5, 384, 50, 49, ((0.51, 4, 7),))
    assert result.share == 0.98
    assert agreement_text(result).splitlines() == [
        "49 of 50 first tokens (98%) equal those of fastllm, numerics released; "
        "prompts of 48 tokens with a margin of 0.5, of 384 drawn",
        "margin 0.51: 4 here, 7 there",
    ]
