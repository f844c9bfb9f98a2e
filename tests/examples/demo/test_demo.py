"""The demo as a whole, and what it prints of a receipt."""

import subprocess
import sys

import pytest

from deepinfer_jax.request import Receipt
from examples.demo.__main__ import CHAT, CONFIGURATION, milliseconds, what_went_where
from serving.events import ServedReceipt, Timing
from tests.engines import ENVIRONMENT, REPOSITORY


def test_a_receipt_says_what_went_where():
    engine = Receipt(5, 16, 0, 30, (), 62, 0, 0, "f" * 64)
    timing = Timing(prefill=0.0125, transfer=0.01, exposed_transfer=0.001, decode=0.5, total=0.75)
    receipt = ServedReceipt(engine, "d", "p", 27314, 0, "shm", 0, timing)
    assert what_went_where(receipt) == [
        "prompt     p: 16 tokens found, 12.5 ms",
        "hand-over  27,314 bytes by shm, 10.0 ms, 1.0 ms of it after the prompt was computed",
        "answer     d: 500.0 ms from the first token to the last",
        "total      750.0 ms, 62 rows computed",
    ]


@pytest.mark.parametrize(("seconds", "shown"), [(None, "not measured"), (0.25, "250.0 ms")])
def test_times_are_shown_in_milliseconds(seconds, shown):
    assert milliseconds(seconds) == shown


def test_what_the_demo_reads_is_there():
    assert CHAT.is_file()
    assert CONFIGURATION.is_file()


def test_the_demo_answers_through_three_processes_and_ends_them():
    command = [sys.executable, "-m", "examples.demo"]
    environment = ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(" by shm, ") == 3
    assert "16 tokens found" in ended.stdout
    assert ended.stdout.count("has ended with status 0") == 3
