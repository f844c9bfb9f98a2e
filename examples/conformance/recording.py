"""What a model makes of the prompts of a kit: recorded for others to compare with, or computed for a kit of theirs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from deepinfer_jax.checkpoint.digest import weights_id
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine import Engine
from deepinfer_jax.engine_build import build_engine
from deepinfer_jax.errors import CheckpointError, InputError
from deepinfer_jax.request import Request, SamplingParams
from deepinfer_jax.settings import EngineSettings
from examples.conformance.comparison import CLEAR_GAP, DECISIVE_MARGIN_UNCLEAR
from examples.conformance.kit import CHAIN_TOKENS, Chain, Kit, taps_file, write_arrays, write_chains
from examples.conformance.passes import LayerInputs, TracedModel
from examples.conformance.prompts import PromptMaker
from examples.conformance.selections import Arrays, selection_gaps

# Prompts whose arrays are recorded; inputs of every layer are large, so that `released` has one prompt.
TRACED = {"f32": ("chat", "candidates", "long"), "released": ("candidates",)}
RECORDED_ROWS = 8
CODE_STARTS = range(0, 400, 8)
Progress = Callable[[str], None]


def record_kit(directory: Path, progress: Progress) -> Kit:
    """Everything a kit holds about a checkpoint; the same checkpoint gives the same numbers on the same machine.

    Raises:
      ConfigError, CheckpointError: the checkpoint cannot be read, or its tokenizer cannot encode chats.
      InputError: decoding and a pass over everything disagree about a clear token.
    """
    config = ModelConfig.from_directory(directory)
    maker = PromptMaker(directory, config)
    prompts = maker.all()
    longest = max(map(len, prompts.values())) + CHAIN_TOKENS
    progress("reading the model in f32")
    model = TracedModel.load(directory, "f32", longest)
    if maker.candidate_tokens:
        prompts["candidates"] = _clear_code(model, maker)
    chains, engine = {}, _engine(model, longest)
    for name, tokens in prompts.items():
        progress(f"continuing {name}, {len(tokens)} tokens")
        chains[name] = _chain(model, engine, tokens)
    exact = {}
    for name in _traced("f32", prompts):
        arrays = model.arrays(prompts[name])
        positions = _positions(arrays, config)
        progress(f"recording {len(positions)} rows of {name}, up to {positions.max(initial=-1)}")
        if positions.size:
            exact[name] = _rows(arrays, positions)
    progress("reading the model in released")
    forced = [name for name in _traced("released", prompts) if name in exact]
    model = TracedModel.load(directory, "released", max((len(prompts[name]) for name in forced), default=1))
    rounded = {}
    for name in forced:
        taps = model.taps(prompts[name])
        inputs = _recorded_inputs(taps, config)
        rounded[name] = inputs | _rows(model.kit_arrays(taps), exact[name]["positions"])
    identity = weights_id(directory)
    recorded = {"f32": _named(exact), "released": _named(rounded)}
    return Kit(identity.value if identity.verified else None, prompts, chains, recorded)


def run_kit(kit: Kit, directory: Path, target: Path, progress: Progress) -> None:
    """Write to ``target`` what a checkpoint makes of a kit, its own or another engine's.

    Raises:
      ConfigError, CheckpointError: the checkpoint cannot be read, or an array of the kit has another shape.
      InputError: the kit was recorded with other weights, or has a prompt that the model cannot run.
    """
    identity = weights_id(directory)
    if kit.weights_id is not None and identity.verified and identity.value != kit.weights_id:
        remedy = "name the checkpoint that the kit was recorded with, or build the kit anew"
        raise InputError("weights id", identity.value, f"{kit.weights_id}, of the kit", remedy)
    target.mkdir(parents=True, exist_ok=True)
    longest = max(map(len, kit.prompts.values())) + CHAIN_TOKENS
    model = TracedModel.load(directory, "f32", longest)
    chains, engine = {}, _engine(model, longest)
    for name in kit.chains:
        progress(f"continuing {name}")
        chains[name] = {"tokens": _greedy(engine, kit.prompts[name])}
    write_chains(target, chains)
    for numerics, arrays in kit.taps.items():
        traced = [name for name in kit.prompts if f"{name}.positions" in arrays]
        if numerics != model.numerics.name:
            model = TracedModel.load(directory, numerics, max((len(kit.prompts[name]) for name in traced), default=1))
        found = {}
        for name in traced:
            progress(f"tracing {name} in {numerics}")
            inputs = _given_inputs(name, arrays, model.config, len(kit.prompts[name]))
            computed = model.arrays(kit.prompts[name], inputs)
            found[name] = _rows(computed, _given_positions(name, arrays, len(kit.prompts[name])))
        write_arrays(target / taps_file(numerics), _named(found))


def _traced(numerics: str, prompts: dict[str, tuple[int, ...]]) -> list[str]:
    """The prompts whose arrays are recorded; a model without candidate level has a shorter list."""
    return [name for name in TRACED[numerics] if name in prompts] or ["top_k"]


def _clear_code(model: TracedModel, maker: PromptMaker) -> tuple[int, ...]:
    """The first piece of code, as long as the candidate level needs, in which every selection is clear."""
    for start in CODE_STARTS:
        prompt = maker.code(start, maker.candidate_tokens)
        if (selection_gaps(model.arrays(prompt)) >= CLEAR_GAP).all():
            return prompt
    return maker.code(0, maker.candidate_tokens)


def _chain(model: TracedModel, engine: Engine, prompt: Sequence[int]) -> Chain:
    """The greedy continuation by decoding, and how clear each token is by a pass over everything before it."""
    tokens = _greedy(engine, prompt)
    arrays = model.arrays([*prompt, *tokens[:-1]])
    logits = arrays["logits"][len(prompt) - 1 :].astype(np.float64)
    chosen = np.take_along_axis(logits, np.asarray(tokens)[:, None], axis=1)[:, 0]
    np.put_along_axis(logits, np.asarray(tokens)[:, None], -np.inf, axis=1)
    margins = chosen - logits.max(axis=1)
    if margins.min() < -DECISIVE_MARGIN_UNCLEAR:
        raise InputError("margin of a greedy token", float(margins.min()), "0 or more, by a pass over everything")
    gap = float(selection_gaps(arrays).min())
    return Chain(tuple(tokens), tuple(map(_short, margins.tolist())), _short(gap) if math.isfinite(gap) else None)


def _engine(model: TracedModel, longest: int) -> Engine:
    return build_engine(model.params, model.config, model.numerics, EngineSettings.for_one(longest))


def _greedy(engine: Engine, prompt: Sequence[int]) -> list[int]:
    """The continuation of a prompt, which no other prompt's cached pages may serve."""
    params = SamplingParams(max_tokens=CHAIN_TOKENS, temperature=0.0, ignore_eos=True)
    ((answer,),) = engine.generate([Request(tuple(prompt), params, read_cache=False)])
    return list(answer.tokens)


def _positions(arrays: Arrays, config: ModelConfig) -> Int[np.ndarray, " rows"]:
    """Which rows to record: the last ones, and others spread over the prompt.

    They end a group of every compression ratio, so that each completes an entry, and lie ahead of the first selection
    that is not clear: what lies behind it may differ between two engines that are both right.
    """
    unclear = np.flatnonzero(selection_gaps(arrays) < CLEAR_GAP)
    clear = unclear[0] if unclear.size else len(arrays["logits"])
    group = math.lcm(*(ratio for ratio in config.compress_ratios if ratio))
    ends = np.arange(group - 1, clear, group)
    spread, last = np.split(ends, [max(0, len(ends) - RECORDED_ROWS // 2)])
    places = np.linspace(0, len(spread) - 1, min(len(spread), RECORDED_ROWS // 2)).round().astype(int)
    return np.concatenate([spread[places], last]).astype(np.int32)


def _rows(arrays: Arrays, positions: Int[np.ndarray, " rows"]) -> Arrays:
    return {"positions": positions} | {name: array[positions] for name, array in arrays.items()}


def _recorded_inputs(taps: Arrays, config: ModelConfig) -> Arrays:
    """What each layer but the first reads, under the layer's own name."""
    return {
        f"layers.{layer}.{name}": taps[f"layers.{layer - 1}.{output}"]
        for layer in range(1, config.num_hidden_layers)
        for name, output in (("streams_in", "streams_out"), ("pre_in", "next_pre_mix"))
    }


def _given_positions(prompt: str, arrays: Arrays, tokens: int) -> Int[np.ndarray, " rows"]:
    positions = np.asarray(arrays[f"{prompt}.positions"])
    if positions.ndim != 1 or not ((positions >= 0) & (positions < tokens)).all():
        raise CheckpointError(f"{prompt}.positions", positions.tolist(), f"positions below {tokens}")
    return positions


def _given_inputs(prompt: str, arrays: Arrays, config: ModelConfig, tokens: int) -> LayerInputs | None:
    """The recorded inputs of a prompt's layers, None where the kit has none for it."""
    shapes = {"streams_in": (tokens, config.hc_mult, config.hidden_size), "pre_in": (tokens, config.hc_mult)}
    layers = range(1, config.num_hidden_layers)
    names = {part: [f"{prompt}.layers.{layer}.{part}" for layer in layers] for part in shapes}
    if not any(name in arrays for part in shapes for name in names[part]):
        return None
    for part, shape in shapes.items():
        for name in names[part]:
            if name not in arrays or arrays[name].shape != shape:
                found = list(arrays[name].shape) if name in arrays else "missing"
                raise CheckpointError(name, found, f"an array {list(shape)}, since the kit has inputs of {prompt}")
    streams, pre = (jnp.asarray(np.stack([arrays[name] for name in names[part]])) for part in shapes)
    return LayerInputs(streams, pre)


def _named(prompts: dict[str, Arrays]) -> Arrays:
    return {f"{prompt}.{name}": array for prompt, arrays in prompts.items() for name, array in arrays.items()}


def _short(value: float) -> float:
    """Six digits: more would differ between machines."""
    return float(f"{value:.6g}")
