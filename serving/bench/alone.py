"""The engine alone: what servers are compared with, in this process and without any of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from deepinfer_jax.engine import Engine
from deepinfer_jax.errors import InputError
from deepinfer_jax.request import Request, SamplingParams
from serving.bench.turn import Turn
from serving.configuration import Configuration
from serving.loaded_engine import load_engine
from serving.proto.deepinfer.v1.inference_pb2 import ModelInfo


def load_alone(configuration: Configuration, progress: Callable[[str], None]) -> Engine:
    """The engine that workers of this configuration have."""
    return load_engine(configuration, "alone", progress)[0]


def answer_alone(engine: Engine, prompt: tuple[int, ...], params: SamplingParams) -> Turn:
    """One request, with nothing beside it and nothing of it cached."""
    begin = time.perf_counter()
    engine.submit(Request(prompt, params, read_cache=False))
    tokens: list[int] = []
    first = last = begin
    while engine.busy:
        for output in engine.step():
            if output.tokens:
                last = time.perf_counter()
                first = last if not tokens else first
                tokens += output.tokens
    return Turn(tuple(tokens), first - begin, last - begin)


def check_same(engine: Engine, info: ModelInfo) -> None:
    """Check that servers compute what the engine does.

    Raises:
      InputError: they serve another model.
    """
    own = engine.receiver.form.fingerprint.hex()
    if info.fingerprint != own:
        accepted = f"a cluster of fingerprint {own}, that of the model here"
        raise InputError("--address", info.fingerprint, accepted, "name its model by --model and --numerics")
