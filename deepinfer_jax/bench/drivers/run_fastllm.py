"""The CPU library of fastllm, on a checkpoint in the released layout.

Usage: ``run_fastllm.py DIRECTORY THREADS MAX_BATCH``. The library writes a file of its own into the directory, so give
it one that is nobody else's. One thread is right for two cores: beside its workers it keeps a scheduler spinning.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

from line_protocol import claim_output, serve

ANSWERS = claim_output()

import numpy as np  # noqa: E402
from ftllm import llm  # noqa: E402

LIBRARY = llm.fastllm_lib
POLL_SECONDS = 0.001
WARM_PROMPT = 64
# The first ids of a vocabulary are special ones.
FIRST_PLAIN_TOKEN = 4


class Engine:
    """A loaded checkpoint."""

    def __init__(self, directory: Path, threads: int, batch: int) -> None:
        llm.set_cpu_threads(threads)
        llm.set_device_map("cpu")
        llm.set_device_map("cpu", True)
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self._vocabulary = config.get("text_config", config)["vocab_size"]
        self._model = llm.model(str(directory), dtype="auto", moe_dtype="", kv_cache_dtype="auto")
        self._model.set_max_batch(batch)

    def turn(self, batch: int, prompt: int, steps: int, seed: int) -> dict[str, float]:
        """All prompts at once; the library decides how it mixes their prefill and decode.

        Decode counts from the moment every prompt has its first token, so early prompts may have fewer steps left.
        """
        random = np.random.default_rng(seed)
        prompts = [random.integers(FIRST_PLAIN_TOKEN, self._vocabulary, prompt).tolist() for _ in range(batch)]
        begin = time.perf_counter()
        running = {self._launch(ids, steps + 1): row for row, ids in enumerate(prompts)}
        arrivals = self._arrivals(running, batch)
        first = max(times[0] for times in arrivals)
        last = max(times[-1] for times in arrivals)
        return {
            "prefill_seconds": first - begin,
            "decode_seconds": last - first,
            "decode_tokens": sum(moment > first for times in arrivals for moment in times),
        }

    def first_token(self, prompt: list[int]) -> int:
        """The greedy token behind a prompt."""
        handle = self._launch(prompt, 1)
        tokens: list[int] = []
        while not tokens or tokens[-1] >= 0:
            while not LIBRARY.can_fetch_response_llm_model(self._model.model, handle):
                time.sleep(POLL_SECONDS)
            tokens.append(LIBRARY.fetch_response_llm_model(self._model.model, handle))
        return tokens[0]

    def _arrivals(self, running: dict[int, int], batch: int) -> list[list[float]]:
        """When each prompt's tokens arrived, by row."""
        arrivals: list[list[float]] = [[] for _ in range(batch)]
        while running:
            moved = False
            for handle, row in list(running.items()):
                if LIBRARY.can_fetch_response_llm_model(self._model.model, handle):
                    moved = True
                    if LIBRARY.fetch_response_llm_model(self._model.model, handle) < 0:
                        del running[handle]
                    else:
                        arrivals[row].append(time.perf_counter())
            if not moved:
                time.sleep(POLL_SECONDS)
        return arrivals

    def _launch(self, ids: list[int], tokens: int) -> int:
        """Ask for exactly ``tokens`` greedy tokens; an end-of-text token does not stop them."""
        stops, stop_tokens = self._model.stop_token_ctypes(None)
        return LIBRARY.launch_response_llm_model(
            self._model.model,
            len(ids),
            (ctypes.c_int * len(ids))(*ids),
            tokens,  # at most
            tokens,  # at least
            False,  # greedy
            1.0,  # top-p
            1,  # top-k
            1.0,  # temperature
            1.0,  # repetition penalty
            False,  # tokens, not logits
            stops,
            stop_tokens,
        )


def main() -> None:
    """Load the checkpoint and serve turns."""
    directory, threads, batch = sys.argv[1:]
    engine = Engine(Path(directory), int(threads), int(batch))
    serve(ANSWERS, {"versions": {"ftllm": version("ftllm")}}, engine.turn, WARM_PROMPT)
    # The library's threads do not end on their own.
    os._exit(0)


if __name__ == "__main__":
    main()
