"""How many drafts the backbone accepts, and how well the confidences foretell it.

At temperature 0 a draft is accepted if it is the backbone's likeliest token behind the accepted ones. A greedy
continuation therefore holds the answer to every verification along it: the drafts behind a place are accepted as far as
they are the continuation's own next tokens. At other temperatures, along tokens y that the backbone sampled, drafts up
to the n-th are accepted with the mean probability of ``prod min(1, d(y_i) / q(y_i))`` (model specification, section
12, with the sum over drafts written as a mean over the backbone's samples).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.draft import greedy
from deepinfer_jax.model.transformer import Model
from examples.train_tiny.drafting import drafts_behind, target_logits, tokens_behind
from examples.train_tiny.losses import run_windows

BINS = 15


@dataclasses.dataclass(frozen=True)
class Verified:
    """What became of the drafts behind some places, place by place.

    ``survival[i, j]``: the probability that drafts 0..j behind place i are all accepted, 0 or 1 at temperature 0.
    ``confidence[i, j]``: the head's raw logit that draft j is accepted if those before it are.
    """

    survival: Float[np.ndarray, "places drafts"]
    confidence: Float[np.ndarray, "places drafts"]

    def emitted(self) -> float:
        """Mean tokens a verification emits: the accepted drafts and one more."""
        return float(1.0 + self.survival.sum(axis=1).mean())

    def conditional(self) -> list[float]:
        """Per draft, how often it is accepted when those before it are."""
        reached = _reached(self.survival)
        return [float(part) for part in self.survival.sum(axis=0) / np.maximum(reached.sum(axis=0), 1e-9)]


@functools.partial(jax.jit, static_argnames=("config", "temperature"))
def verify_along(
    params: Model,
    sequences: Int[Array, "sequences tokens"],
    places: Int[Array, "sequences anchors"],
    *,
    config: ModelConfig,
    temperature: float,
) -> tuple[Float[Array, "places drafts"], Float[Array, "places drafts"]]:
    """Survival and raw confidence of the drafts behind every place of sequences that the backbone itself wrote.

    ``places`` are as in :mod:`examples.train_tiny.drafting`: the anchor stands behind its place. Sequences are a
    multiple of the tile, plus one, long.
    """
    assert params.draft is not None
    output, rows = run_windows(params, sequences[:, :-1], config)
    following = tokens_behind(sequences, places, config)
    choose = greedy if temperature == 0 else lambda _, step: following[:, step + 1]
    drafts = drafts_behind(params.draft, params, output, rows, sequences, places, config, choose)
    if temperature == 0:
        accepted = (drafts.tokens == following[:, 1:]).astype(jnp.float32)
    else:
        wanted = target_logits(params, output, sequences, places, config) / temperature
        ratios = _chance(drafts.logits / temperature, following) / _chance(wanted, following)
        accepted = jnp.minimum(ratios, 1.0)
    return jnp.cumprod(accepted, axis=1), drafts.confidence


def walk(survival: Float[np.ndarray, "places drafts"]) -> Bool[np.ndarray, " places"]:
    """At temperature 0, the places at which a continuation is verified, when every step starts where the last ended.

    ``survival`` is that of consecutive places of one continuation.
    """
    visited = np.zeros(len(survival), bool)
    place = 0
    while place < len(survival):
        visited[place] = True
        place += 1 + int(survival[place].sum())
    return visited


def calibrate(verified: Verified) -> Float[np.ndarray, " drafts"]:
    """The temperature of each draft's confidences that makes them likeliest; at temperature 0 of sampling."""
    candidates = np.geomspace(0.2, 5.0, 129)
    outcome, reached = verified.survival, _reached(verified.survival)

    def doubt(draft: int, temperature: float) -> float:
        scaled = verified.confidence[:, draft] / temperature
        loss = np.logaddexp(0.0, scaled) - scaled * outcome[:, draft]
        return float((loss * reached[:, draft]).sum())

    best = [min(candidates, key=functools.partial(doubt, draft)) for draft in range(outcome.shape[1])]
    return np.asarray(best, np.float32)


def calibration_error(verified: Verified, temperatures: Float[np.ndarray, " drafts"]) -> float:
    """Expected calibration error: the mean distance of a bin's confidence from its acceptance, in 15 equal bins.

    A draft counts where those before it were accepted; places of all drafts are pooled.
    """
    counted = _reached(verified.survival) > 0
    stated = 1.0 / (1.0 + np.exp(-verified.confidence / temperatures))
    stated, accepted = stated[counted], verified.survival[counted]
    bins = np.minimum((stated * BINS).astype(int), BINS - 1)
    gaps = [abs((stated - accepted)[bins == number].sum()) for number in range(BINS)]
    return float(sum(gaps) / len(stated))


def _reached(survival: Float[np.ndarray, "places drafts"]) -> Float[np.ndarray, "places drafts"]:
    """How likely each draft comes to be looked at."""
    return np.concatenate([np.ones_like(survival[:, :1]), survival[:, :-1]], axis=1)


def _chance(scores: Float[Array, "places drafts vocabulary"], following: Int[Array, "places tokens"]) -> Array:
    """Probability of the tokens behind the anchors."""
    chances = jax.nn.softmax(scores, axis=-1)
    return jnp.take_along_axis(chances, following[:, 1:, None], axis=-1)[..., 0]
