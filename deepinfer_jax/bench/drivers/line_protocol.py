"""The protocol between a comparison and an engine: one JSON object a line, on standard input and output.

An engine first says what it is. Then each line it reads asks for one *turn*, and it answers with the turn's times:

====================  =========================================================
asked                 ``batch`` prompts of ``prompt`` random tokens, ``steps`` greedy tokens after the first, ``seed``
``prefill_seconds``   until the first token of every prompt was read
``decode_seconds``    for the ``decode_tokens`` after that, over the whole batch
``cpu_seconds``       of processor time in the turn, over all threads
====================  =========================================================

The first turn of each workload is preceded by one that warms up and is not reported. End of input ends the engine.
This file runs in other engines' environments: standard library only, and any Python from 3.10.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

WARM_STEPS = 4
# Added to a turn's seed for its warm-up: no prompt may come twice, since an engine may remember it.
WARM_SEED = 1 << 20

Turn = Callable[[int, int, int, int], Mapping[str, float]]


def claim_output() -> TextIO:
    """Keep standard output for answers; what anything else prints from now on goes to standard error."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def say(answers: TextIO, content: Mapping[str, Any]) -> None:
    """Write one line."""
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def serve(answers: TextIO, facts: Mapping[str, Any], turn: Turn, warm_prompt: int | None = None) -> None:
    """Say what the engine is, then answer requests until the input ends.

    Args:
      answers: what :func:`claim_output` returned, before any library could print.
      facts: ``versions`` (name to version) and ``parameters`` (their number) of the engine.
      turn: runs one turn, given batch, prompt, steps and seed; returns the three times but the last.
      warm_prompt: prompt tokens that suffice to warm up; None where a program is compiled for the workload itself.
    """
    say(answers, facts)
    warm = set()
    for line in sys.stdin:
        request = json.loads(line)
        workload = (request["batch"], request["prompt"], request["steps"])
        if workload not in warm:
            warm.add(workload)
            _warm_up(turn, *workload, request["seed"] + WARM_SEED, warm_prompt)
        begin = time.process_time()
        times = turn(*workload, request["seed"])
        say(answers, {**times, "cpu_seconds": time.process_time() - begin})


def _warm_up(turn: Turn, batch: int, prompt: int, steps: int, seed: int, warm_prompt: int | None) -> None:
    if warm_prompt is None:
        turn(batch, prompt, steps, seed)
    else:
        turn(batch, min(prompt, warm_prompt), min(steps, WARM_STEPS), seed)
