"""`make aot`: a reduced form of its CPU case, its checks, its limits and its refusals."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from deepinfer_jax.bench import aot
from deepinfer_jax.bench.abstract_step import Figures, count_collectives, count_copies
from deepinfer_jax.bench.targets import GIB, TARGETS, Target, target_named
from deepinfer_jax.errors import InputError

REPOSITORY = Path(__file__).resolve().parents[3]
ABSENT = Target("absent", "no such device", "tpu", 64, GIB, "v0:1x1", wheel="no-such-compiler")
GOOD = Figures(
    target="cpu",
    numerics="bf16",
    devices=64,
    requests=2048,
    context=131072,
    parameters=30 * GIB,
    state=20 * GIB,
    smallest_pool=4 * GIB,
    arguments=50 * GIB,
    aliased=20 * GIB,
    temporaries=GIB,
    outputs=21 * GIB,
    code=0,
    memory=80 * GIB,
    pool_copies=0,
    collectives={"all-gather": 3},
    lower_seconds=2.0,
    compile_seconds=100.0,
    processor_seconds=90.0,
    peak_memory=2 * GIB,
)


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    result = tmp_path_factory.mktemp("reduced") / "figures.json"
    command = [sys.executable, "-m", "tests.deepinfer_jax.bench.reduced_compile", "4", str(result)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return Figures(**json.loads(result.read_text()))


def test_reduced_form_passes_the_checks(reduced: Figures) -> None:
    """40 layers as stacked segments, f32, pools of a fifth of the memory: all updated in place, none copied."""
    assert aot.problems(reduced) == []
    assert reduced.aliased == reduced.state
    assert reduced.state > 0.2 * reduced.memory


def test_reduced_form_gathers_and_scatters(reduced: Figures) -> None:
    assert set(reduced.collectives) == {"all-gather", "reduce-scatter"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"temporaries": 4 * GIB}, "temporaries of 4.00 GiB, a pool has 4.00"),
        ({"aliased": 19 * GIB}, "1.00 GiB of the state are not updated in place"),
        ({"pool_copies": 2}, "2 copies of a pool"),
        ({"arguments": 79 * GIB}, "needs 81.00 GiB of 80.00"),
        ({"state": 15 * GIB, "aliased": 15 * GIB}, "caches fill less than 20% of the memory"),
        ({"compile_seconds": 200.0, "processor_seconds": 150.0}, "took 150 s, more than 120"),
        ({"peak_memory": 7 * GIB}, "took 7.00 GiB of host memory, more than 6"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_figure_is_found(change: dict[str, float], sentence: str) -> None:
    assert aot.problems(GOOD) == []
    assert aot.problems(dataclasses.replace(GOOD, **change)) == [sentence]


def test_a_wait_for_other_programs_is_not_compile_time() -> None:
    assert aot.problems(dataclasses.replace(GOOD, compile_seconds=300.0)) == []


def test_copies_and_collectives_are_counted_in_compiled_text() -> None:
    text = """
      %copy.1 = bf16[320,512]{1,0} copy(%param.1)
      %copy-start.2 = (bf16[320,512]{1,0}, bf16[320,512]{1,0}, u32[]) copy-start(%param.1)
      %copy.3 = bf16[32,512]{1,0} copy(%param.2)
      %all-gather.4 = bf16[64,512]{1,0} all-gather(%x), dimensions={0}
      %all-gather-start.5 = bf16[64,512]{1,0} all-gather-start(%x)
    """
    assert count_copies(text, (320, 512)) == 2
    assert count_collectives(text) == {"all-gather": 2}


def test_table_names_targets_and_problems() -> None:
    printed = aot.table([GOOD, dataclasses.replace(GOOD, target="h100", pool_copies=1)])
    assert "| CPU devices, 64 | bf16 | 30.00 | 20.00 (25%) | 1.00 | 52.00 of 80.00 | 100% |" in printed
    assert printed.splitlines()[3].startswith("| NVIDIA H100, 64 |")
    assert printed.splitlines()[3].endswith("| 1 copies of a pool |")


def test_a_missing_wheel_is_one_sentence_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "TARGETS", (ABSENT,))
    result = CliRunner().invoke(aot.main, [])
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: input 'target' is 'absent'; accepted: a target with its compiler, here no-such-compiler "
        "(run `make aot`, or install deepinfer-jax[aot] on Python 3.12 or newer)\n"
    )


def test_a_plugin_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.0.1")
    with pytest.raises(InputError, match=r"jax-cuda12-plugin .* not 0\.0\.1"):
        target_named("h100").check_wheel()


def test_targets_have_64_devices_and_their_names() -> None:
    assert [target.devices for target in TARGETS] == [64] * 3
    assert [target_named(target.name) for target in TARGETS] == list(TARGETS)
    with pytest.raises(InputError, match="v5p, h100, cpu"):
        target_named("v99")


def test_a_failed_compile_says_why() -> None:
    with pytest.raises(aot.CompileError, match="input 'target' is 'absent'"):
        aot.run_compile(ABSENT, "bf16")


@pytest.mark.parametrize(
    ("limit", "value", "sentence"), [("LONGEST_WAIT", 0.2, "without an end"), ("MEMORY", 1, "host memory")]
)
def test_a_process_beyond_its_limits_is_ended(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: float, sentence: str
) -> None:
    monkeypatch.setattr(aot, limit, value)
    with pytest.raises(aot.CompileError, match=sentence):
        aot.run_compile(target_named("cpu"), "bf16")


def test_measured_part_of_a_document_is_replaced() -> None:
    document = f"before\n{aot.BEGIN}\nold\n{aot.END}\nafter"
    assert aot.replace_measured(document, "new") == f"before\n{aot.BEGIN}\nnew\n{aot.END}\nafter"
    with pytest.raises(InputError, match="--write"):
        aot.replace_measured("nothing", "new")
