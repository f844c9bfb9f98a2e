"""The host's table of how each slot's tokens are chosen, from which every step draws its rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer_jax.request import MOST_BIASES, MOST_STOP_IDS, SamplingParams
from deepinfer_jax.runtime.sampler import Choices, seed_words


class ChoiceTable:
    """Sampling parameters by slot. Slots are numbered over all shards."""

    def __init__(self, slots: int) -> None:
        self._seeds = np.zeros((slots, 2), np.uint32)
        self._numbers = {
            name: np.zeros(slots, np.float32)
            for name in ("temperatures", "top_p", "min_p", "presence", "frequency", "repetition")
        }
        self._top_k = np.zeros(slots, np.int32)
        self._biased = np.full((slots, MOST_BIASES), -1, np.int32)
        self._biases = np.zeros((slots, MOST_BIASES), np.float32)
        self._banned = np.full((slots, MOST_STOP_IDS), -1, np.int32)
        # Position of the first sampled token at which the bans are lifted.
        self._banned_until = np.zeros(slots, np.int64)
        self._reported = np.zeros(slots, bool)
        self._counted = np.zeros(slots, bool)

    def set(self, slot: int, params: SamplingParams, seed: int, ends: Sequence[int], prompt_length: int) -> None:
        """Take over a request's parameters.

        ``ends``: tokens that must not come before ``min_tokens`` were generated.
        """
        self._seeds[slot] = seed_words(seed)
        for name, value in (
            ("temperatures", params.temperature),
            ("top_p", params.top_p),
            ("min_p", params.min_p),
            ("presence", params.presence_penalty),
            ("frequency", params.frequency_penalty),
            ("repetition", params.repetition_penalty),
        ):
            self._numbers[name][slot] = value
        self._top_k[slot] = params.top_k
        self._biased[slot], self._biases[slot], self._banned[slot] = -1, 0.0, -1
        self._biased[slot, : len(params.logit_bias)] = list(params.logit_bias)
        self._biases[slot, : len(params.logit_bias)] = list(params.logit_bias.values())
        self._banned[slot, : len(ends)] = ends
        self._banned_until[slot] = prompt_length + params.min_tokens
        self._reported[slot] = params.logprobs is not None
        self._counted[slot] = params.penalised

    def rows(self, slots: np.ndarray, local_slots: np.ndarray, positions: np.ndarray) -> Choices:
        """Fresh rows for tokens sampled at ``positions``; a negative position is padding.

        ``local_slots``: the slots' numbers on their own shard.
        """
        used = positions >= 0
        banned = self._banned[slots]
        banned[positions >= self._banned_until[slots]] = -1
        numbers = {name: values[slots] for name, values in self._numbers.items()}
        # Padding rows ask for nothing, whatever the slot they point at asks for.
        numbers["temperatures"][~used] = 0.0
        for name, neutral in (("top_p", 1.0), ("min_p", 0.0), ("presence", 0.0), ("frequency", 0.0)):
            numbers[name][~used] = neutral
        numbers["repetition"][~used] = 1.0
        return Choices(
            slots=local_slots.astype(np.int32),
            positions=np.maximum(positions, 0).astype(np.int32),
            seeds=self._seeds[slots],
            **numbers,
            top_k=np.where(used, self._top_k[slots], 0).astype(np.int32),
            biased=np.where(used[:, None], self._biased[slots], -1).astype(np.int32),
            biases=self._biases[slots],
            banned=banned,
            reported=self._reported[slots] & used,
            counted=self._counted[slots] & used,
        )
