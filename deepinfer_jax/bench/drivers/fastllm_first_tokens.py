"""The greedy first token of the CPU library of fastllm behind each of some prompts.

Usage: ``fastllm_first_tokens.py DIRECTORY THREADS``, with a JSON array of arrays of token ids on standard input; the
answer is a JSON array of token ids.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from line_protocol import say
from run_fastllm import ANSWERS, Engine


def main() -> None:
    """Load the checkpoint and answer prompt after prompt."""
    directory, threads = sys.argv[1:]
    engine = Engine(Path(directory), int(threads), 1)
    say(ANSWERS, {"tokens": [engine.first_token(prompt) for prompt in json.load(sys.stdin)]})
    # The library's threads do not end on their own.
    os._exit(0)


if __name__ == "__main__":
    main()
