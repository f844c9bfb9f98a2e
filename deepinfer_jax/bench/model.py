"""Speed of the model itself: prefill of a batch of prompts, then decode steps.

Each repeat takes fresh random prompts. While decoding, sampled tokens go straight into the next step and are read
one step late, so that the host prepares a step while the device runs the one before it. Best and median of the repeats
are reported; on a shared machine only ratios of best figures mean much.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.state import State, initial_state
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.params import Parameter, backend_form, count, initialise
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.runtime.batch import Batch, Chunk, StepShape, pack
from deepinfer_jax.runtime.step import advance_and_sample

TILE_ROWS = 128


@dataclasses.dataclass(frozen=True)
class ModelFigures:
    """What one configuration did. Rates are tokens per second over the whole batch; a step's time is a repeat's mean.

    ``load_average`` is the machine's one-minute load when the run ended: above 1 something else was running too.
    """

    numerics: str
    batch: int
    prompt: int
    steps: int
    parameters: int
    prefill_tokens_per_second: float
    prefill_tokens_per_second_median: float
    decode_tokens_per_second: float
    decode_tokens_per_second_median: float
    decode_step_ms: float
    decode_step_ms_median: float
    compile_seconds: float
    peak_memory_bytes: int
    load_average: float


@dataclasses.dataclass(frozen=True)
class Workload:
    """``batch`` prompts of ``prompt`` tokens, then ``steps`` decode steps, ``repeats`` times."""

    batch: int = 1
    prompt: int = 512
    steps: int = 64
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("batch", "prompt", "steps", "repeats"):
            if getattr(self, field) < 1:
                raise InputError(field, getattr(self, field), "1 or more")

    def check(self, config: ModelConfig) -> None:
        """Check that a model has positions enough.

        Raises:
          InputError: prompt and steps do not fit.
        """
        if self.prompt + self.steps > config.max_position_embeddings:
            accepted = f"at most max_position_embeddings {config.max_position_embeddings}"
            raise InputError("prompt + steps", self.prompt + self.steps, accepted)


def measure_model(
    config: ModelConfig,
    numerics: Numerics,
    work: Workload,
    progress: Callable[[str], None] = lambda line: None,
    params: Model | None = None,
) -> ModelFigures:
    """Measure prefill and decode of a model.

    Args:
      config, numerics: of the model.
      work: what is measured.
      progress: told what is done.
      params: its parameters, in the form that runs fastest here; None draws random ones.

    Raises:
      InputError: prompt and steps do not fit the model's positions.
    """
    work.check(config)
    described = Model.describe(config)
    if params is None:
        progress(f"drawing {count(described):,} random parameters")
        params = draw_weights(config, numerics, work.seed)
    run = ModelRun(config, numerics, work, params)
    progress("compiling")
    begin = time.perf_counter()
    run.repeat(np.random.default_rng(work.seed), steps=1)
    compile_seconds = time.perf_counter() - begin
    prefills: list[float] = []
    decodes: list[float] = []
    for repeat in range(work.repeats):
        progress(f"repeat {repeat + 1} of {work.repeats}")
        prefill, decode = run.repeat(np.random.default_rng(work.seed + 1 + repeat), work.steps)
        prefills.append(prefill)
        decodes.append(decode / work.steps)
    rows = work.batch * work.prompt
    return ModelFigures(
        numerics=numerics.name,
        batch=work.batch,
        prompt=work.prompt,
        steps=work.steps,
        parameters=count(described),
        prefill_tokens_per_second=rows / min(prefills),
        prefill_tokens_per_second_median=rows / statistics.median(prefills),
        decode_tokens_per_second=work.batch / min(decodes),
        decode_tokens_per_second_median=work.batch / statistics.median(decodes),
        decode_step_ms=1e3 * min(decodes),
        decode_step_ms_median=1e3 * statistics.median(decodes),
        compile_seconds=compile_seconds,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        load_average=os.getloadavg()[0],
    )


def draw_weights(config: ModelConfig, numerics: Numerics, seed: int = 0) -> Model:
    """Random weights in the form that runs fastest here."""
    described = Model.describe(config)
    return jax.tree.map(
        backend_form,
        described,
        initialise(described, jax.random.key(seed), numerics),
        is_leaf=lambda item: isinstance(item, Parameter),
    )


class ModelRun:
    """One workload over one set of weights; compiled steps are shared by its repeats."""

    def __init__(self, config: ModelConfig, numerics: Numerics, work: Workload, params: Model) -> None:
        self._config, self._numerics, self._work, self._params = config, numerics, work, params
        self._layout = PageLayout.of(config)
        self._blocks = self._layout.blocks_for(work.prompt + work.steps)
        self._tables = np.arange(work.batch * self._blocks, dtype=np.int32).reshape(work.batch, self._blocks)
        self._temperatures = np.zeros(work.batch, np.float32)
        self._seeds = np.zeros((work.batch, 2), np.uint32)
        tiles = -(-work.prompt // TILE_ROWS)
        self._prefill = StepShape(0, work.batch * tiles, min(TILE_ROWS, work.prompt))
        self._decode = StepShape(work.batch)

    def repeat(self, random: np.random.Generator, steps: int) -> tuple[float, float]:
        """Seconds of one prefill and of the decode steps together."""
        work, config = self._work, self._config
        state = initial_state(config, self._numerics, slots=work.batch, blocks=self._tables.size, layout=self._layout)
        jax.block_until_ready(state)
        prompts = random.integers(0, config.vocab_size, (work.batch, work.prompt)).tolist()
        begin = time.perf_counter()
        batch, last = _packed([Chunk(slot, 0, row) for slot, row in enumerate(prompts)], self._prefill)
        state, tokens = self._step(state, batch, last)
        np.asarray(tokens)
        prefilled = time.perf_counter()
        for position in range(work.prompt, work.prompt + steps):
            batch, last = _packed([Chunk(slot, position, [0]) for slot in range(work.batch)], self._decode)
            state, following = self._step(state, dataclasses.replace(batch, tokens=tokens), last)
            np.asarray(tokens)
            tokens = following
        np.asarray(tokens)
        return prefilled - begin, time.perf_counter() - prefilled

    def _step(self, state: State, batch: Batch, last: np.ndarray) -> tuple[State, Array]:
        return advance_and_sample(
            self._params,
            state,
            batch,
            self._tables,
            last,
            self._temperatures,
            self._seeds,
            config=self._config,
            numerics=self._numerics,
        )


def _packed(chunks: list[Chunk], shape: StepShape) -> tuple[Batch, np.ndarray]:
    """The packed step, and the row of every chunk's last token."""
    batch, starts, _ = pack(chunks, shape)
    return batch, np.asarray(
        [start + len(chunk.tokens) - 1 for start, chunk in zip(starts, chunks, strict=True)], np.int32
    )
