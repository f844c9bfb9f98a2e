"""A program: the same requests through an engine on one CPU device and through one over eight.

``python -m tests.deepinfer_jax.parallel.spread_engine_run RESULT``; a process of its own, because the number of devices
is fixed when JAX starts. RESULT gets tokens and log-probabilities of both, and what the larger engine held, as JSON.
"""

# ruff: noqa: E402  # what is imported after the settings must see them

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
from jaxtyping import install_import_hook

DEVICES = 8

if __name__ == "__main__":
    # Importing it sets strict dtypes and ranks and the compilation cache.
    import tests.conftest  # noqa: F401

    jax.config.update("jax_num_cpu_devices", DEVICES)
    install_import_hook(["deepinfer_jax", "pallas_kernels"], "beartype.beartype")

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine_build import build_engine
from deepinfer_jax.model.params import initialise
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import F32
from deepinfer_jax.request import Request, SamplingParams
from tests.engines import tiny_drafting_configuration
from tests.running_engines import SETTINGS, run


def requests() -> list[Request]:
    """More than one engine has slots for, some with branches, some alike."""
    random = np.random.default_rng(5)
    prompts = [tuple(random.integers(3, 95, int(random.integers(1, 60))).tolist()) for _ in range(20)]
    made = [
        SamplingParams(
            max_tokens=12,
            temperature=float(number % 2),
            seed=number,
            ignore_eos=True,
            logprobs=0,
            n=1 + (number % 5 == 0),
        )
        for number in range(len(prompts))
    ]
    return [Request(prompt, params) for prompt, params in zip(prompts, made, strict=True)]


def main(result: str) -> None:
    raw = tiny_drafting_configuration()
    raw["text_config"]["n_routed_experts"] = DEVICES
    config = ModelConfig.from_dict(raw)
    params = initialise(Model.describe(config), jax.random.key(3), F32)
    settings = dataclasses.replace(SETTINGS, deterministic=False, decode_rows=(3,))
    scoring = importlib.import_module("pallas_kernels.paged_index_selection")
    found = {}
    for name, shards, devices in (("one", 1, None), ("eight", DEVICES, jax.devices())):
        # Each of the eight scores its own requests in chunks, as long as these take; the single one in one piece.
        scoring.CHUNK_ENTRIES = 1024 if devices is None else 32
        engine = build_engine(params, config, F32, dataclasses.replace(settings, n_shards=shards), devices=devices)
        answers = run(engine, requests())
        found[name] = {
            "tokens": [answer.tokens for answer in answers],
            "logprobs": [[item.logprob for item in answer.logprobs] for answer in answers],
            "steps": engine.metrics.value("steps_total"),
            "recompiles": engine.metrics.value("recompiles_total"),
            "used": [engine.books.used_blocks, engine.books.used_slots],
        }
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
