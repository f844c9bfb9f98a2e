"""``DeepseekV4ForCausalLM`` of transformers on torch's CPU back end, random weights.

The nearest torch model to V4.1 is V4: same widths, other compression. Usage: ``run_torch.py CONFIG DTYPE THREADS``,
with a ``config.json`` of V4 and a torch dtype name.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from line_protocol import claim_output, serve

ANSWERS = claim_output()

import torch  # noqa: E402
import transformers  # noqa: E402

# Fewer prompt tokens would not reach every code path: the longest compression takes 128.
WARM_PROMPT = 160


def main() -> None:
    """Build the model and serve turns."""
    config, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    raw = json.loads(Path(config).read_text(encoding="utf-8"))
    del raw["model_type"]
    described = transformers.DeepseekV4Config(**raw)
    model = transformers.DeepseekV4ForCausalLM(described).to(getattr(torch, dtype)).eval()

    def turn(batch: int, prompt: int, steps: int, seed: int) -> dict[str, float]:
        random = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, described.vocab_size, (batch, prompt), generator=random)
        begin = time.perf_counter()
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1:].argmax(-1)
        prefilled = time.perf_counter()
        for _ in range(steps):
            output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True, logits_to_keep=1)
            token = output.logits[:, -1:].argmax(-1)
        end = time.perf_counter()
        return {
            "prefill_seconds": prefilled - begin,
            "decode_seconds": end - prefilled,
            "decode_tokens": batch * steps,
        }

    facts = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }
    with torch.inference_mode():
        serve(ANSWERS, facts, turn, WARM_PROMPT)


if __name__ == "__main__":
    main()
