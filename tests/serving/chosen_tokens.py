"""Which token every row of raw scores leads to, computed apart from the engine's sampler, and where that is clear."""

import collections
import dataclasses

import jax
import numpy as np

from deepinfer_jax.runtime.sampler import gumbel_noise, seed_words

CLEAR_MARGIN = 1e-3
noise_of = jax.jit(gumbel_noise, static_argnums=2)


def processed(scores, prompt, answer, params, ends):
    """Float64 ``[generated vocabulary]``: scores behind penalties, bias, bans and temperature.

    ``scores``: raw ones. ``answer``: the tokens that were chosen. ``ends``: tokens that end the request.
    """
    rows = scores.astype(np.float64).copy()
    for place, row in enumerate(rows):
        generated = collections.Counter(answer[:place])
        for token in {*prompt, *generated}:
            row[token] *= params.repetition_penalty if row[token] <= 0 else 1 / params.repetition_penalty
        for token, count in generated.items():
            row[token] -= params.presence_penalty + params.frequency_penalty * count
        for token, bias in params.logit_bias.items():
            row[token] += bias
        if place < params.min_tokens:
            row[list(ends)] = -np.inf
    return rows / (params.temperature or 1.0)


def allowed(row, top_k, top_p, min_p):
    """Which tokens the filters leave."""
    order = np.argsort(-row, kind="stable")
    chances = np.exp(row[order] - row.max())
    chances[top_k or len(row) :] = 0
    chances /= chances.sum()
    before = np.cumsum(chances) - chances
    stays = (before < (top_p if top_p < 1 else np.inf)) & (chances >= min_p * chances[0]) & (chances > 0)
    stays[0] = True
    kept = np.zeros(len(row), bool)
    kept[order[stays]] = True
    return kept


def choices(scores, prompt, answer, params, ends, seed):
    """The chosen token of every row, and whether a small difference of the scores would change nothing."""
    rows = processed(scores, prompt, answer, params, ends)
    positions = np.arange(len(rows), dtype=np.int32) + len(prompt)
    noise = np.zeros(rows.shape)
    if params.temperature:
        noise = np.asarray(noise_of(np.stack([seed_words(seed)] * len(rows)), positions, rows.shape[1]), np.float64)
    chosen, clear = [], []
    for row, noised in zip(rows, rows + noise, strict=True):
        found = [_first_two(noised, allowed(row, *edges)) for edges in _filters(params)]
        chosen.append(found[0][0])
        clear.append(all(token == found[0][0] and margin >= CLEAR_MARGIN for token, margin in found))
    return np.asarray(chosen), np.asarray(clear)


def _first_two(noised, kept):
    """The best token that the filters leave, and how far it is before the next one."""
    scores = np.where(kept, noised, -np.inf)
    second, first = np.sort(scores)[-2:]
    return int(scores.argmax()), first - second


def _filters(params):
    """The filters, then a little tighter and a little looser ones."""
    for nudge in (0, -1, 1):
        near = dataclasses.replace(
            params,
            top_k=max(1, params.top_k + nudge) if params.top_k else 0,
            top_p=min(1.0, params.top_p + nudge * CLEAR_MARGIN) if params.top_p < 1 else 1.0,
            min_p=max(0.0, params.min_p - nudge * CLEAR_MARGIN) if params.min_p else 0.0,
        )
        yield near.top_k, near.top_p, near.min_p
