"""Whether another engine that reads the released layout chooses the same first token as this one.

Both read one random checkpoint. Two correct engines round differently, so a prompt counts only where this engine's best
logit leads by a margin.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from deepinfer_jax.bench.peers import PEERS, Place, first_tokens_command
from deepinfer_jax.bench.process import EngineError
from deepinfer_jax.checkpoint.reader import load_model
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.rows import sequence_rows
from deepinfer_jax.model.source import SequenceSource
from deepinfer_jax.model.transformer import Model, forward, logits
from deepinfer_jax.numerics import Numerics

PEER = "fastllm"
# Prompts that run together here.
BATCH = 64
TILE_ROWS = 32
# After this many random prompts without enough clear ones the comparison gives up.
LARGEST_DRAW = 100_000
ANSWER_SECONDS = 1800.0


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What a comparison found.

    ``drawn``: random prompts of ``length`` tokens, of which ``compared`` had a margin of at least ``margin`` between
    the best two logits here; on ``equal`` of those the first tokens are equal. ``differing``: margin, own token and the
    other engine's where they are not.
    """

    peer: str
    numerics: str
    length: int
    margin: float
    drawn: int
    compared: int
    equal: int
    differing: tuple[tuple[float, int, int], ...]

    @property
    def share(self) -> float:
        """Equal first tokens among those compared."""
        return self.equal / self.compared


def compare_first_tokens(
    place: Place,
    installed: Path | None,
    *,
    prompts: int,
    margin: float,
    length: int,
    seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> Agreement:
    """Compare greedy first tokens with fastllm's, this engine in ``released`` numerics.

    Args:
      place: where the peer and the checkpoint are.
      installed: an environment that has the peer, instead of one made in ``place``.
      prompts: how many clear prompts to compare.
      margin: least lead of the best logit.
      length: tokens of a prompt.
      seed: of the prompts.
      progress: told what is done.

    Raises:
      EngineError: the peer could not be set up, or did not answer.
      InputError: too few random prompts have that margin.
    """
    numerics = Numerics.preset("released")
    (command,) = PEERS[PEER].commands(place, installed, progress)
    command, directory = first_tokens_command(command)
    config, params = load_model(directory, numerics)
    chosen, tokens, margins, drawn = _clear_prompts(params, config, numerics, prompts, margin, length, seed)
    progress(f"{PEER}: {prompts} of {drawn} random prompts have a margin of {margin:g}")
    theirs = _answers(command.arguments, command.environment, place.log(f"{PEER}-first-tokens"), chosen)
    rows = list(zip(margins, tokens, theirs, strict=True))
    differing = tuple(row for row in rows if row[1] != row[2])
    return Agreement(PEER, numerics.name, length, margin, drawn, len(rows), len(rows) - len(differing), differing)


def _clear_prompts(
    params: Model, config: ModelConfig, numerics: Numerics, wanted: int, margin: float, length: int, seed: int
) -> tuple[list[list[int]], list[int], list[float], int]:
    """The first random prompts with the margin: they, their first tokens, their margins, and how many were drawn."""
    random = np.random.default_rng(seed)
    chosen: list[list[int]] = []
    tokens: list[int] = []
    margins: list[float] = []
    for drawn in range(BATCH, LARGEST_DRAW, BATCH):
        prompts = random.integers(0, config.vocab_size, (BATCH, length), dtype=np.int32)
        best, lead = (np.asarray(item) for item in first_choices(params, prompts, config, numerics))
        for row in np.flatnonzero(lead >= margin):
            chosen.append(prompts[row].tolist())
            tokens.append(int(best[row]))
            margins.append(float(lead[row]))
        if len(chosen) >= wanted:
            return chosen[:wanted], tokens[:wanted], margins[:wanted], drawn
    raise InputError("margin", margin, f"one that {wanted} of {LARGEST_DRAW} random prompts have", "ask for less")


@functools.partial(jax.jit, static_argnames=("config", "numerics"))
def first_choices(
    params: Model, prompts: Int[Array | np.ndarray, "prompts length"], config: ModelConfig, numerics: Numerics
) -> tuple[Int[Array, " prompts"], Float[Array, " prompts"]]:
    """The greedy token behind each prompt, and by how much its logit leads the second best."""
    count, length = prompts.shape
    rows = sequence_rows(jnp.asarray(prompts), min(TILE_ROWS, length))
    source = SequenceSource.empty(rows.tokens.shape[0], length, config.head_dim, config.index_head_dim, numerics.dtype)
    hidden = forward(params, rows, source, config, numerics).hidden.reshape(count, -1, config.hidden_size)
    values, tokens = jax.lax.top_k(logits(params, hidden[:, length - 1]), 2)
    return tokens[:, 0].astype(jnp.int32), values[:, 0] - values[:, 1]


def _answers(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, prompts: list[list[int]]
) -> list[int]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as errors:
        try:
            done = subprocess.run(
                arguments,
                env=environment,
                input=json.dumps(prompts).encode(),
                stdout=subprocess.PIPE,
                stderr=errors,
                timeout=ANSWER_SECONDS,
                check=True,
            )
            tokens = json.loads(done.stdout)["tokens"]
        except (subprocess.SubprocessError, ValueError, KeyError) as error:
            raise EngineError(f"did not answer ({error}); see {log}") from error
    if len(tokens) != len(prompts):
        raise EngineError(f"answered {len(tokens)} of {len(prompts)} prompts; see {log}")
    return [int(token) for token in tokens]
