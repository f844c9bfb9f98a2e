"""The DeepSeek-V4.1 text model of mlx-lm on MLX's CPU back end, random weights.

Usage: ``run_mlx.py CONFIG DTYPE``, with a ``config.json`` of V4.1 and an MLX dtype name. On a CPU its expert layers
take float32 only.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

from line_protocol import claim_output, serve

ANSWERS = claim_output()

import mlx.core as mx  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models import deepseek_v41  # noqa: E402

WARM_PROMPT = 64


def main() -> None:
    """Build the model and serve turns."""
    config, dtype = sys.argv[1:]
    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    arguments = deepseek_v41.ModelArgs.from_dict(json.loads(Path(config).read_text(encoding="utf-8")))
    model = deepseek_v41.Model(arguments)
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    model.eval()

    def turn(batch: int, prompt: int, steps: int, seed: int) -> dict[str, float]:
        ids = mx.random.randint(2, arguments.vocab_size, (batch, prompt), key=mx.random.key(seed))
        mx.eval(ids)
        cache = model.make_cache()
        begin = time.perf_counter()
        token = model(ids, cache=cache)[:, -1:].argmax(-1)
        mx.eval(token)
        prefilled = time.perf_counter()
        for _ in range(steps):
            token = model(token, cache=cache)[:, -1:].argmax(-1)
            mx.eval(token)
        end = time.perf_counter()
        return {
            "prefill_seconds": prefilled - begin,
            "decode_seconds": end - prefilled,
            "decode_tokens": batch * steps,
        }

    facts = {
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
        "parameters": sum(weight.size for _, weight in tree_flatten(model.parameters())),
    }
    serve(ANSWERS, facts, turn, WARM_PROMPT)


if __name__ == "__main__":
    main()
