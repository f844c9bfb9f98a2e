"""The files of a kit, and of the results that an engine writes: reading, writing, and what is damaged in them."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from deepinfer_jax.checkpoint.safetensors import open_file
from deepinfer_jax.checkpoint.writer import ShardWriter, TensorSpec
from deepinfer_jax.errors import CheckpointError
from examples.conformance.selections import Arrays

PROMPTS_FILE, CHAINS_FILE, CHECKPOINT = "prompts.json", "chains.json", "checkpoint"
NUMERICS = ("f32", "released")
CHAIN_TOKENS = 32
# What a layer reads, and what it computes, in order.
INPUTS = ("streams_in", "pre_in")
LAYER_ARRAYS = (
    "attn_in",
    "window_kv",
    "compress_kv",
    "index_k",
    "index_score",
    "candidate_score",
    "candidate_blocks",
    "topk_compressed",
    "attn_out",
    "ffn_in",
    "router_biased_scores",
    "router_indices",
    "ffn_out",
)
_DTYPES = {np.dtype(np.float32): "F32", np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(np.int32): "I32"}


def order_of(name: str) -> tuple[int, int]:
    """Sorts the arrays of one prompt in the order in which they are computed: positions, layer by layer, logits."""
    match = re.fullmatch(r"layers\.(\d+)\.(.*)", name, re.DOTALL)
    if match is None:
        return -1 if name == "positions" else sys.maxsize, 0
    kind = match[2]
    return int(match[1]), LAYER_ARRAYS.index(kind) if kind in LAYER_ARRAYS else len(LAYER_ARRAYS)


def taps_file(numerics: str) -> str:
    """The file that holds the arrays of one numerics."""
    return f"taps_{numerics}.safetensors"


@dataclasses.dataclass(frozen=True)
class Chain:
    """The greedy continuation of a prompt.

    ``margins``: per step, the lead of the chosen logit over the best other one. ``selection_gap``: the smallest of
    :func:`examples.conformance.selections.selection_gaps` over prompt and continuation, None where nothing is left out.
    """

    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    selection_gap: float | None


@dataclasses.dataclass(frozen=True)
class Kit:
    """Prompts, and what a model makes of them.

    ``weights_id`` names the weights, None where the checkpoint has no digests. ``taps`` holds, per numerics, arrays by
    name: ``PROMPT.ARRAY`` with one row for each of ``PROMPT.positions``; inputs of layers have a row for every token.
    """

    weights_id: str | None
    prompts: Mapping[str, tuple[int, ...]]
    chains: Mapping[str, Chain]
    taps: Mapping[str, Arrays]

    @classmethod
    def read(cls, directory: Path) -> Kit:
        """Read a kit; a file of taps may be missing.

        Raises:
          CheckpointError: a file is damaged; names it.
        """
        document = read_json(directory / PROMPTS_FILE)
        chains = read_json(directory / CHAINS_FILE)
        try:
            prompts = {name: tuple(map(int, tokens)) for name, tokens in document["prompts"].items()}
            found = {
                name: Chain(tuple(map(int, item["tokens"])), tuple(map(float, item["margins"])), item["selection_gap"])
                for name, item in chains.items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(str(directory), repr(error), f"{PROMPTS_FILE} and {CHAINS_FILE} of a kit") from error
        for name, chain in found.items():
            if name not in prompts or len(chain.tokens) != len(chain.margins):
                accepted = f"a chain with a margin for every token, of a prompt in {PROMPTS_FILE}"
                raise CheckpointError(f"{name} in {directory / CHAINS_FILE}", chains[name], accepted)
        present = [numerics for numerics in NUMERICS if (directory / taps_file(numerics)).exists()]
        taps = {numerics: read_arrays(directory / taps_file(numerics)) for numerics in present}
        return cls(document.get("weights_id"), prompts, found, taps)

    def write(self, directory: Path) -> None:
        """Write everything but the checkpoint and the text for people."""
        directory.mkdir(parents=True, exist_ok=True)
        prompts = _lines({name: list(tokens) for name, tokens in self.prompts.items()}, indent=1)
        text = f'{{\n"weights_id": {json.dumps(self.weights_id)},\n"prompts": {prompts}\n}}\n'
        (directory / PROMPTS_FILE).write_text(text, encoding="utf-8")
        write_chains(directory, {name: dataclasses.asdict(chain) for name, chain in self.chains.items()})
        for numerics, arrays in self.taps.items():
            write_arrays(directory / taps_file(numerics), arrays)


@dataclasses.dataclass(frozen=True)
class Results:
    """What an engine computed, as far as it wrote it. ``damaged``: by file, or file and chain, what is wrong there."""

    chains: Mapping[str, tuple[int, ...]]
    taps: Mapping[str, Arrays]
    damaged: Mapping[str, str]

    @classmethod
    def read(cls, directory: Path) -> Results:
        """Read what is there; nothing that is damaged stops the rest."""
        damaged: dict[str, str] = {}
        chains: dict[str, tuple[int, ...]] = {}
        taps: dict[str, Arrays] = {}
        if (directory / CHAINS_FILE).exists():
            try:
                for name, item in read_json(directory / CHAINS_FILE).items():
                    tokens = item.get("tokens") if isinstance(item, dict) else None
                    if isinstance(tokens, list) and all(type(token) is int for token in tokens):
                        chains[name] = tuple(tokens)
                    else:
                        damaged[f"{CHAINS_FILE} {name}"] = 'no list of integers "tokens"'
            except CheckpointError as error:
                damaged[CHAINS_FILE] = str(error)
        for numerics in NUMERICS:
            file = directory / taps_file(numerics)
            if file.exists():
                try:
                    taps[numerics] = read_arrays(file)
                except CheckpointError as error:
                    damaged[file.name] = str(error)
        return cls(chains, taps, damaged)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
      CheckpointError: the file is none.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(file), "no JSON text", "a JSON object", str(error)) from error
    if not isinstance(document, dict):
        raise CheckpointError(str(file), document, "a JSON object")
    return document


def write_chains(directory: Path, chains: Mapping[str, Mapping[str, Any]]) -> None:
    """Write ``chains.json``; results need no more than the tokens."""
    (directory / CHAINS_FILE).write_text(_lines(chains) + "\n", encoding="utf-8")


def read_arrays(file: Path) -> Arrays:
    """The arrays of a safetensors file by name.

    Raises:
      CheckpointError: the file is damaged; names it, and the array where one is at fault.
    """
    opened = open_file(file)
    return {name: opened.raw(name) for name in opened.entries}


def write_arrays(file: Path, arrays: Arrays) -> None:
    """Write a safetensors file."""
    specs = [TensorSpec(name, _DTYPES[array.dtype], array.shape) for name, array in arrays.items()]
    with ShardWriter(file, specs) as shard:
        for name, array in arrays.items():
            shard.write(name, array)


def _lines(document: Mapping[str, Any], indent: int = 0) -> str:
    """A JSON object with one line for every entry."""
    entries = [f"{' ' * (indent + 1)}{json.dumps(name)}: {json.dumps(value)}" for name, value in document.items()]
    return "{\n" + ",\n".join(entries) + "\n" + " " * indent + "}"
