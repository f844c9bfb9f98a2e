"""A comparison from end to end, with stand-ins for other engines and the real process of this one."""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from types import MappingProxyType

import pytest

from deepinfer_jax.bench import side_by_side
from deepinfer_jax.bench.comparison import OWN_NAME, Failure
from deepinfer_jax.bench.peers import PEERS, Peer, own_commands
from deepinfer_jax.bench.side_by_side import Plan, Results, compare, run_turns
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.params import count
from deepinfer_jax.model.transformer import Model
from tests.engines import ENVIRONMENT, fake_engine, journal, one_layer_configuration, place

PLAN = Plan(batches=(1, 8), prompt=16, steps=4, repeats=3, start_seconds=60.0, turn_seconds=60.0)
RATES = """
import json
print(json.dumps({"gemm_float32": 1e11, "gemm_bfloat16": 2e11, "read": 1e10}))
"""


def run(tmp_path, *commands, plan=PLAN):
    results, notes = Results(), []
    run_turns(commands, plan, place(tmp_path), results, notes.append)
    return results, notes


def test_engines_take_turns_one_after_the_other_with_fresh_prompts(tmp_path):
    commands = [fake_engine(tmp_path, name) for name in ("one", "two")]
    results, notes = run(tmp_path, *commands)
    measured = [
        (name, int(batch), int(seed)) for name, batch, prompt, steps, seed in journal(tmp_path) if prompt == "16"
    ]
    assert [name for name, batch, seed in measured] == ["one", "two"] * 6
    assert [batch for name, batch, seed in measured] == [1] * 6 + [8] * 6
    assert len({seed for name, batch, seed in measured}) == 6
    assert {key: len(turns) for key, turns in results.turns.items()} == {
        (name, "f32", batch): 3 for name in ("one", "two") for batch in (1, 8)
    }
    assert (results.failures, results.versions) == ([], {"fake": "1.0"})
    assert results.parameters == {"one f32": 7, "two f32": 7}
    assert notes[:2] == ["one f32: starting", "two f32: starting"]
    assert notes[-1] == "batch 8, turn 3 of 3: two f32: prefill 256, decode 16.0 tokens/s"


def test_an_engine_that_fails_is_noted_and_the_others_go_on(tmp_path):
    dying = fake_engine(tmp_path, "dying", "if seed == 2: os._exit(9)")
    hanging = fake_engine(tmp_path, "hanging", "if seed == 5: time.sleep(60)")
    absent = dataclasses.replace(fake_engine(tmp_path, "absent"), arguments=(str(tmp_path / "nowhere"),))
    plan = dataclasses.replace(PLAN, turn_seconds=3.0)
    results, _ = run(tmp_path, dying, absent, hanging, fake_engine(tmp_path, "sound"), plan=plan)
    assert {key[0::2]: len(turns) for key, turns in results.turns.items()} == {
        ("dying", 1): 1,
        ("hanging", 1): 3,
        ("hanging", 8): 1,
        ("sound", 1): 3,
        ("sound", 8): 3,
    }
    reasons = {failure.engine: failure.reason for failure in results.failures}
    assert list(reasons) == ["absent f32", "dying f32", "hanging f32"]
    assert reasons["absent f32"].startswith("could not be started")
    assert reasons["dying f32"].startswith("ended with status 9")
    assert reasons["hanging f32"].startswith("gave no answer within 3 s")


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """Compare with a tiny model of our own, a made-up machine, and one peer in the place of torch."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(one_layer_configuration()), encoding="utf-8")
    monkeypatch.setattr(side_by_side, "own_commands", functools.partial(own_commands, config=str(config)))
    machine = dataclasses.replace(fake_engine(tmp_path, "machine"), arguments=(sys.executable, "-c", RATES))
    monkeypatch.setattr(side_by_side, "machine_command", lambda place: machine)
    fake = fake_engine(tmp_path, "torch")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)

    def compare_with(arguments=fake.arguments[2:], **changes):
        peer = Peer("torch", (), fake.arguments[1], PEERS["torch"].numerics, lambda *_: arguments)
        monkeypatch.setattr(side_by_side, "PEERS", MappingProxyType({"torch": peer}))
        plan = dataclasses.replace(
            PLAN, peers=("torch",), numerics=("f32",), repeats=1, maximum_load=1e9, environments={"torch": tmp_path}
        )
        plan = dataclasses.replace(plan, **changes)
        notes = []
        result = compare(
            plan, tmp_path / "work", environment=ENVIRONMENT, own_settings={"B": "1"}, progress=notes.append
        )
        return result, notes

    return compare_with


def test_this_engine_is_compared_with_a_peer(compared):
    result, notes = compared(batches=(8,), repeats=2)
    assert result.failures == ()
    assert [(row.engine, row.numerics, row.batch, row.turns) for row in result.rows] == [
        (OWN_NAME, "f32", 8, 2),
        ("torch", "f32", 8, 2),
        ("torch", "bf16", 8, 2),
    ]
    ours, theirs, _ = result.rows
    assert ours.prefill_best > ours.prefill_median > 0
    assert ours.decode_best > ours.decode_median > 0
    assert (theirs.prefill_best, theirs.decode_best) == (8 * 16 / 0.5, 8 * 4 / 2.0)
    assert [ratio.what for ratio in result.ratios] == [
        "prefill, batch 8, f32",
        "decode, batch 8",
    ]
    assert result.ratios[0].best == pytest.approx(ours.prefill_best / 256)
    assert [(one.numerics, one.batch) for one in result.fractions] == [("f32", 8)]
    assert result.machine is not None
    assert result.machine.read == 1e10
    assert {"fake", "deepinfer-jax", "jax", "jaxlib"} == set(result.versions)
    model = Model.describe(ModelConfig.from_dict(one_layer_configuration()))
    assert result.parameters == {"deepinfer-jax f32": count(model), "torch f32": 7, "torch bf16": 7}
    assert json.loads(json.dumps(dataclasses.asdict(result)))["rows"][1]["engine"] == "torch"
    assert len([note for note in notes if "tokens/s" in note]) == 6


def test_a_comparison_survives_a_peer_that_does_not_start(compared):
    result, _ = compared(arguments=(), numerics=(), batches=(8,))
    assert (result.rows, result.ratios, result.fractions) == ((), (), ())
    assert [failure.engine for failure in result.failures] == ["torch f32", "torch bf16"]
    assert isinstance(result.failures[0], Failure)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"peers": ("vllm",)}, "'peer' is 'vllm'; accepted: one of torch, mlx, fastllm"),
        ({"numerics": ("f64",)}, "'numerics' is 'f64'"),
        ({"environments": {"jax": Path()}}, "'environment' is 'jax'"),
        ({"repeats": 0}, "'repeats' is 0; accepted: 1 or more"),
        ({"batches": (8, 0)}, "'batch' is 0; accepted: 1 or more"),
        ({"batches": ()}, "'batches' is (); accepted: one or more"),
        ({"prompt": 4000, "steps": 97}, "'prompt + steps' is 4097; accepted: at most max_position_embeddings 4096"),
        ({"maximum_load": -1.0}, "accepted: at most -1 (wait until nothing else runs"),
    ],
)
def test_a_plan_that_cannot_be_measured_is_refused(changes, sentence, tmp_path):
    with pytest.raises(InputError) as refused:
        compare(dataclasses.replace(PLAN, **changes), tmp_path / "work", environment={}, own_settings={})
    assert sentence in str(refused.value)
    assert not (tmp_path / "work").exists()


def test_the_default_plan_is_acceptable():
    Plan().check(ModelConfig.preset("peer-50m"))
