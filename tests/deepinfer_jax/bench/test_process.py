"""An engine's process: its turns, that it stands still between them, and every way in which it can fail."""

import dataclasses
import os
import signal
import sys
import time

import pytest

from deepinfer_jax.bench.process import EngineError, EngineProcess, Turn, run_to_end
from tests.engines import ENVIRONMENT, fake_engine, journal

# Burns a processor from the first turn on, and tells its processor time at the beginning and the end of each turn.
SPINNING = """
    import threading
    def spin():
        while True:
            pass
    begin = time.process_time()
    if seed == 1:
        threading.Thread(target=spin, daemon=True).start()
    time.sleep(0.2)
    return {"prefill_seconds": begin, "decode_seconds": time.process_time(), "decode_tokens": 1}
"""


@pytest.fixture
def started(tmp_path):
    """Start a fake engine; every process ends with the test."""
    processes = []

    def start(command, seconds=30.0):
        processes.append(EngineProcess(command, tmp_path / "log", seconds))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def script(tmp_path, text):
    """An engine that is this script."""
    command = fake_engine(tmp_path, "script")
    file = tmp_path / "script.py"
    file.write_text(text, encoding="utf-8")
    return dataclasses.replace(command, arguments=(sys.executable, str(file)))


def test_an_engine_says_what_it_is_and_answers_turns(tmp_path, started):
    process = started(fake_engine(tmp_path, "fake"))
    assert process.facts == {"versions": {"fake": "1.0"}, "parameters": 7}
    turn = process.turn(2, 16, 5, seed=9, seconds=30.0)
    assert (turn.prefill_seconds, turn.decode_seconds, turn.decode_tokens) == (0.5, 2.0, 10)
    assert 0 < turn.cpu_seconds < 1
    # What a library prints is no answer.
    assert "a library says hello" in (tmp_path / "log").read_text(encoding="utf-8")


def test_the_first_turn_of_a_workload_is_preceded_by_a_shorter_one_that_is_not_reported(tmp_path, started):
    process = started(fake_engine(tmp_path, "fake"))
    for batch, seed in ((1, 1), (1, 2), (8, 3)):
        process.turn(batch, 16, 9, seed, seconds=30.0)
    turns = [[int(number) for number in line[1:]] for line in journal(tmp_path)]
    assert [turn[:3] for turn in turns] == [[1, 3, 4], [1, 16, 9], [1, 16, 9], [8, 3, 4], [8, 16, 9]]
    seeds = [turn[3] for turn in turns]
    assert seeds[1:3] + seeds[4:] == [1, 2, 3]
    assert len(set(seeds)) == 5


def test_an_engine_stands_still_between_turns(tmp_path, started):
    process = started(fake_engine(tmp_path, "fake", SPINNING.strip()))
    first = process.turn(1, 3, 1, seed=1, seconds=30.0)
    time.sleep(0.5)
    second = process.turn(1, 3, 1, seed=2, seconds=30.0)
    assert second.prefill_seconds - first.decode_seconds < 0.25
    # While a turn runs, the thread does too.
    assert second.decode_seconds - second.prefill_seconds > 0.05


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system gives processes no processors to choose")
def test_an_engine_has_the_processors_it_may_use(tmp_path, started):
    command = fake_engine(
        tmp_path,
        "fake",
        "return {'prefill_seconds': 1, 'decode_seconds': 1, 'decode_tokens': len(os.sched_getaffinity(0))}",
    )
    process = started(dataclasses.replace(command, processors=1))
    assert process.turn(1, 1, 1, 0, seconds=30.0).decode_tokens == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import nowhere_to_be_found", "ended with status 1: ModuleNotFoundError: No module named"),
        ("import os; os._exit(0)", "ended with status 0 (see "),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with status -11"),
        ("print('Model loaded')", "answered 'Model loaded', expected a JSON object"),
        ("print([1])", "answered '[1]', expected a JSON object"),
        ("import time; print('{', end='', flush=True); time.sleep(60)", "gave no answer within 1 s"),
        ("import os, time; os.close(1); os.close(2); time.sleep(60)", "closed its output without ending"),
    ],
)
def test_an_engine_that_does_not_get_ready(text, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr("deepinfer_jax.bench.process.END_SECONDS", 0.2)
    with pytest.raises(EngineError) as failed:
        EngineProcess(script(tmp_path, text), tmp_path / "log", 1.0 if "sleep" in text else 30.0)
    assert sentence in str(failed.value)


@pytest.mark.parametrize(
    ("turn", "sentence"),
    [
        ("print('out of memory', flush=True); os._exit(3)", "ended with status 3: out of memory (see "),
        ("raise ValueError('no such width')", "ended with status 1: ValueError: no such width"),
        ("print('thinking', flush=True); time.sleep(60)", "gave no answer within 1 s: thinking (see "),
        ("return {}", "answered prefill_seconds None, expected a number above 0"),
        ("return {'prefill_seconds': 0.0}", "answered prefill_seconds 0.0"),
        ("return {'prefill_seconds': 1, 'decode_seconds': True}", "answered decode_seconds True"),
        (
            "return {'prefill_seconds': 1, 'decode_seconds': 1, 'decode_tokens': float('nan')}",
            "answered decode_tokens nan",
        ),
        ("os.write(answers.fileno(), b'\\xff\\n')", "answered '\ufffd', expected a JSON object"),
    ],
)
def test_an_engine_that_fails_in_a_turn(turn, sentence, tmp_path, started):
    process = started(fake_engine(tmp_path, "fake", turn))
    with pytest.raises(EngineError) as failed:
        process.turn(1, 1, 1, 0, seconds=1.0 if "sleep" in turn else 30.0)
    assert sentence in str(failed.value)
    with pytest.raises(ProcessLookupError):
        os.kill(process.identifier, 0)


def test_an_engine_that_ended_between_turns(tmp_path, started):
    process = started(fake_engine(tmp_path, "fake"))
    process.turn(1, 1, 1, 0, seconds=30.0)
    os.kill(process.identifier, signal.SIGKILL)
    with pytest.raises(EngineError, match="ended with status -9: a library says hello"):
        process.turn(1, 1, 1, 0, seconds=30.0)


def test_a_program_that_is_not_there(tmp_path):
    command = dataclasses.replace(fake_engine(tmp_path, "fake"), arguments=(str(tmp_path / "absent"),))
    with pytest.raises(EngineError, match=r"could not be started: .*absent"):
        EngineProcess(command, tmp_path / "log", 1.0)
    with pytest.raises(EngineError, match=r"could not be started: .*absent"):
        run_to_end([str(tmp_path / "absent")], ENVIRONMENT, tmp_path / "log")


def test_a_preparation_that_fails_is_quoted(tmp_path):
    text = "print('Collecting x'); print(); raise SystemExit('ERROR: no x')"
    with pytest.raises(EngineError, match=r"ended with status 1: ERROR: no x \(see "):
        run_to_end([sys.executable, "-u", "-c", text], ENVIRONMENT, tmp_path / "logs" / "x.log")


def test_a_turn_is_made_of_four_positive_numbers():
    answer = {"prefill_seconds": 1, "decode_seconds": 2.5, "decode_tokens": 64, "cpu_seconds": 0.1, "more": "words"}
    assert Turn.of(answer) == Turn(1.0, 2.5, 64.0, 0.1)
    with pytest.raises(EngineError, match=r"answered cpu_seconds '0.1'"):
        Turn.of(answer | {"cpu_seconds": "0.1"})
