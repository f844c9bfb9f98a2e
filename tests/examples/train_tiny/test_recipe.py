"""The whole recipe, shortened: the same seed gives the same losses and weights, also when it is killed on the way."""

import json

import jax
import pytest
from click.testing import CliRunner

from deepinfer_jax.checkpoint.reader import load_model
from deepinfer_jax.numerics import F32
from examples.train_tiny import __main__ as recipe
from examples.train_tiny.corpus import Corpus, read_corpus
from examples.train_tiny.draft_report import Survey
from examples.train_tiny.optimisation import CURVE_FILE

pytestmark = pytest.mark.slow


class KilledError(Exception):
    """Stands for the end of a process."""


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """A tenth of the text, few steps, small surveys, and the optimiser's types."""
    corpus = read_corpus()
    short = [document for document in corpus.held_out if 2_000 < len(document.text) < 8_000]
    part = Corpus(corpus.training[::10], tuple(short[:4]))
    monkeypatch.setattr("examples.train_tiny.preparation.read_corpus", lambda: part)
    monkeypatch.setattr(recipe, "SURVEY", Survey(places=8, prompts=4, new_tokens=8, context=64, group=4))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def run(directory):
    arguments = [
        str(directory),
        "--steps",
        "10",
        "--draft-steps",
        "10",
        "--own-steps",
        "10",
        "--prompts",
        "16",
        "--batch",
        "2",
    ]
    result = CliRunner().invoke(recipe.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output


def results(directory):
    curves = [
        [json.loads(line) for line in (directory / stage / CURVE_FILE).read_text(encoding="utf-8").splitlines()]
        for stage in ("backbone", "draft")
    ]
    return curves, (directory / "model" / "digest.json").read_bytes()


def test_the_same_seed_gives_the_same_losses_and_a_killed_run_goes_on(tmp_path, monkeypatch):
    run(tmp_path / "whole")
    curves, digest = results(tmp_path / "whole")
    assert [len(curve) for curve in curves] == [10, 10]
    load_model(tmp_path / "whole" / "model", F32)
    say = recipe.say

    def killed_at(moment):
        def kill(text):
            if moment in text:
                raise KilledError
            say(text)

        return kill

    for moment in ("backbone 10/10", "draft head 10/10"):
        monkeypatch.setattr(recipe, "say", killed_at(moment))
        with pytest.raises(KilledError):
            run(tmp_path / "killed")
    monkeypatch.setattr(recipe, "say", say)
    run(tmp_path / "killed")
    assert results(tmp_path / "killed") == (curves, digest)
