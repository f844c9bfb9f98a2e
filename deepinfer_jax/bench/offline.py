"""Speed of the engine: many requests at once in one process, and prompts behind a prefix hit.

Host time is the processor time of the engine's thread, without its waits for the device. What the device itself does on
a CPU runs in other threads.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine import Engine
from deepinfer_jax.engine_build import build_engine
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.replay import Replay
from deepinfer_jax.request import Request, SamplingParams
from deepinfer_jax.settings import EngineSettings


@dataclasses.dataclass(frozen=True)
class OfflineWorkload:
    """``concurrency`` requests at a time, each with ``prompt`` tokens and ``steps`` new ones; best of ``repeats``.

    ``deterministic``: whether a request's tokens are the same whatever else runs. ``trace``: a directory for a profile
    of ``trace_steps`` decode steps of the highest concurrency, in a run of its own that is not measured.
    """

    concurrency: tuple[int, ...] = (1, 8, 32)
    prompt: int = 512
    steps: int = 64
    repeats: int = 3
    seed: int = 0
    deterministic: bool = False
    trace: Path | None = None
    trace_steps: int = 8

    def __post_init__(self) -> None:
        for name in ("prompt", "steps", "repeats", "trace_steps"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "1 or more")
        if not self.concurrency or min(self.concurrency) < 1:
            raise InputError("concurrency", self.concurrency, "numbers of 1 or more")


@dataclasses.dataclass(frozen=True)
class OfflineRun:
    """One concurrency. ``tokens_per_second`` and ``step_ms`` are of the steps in which all requests decode."""

    concurrency: int
    tokens_per_second: float
    step_ms: float
    host_ms_per_step: float
    host_share: float
    time_to_first_token_ms: float
    recompiles: int


def measure_offline(
    params: Model,
    config: ModelConfig,
    numerics: Numerics,
    work: OfflineWorkload,
    progress: Callable[[str], None] = lambda line: None,
) -> list[OfflineRun]:
    """Measure decoding at several concurrencies with one engine."""
    ladder = tuple(sorted(set(work.concurrency)))
    tokens = work.prompt + work.steps
    settings = EngineSettings(
        slots=ladder[-1],
        blocks=ladder[-1] * -(-tokens // EngineSettings.block_tokens),
        max_context=tokens,
        decode_rows=ladder,
        prefill_tiles=(1, 4),
        window_checkpoints=0,
        deterministic=work.deterministic,
    )
    engine = build_engine(params, config, numerics, settings, progress=progress)
    random = np.random.default_rng(work.seed)
    runs = []
    for concurrency in work.concurrency:
        repeats = []
        for repeat in range(work.repeats):
            progress(f"concurrency {concurrency}, repeat {repeat + 1} of {work.repeats}")
            repeats.append(_decode(engine, config, work, concurrency, random))
        runs.append(max(repeats, key=lambda run: run.tokens_per_second))
    if work.trace is not None:
        progress(f"tracing {work.trace_steps} steps")
        _trace(engine, config, work, ladder[-1], random, work.trace)
    return runs


def _trace(
    engine: Engine,
    config: ModelConfig,
    work: OfflineWorkload,
    concurrency: int,
    random: np.random.Generator,
    directory: Path,
) -> None:
    """Steps in which every request decodes."""
    _submit(engine, config, work, concurrency, random)
    while engine.busy and len(engine.step()) < concurrency:
        pass
    engine.trace(directory, work.trace_steps)
    while engine.busy:
        engine.step()


def _submit(
    engine: Engine, config: ModelConfig, work: OfflineWorkload, concurrency: int, random: np.random.Generator
) -> None:
    params = SamplingParams(max_tokens=work.steps, temperature=0.0, ignore_eos=True)
    for _ in range(concurrency):
        prompt = random.integers(0, config.vocab_size, work.prompt)
        engine.submit(Request(tuple(prompt.tolist()), params, read_cache=False))


def _decode(
    engine: Engine, config: ModelConfig, work: OfflineWorkload, concurrency: int, random: np.random.Generator
) -> OfflineRun:
    recompiles = engine.metrics.value("recompiles_total")
    begin = time.perf_counter()
    _submit(engine, config, work, concurrency, random)
    first: float | None = None
    walls, hosts = [], []
    while engine.busy:
        wall, host = time.perf_counter(), time.thread_time()
        news = engine.step()
        if news and first is None:
            first = time.perf_counter() - begin
        # Steps in which every request got a token; the first and last ones wait for other steps.
        if len(news) == concurrency and not any(output.finish_reason for output in news):
            walls.append(time.perf_counter() - wall)
            hosts.append(time.thread_time() - host)
    assert first is not None
    if not walls:
        raise InputError("steps", work.steps, "enough for all requests to decode together")
    step, host = float(np.mean(walls[1:] or walls)), float(np.mean(hosts[1:] or hosts))
    return OfflineRun(
        concurrency=concurrency,
        tokens_per_second=concurrency / step,
        step_ms=1e3 * step,
        host_ms_per_step=1e3 * host,
        host_share=host / step,
        time_to_first_token_ms=1e3 * first,
        recompiles=int(engine.metrics.value("recompiles_total") - recompiles),
    )


@dataclasses.dataclass(frozen=True)
class PrefixRun:
    """A prompt cold and behind a hit. Rows are prompt rows run, without and with the padding of their tiles."""

    prompt: int
    hit: int
    cold_ms: float
    warm_ms: float
    ratio: float
    cold_rows: int
    warm_rows: int
    padded_ratio: float


def measure_prefix(
    params: Model,
    config: ModelConfig,
    numerics: Numerics,
    *,
    prompt: int = 4000,
    hit: int = 3840,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda line: None,
) -> PrefixRun:
    """Time to first token of a prompt, cold, and again when ``hit`` of its tokens are cached; bounded replay."""
    block = EngineSettings.block_tokens
    if hit % block or hit >= prompt:
        raise InputError("hit", hit, f"a multiple of {block} below the prompt's {prompt} tokens")
    context = -(-(prompt + 1) // block) * block
    settings = EngineSettings(
        slots=1,
        blocks=2 * context // block,
        max_context=min(context, config.max_position_embeddings),
        decode_rows=(1,),
        prefill_tiles=(1, 3),
        replay=Replay("bounded"),
        window_checkpoints=0,
    )
    engine = build_engine(params, config, numerics, settings, progress=progress)
    random = np.random.default_rng(0)
    cold, warm = [], []
    rows = (0, 0)
    for repeat in range(repeats):
        progress(f"repeat {repeat + 1} of {repeats}")
        tokens = tuple(random.integers(0, config.vocab_size, prompt).tolist())
        seconds, cold_rows = _first_token(engine, tokens)
        cold.append(seconds)
        # The same beginning, another end: just the hit's blocks are cached.
        tokens = (*tokens[:hit], *random.integers(0, config.vocab_size, prompt - hit).tolist())
        seconds, warm_rows = _first_token(engine, tokens)
        warm.append(seconds)
        rows = (cold_rows, warm_rows)
    tile = settings.rows_per_tile
    padded = [-(-count // tile) * tile for count in rows]
    return PrefixRun(
        prompt=prompt,
        hit=hit,
        cold_ms=1e3 * min(cold),
        warm_ms=1e3 * min(warm),
        ratio=min(cold) / min(warm),
        cold_rows=rows[0],
        warm_rows=rows[1],
        padded_ratio=padded[0] / padded[1],
    )


@dataclasses.dataclass(frozen=True)
class ReplayRun:
    """A cold prompt with all rows through the decoder layers, and with the last ``keep`` alone.

    ``layer_rows``: rows times layers that were run, without padding; useful work goes with it.
    """

    prompt: int
    keep: int
    off_ms: float
    compact_ms: float
    time_ratio: float
    off_layer_rows: int
    compact_layer_rows: int
    work_ratio: float


def measure_replay(
    params: Model,
    config: ModelConfig,
    numerics: Numerics,
    *,
    prompt: int = 2000,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda line: None,
) -> ReplayRun:
    """Time to first token of a cold prompt, decoder replay ``off`` and ``compact``."""
    config = dataclasses.replace(config, max_position_embeddings=max(config.max_position_embeddings, prompt + 1))
    block = EngineSettings.block_tokens
    seconds: dict[str, float] = {}
    work: dict[str, int] = {}
    engines: dict[str, Engine] = {}
    for decoder in ("off", "compact"):
        settings = EngineSettings(
            slots=1,
            blocks=2 * (prompt // block + 2),
            max_context=prompt + 1,
            decode_rows=(1,),
            prefill_tiles=(3,),
            replay=Replay("exact", decoder),
            window_checkpoints=0,
        )
        engines[decoder] = build_engine(params, config, numerics, settings, progress=progress)
    encoder, layers = config.encoder_layers, config.num_hidden_layers
    random = np.random.default_rng(0)
    for repeat in range(repeats):
        for decoder, engine in engines.items():
            progress(f"repeat {repeat + 1} of {repeats}, decoder replay {decoder}")
            kept = engine.metrics.value("decoder_rows_total")
            tokens = tuple(random.integers(0, config.vocab_size, prompt).tolist())
            took, rows = _first_token(engine, tokens)
            kept = int(engine.metrics.value("decoder_rows_total") - kept)
            seconds[decoder] = min(took, seconds.get(decoder, took))
            work[decoder] = encoder * rows + (layers - encoder) * kept
    return ReplayRun(
        prompt=prompt,
        keep=Replay.keep,
        off_ms=1e3 * seconds["off"],
        compact_ms=1e3 * seconds["compact"],
        time_ratio=seconds["off"] / seconds["compact"],
        off_layer_rows=work["off"],
        compact_layer_rows=work["compact"],
        work_ratio=work["off"] / work["compact"],
    )


def _first_token(engine: Engine, tokens: tuple[int, ...]) -> tuple[float, int]:
    before = engine.metrics.value("prefill_rows_total")
    begin = time.perf_counter()
    engine.generate([Request(tokens, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))])
    return time.perf_counter() - begin, int(engine.metrics.value("prefill_rows_total") - before)
