"""The trial of JAX's transfer engine: what it says where it passes, fails, hangs, crashes, or finds other bytes."""

import sys
import time
from pathlib import Path

import pytest

from serving.configuration import KvSection
from serving.transfer_probe import COMMAND, available, probe

JAX = KvSection(transports=("shm", "jax", "grpc"))


def script(text):
    return [sys.executable, "-c", text]


def changed(text):
    """The real trial, after a change in the process that sends."""
    return script(f"import serving.commands.transfer_trial as trial\n{text}\nraise SystemExit(trial.main([]))")


def test_the_real_trial_passes_or_says_why_not():
    reason = probe()
    if reason:
        pytest.skip(f"transport jax is not available: {reason}")
    assert available(JAX, "decode") == JAX


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (script("raise SystemExit('no such device')"), "its trial ended with status 1: no such device"),
        (script("raise SystemExit(3)"), "its trial ended with status 3: it said nothing"),
        (
            script("import os, sys; sys.stderr.write('F01 Check failed\\n*** stack:\\n  @ 0x1\\n'); os.abort()"),
            "its trial ended with signal SIGABRT: F01 Check failed",
        ),
        (["no-such-program"], "its trial cannot be started: "),
        (changed("trial.SEED = 21"), "its trial ended with status 1: 1 bytes arrived changed"),
        (
            changed("import serving.transfer_engine as t; t.TransferEngine.withdraw = lambda engine, number: None"),
            "its trial ended with status 1: what was withdrawn can be pulled",
        ),
        (changed("trial.HOST = '192.0.2.1'"), "its trial ended with status 1: JAX's transfer engine does"),
    ],
)
def test_what_goes_wrong_is_one_sentence(command, sentence, caplog):
    found = probe(command)
    assert found.startswith(sentence)
    assert "\n" not in found
    with caplog.at_level("WARNING", "serving.kv"):
        assert available(JAX, "prefill", command).transports == ("shm", "grpc")
    assert [record.getMessage() for record in caplog.records] == [f"transport jax is not available: {found}"]


def test_a_trial_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    path = tmp_path / "pid"
    child = f"import os, pathlib, time; pathlib.Path({str(path)!r}).write_text(str(os.getpid())); time.sleep(600)"
    command = script(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
    assert probe(command, 3.0) == "its trial was not done after 3 s"
    process = int(path.read_text())
    end = time.monotonic() + 30
    while Path("/proc", str(process)).exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path("/proc", str(process)).exists()


def test_nothing_is_tried_where_nothing_is_handed_over():
    assert available(JAX, "all", ["no-such-program"]) == JAX
    assert available(KvSection(), "decode", ["no-such-program"]) == KvSection()
    assert COMMAND[0] == sys.executable
