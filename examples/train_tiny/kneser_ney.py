"""Interpolated modified Kneser-Ney n-grams (Chen and Goodman 1999), what a trained model has to beat."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int

ORDER = 5
# Something is always left to shorter n-grams, so that no token is impossible where the text is short.
SMALLEST_DISCOUNT = 0.05

Tokens = Int[np.ndarray, " tokens"]


@dataclasses.dataclass(frozen=True)
class _Level:
    """N-grams of one length, packed into integers with the last token lowest.

    ``grams`` ascending, with their discounted counts; ``contexts`` (all but the last token) ascending, with the sum of
    the counts behind them and the mass that the discounts leave to shorter n-grams.
    """

    grams: np.ndarray
    discounted: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    left: np.ndarray


class KneserNey:
    """Counts of a training text. A document is a token sequence of its own; n-grams do not cross documents."""

    def __init__(self, documents: Sequence[Tokens], vocabulary: int, order: int = ORDER) -> None:
        self._vocabulary = vocabulary
        self._bits = max(1, (vocabulary - 1).bit_length())
        if order * self._bits > 63:
            raise ValueError(
                f"{order} tokens of {self._bits} bits do not fit 63 bits; use a smaller vocabulary or order"
            )
        counted = [self._count(documents, length) for length in range(1, order + 1)]
        levels = [self._level(*counted[-1])]
        for longer, (grams, counts) in zip(counted[:0:-1], counted[-2::-1], strict=True):
            length = order - len(levels)
            levels.append(self._level(*self._continuations(longer[0], grams, counts, documents, length)))
        self._levels = levels[::-1]

    def log_probabilities(self, document: Tokens) -> Float64[np.ndarray, " predicted"]:
        """Natural logarithm of the probability of every token but the first, given those before it."""
        tokens = document.astype(np.int64)
        probability = np.full(len(tokens), 1.0 / self._vocabulary)
        for length, level in enumerate(self._levels, start=1):
            grams = self._pack(tokens, length)
            contexts = grams >> self._bits
            known, place = _find(level.contexts, contexts)
            found, where = _find(level.grams, grams)
            share = np.where(found, level.discounted[where], 0.0) / level.totals[place]
            shorter = probability[length - 1 :]
            probability[length - 1 :] = np.where(known, share + level.left[place] * shorter, shorter)
        return np.log(probability[1:])

    def _pack(self, tokens: np.ndarray, length: int) -> np.ndarray:
        """Every n-gram of a document; none where it is shorter."""
        count = max(0, len(tokens) - length + 1)
        grams = np.zeros(count, np.int64)
        for place in range(length):
            grams = (grams << self._bits) | tokens[place : place + count]
        return grams

    def _count(self, documents: Sequence[Tokens], length: int) -> tuple[np.ndarray, np.ndarray]:
        packed = [self._pack(document.astype(np.int64), length) for document in documents]
        return np.unique(np.concatenate(packed), return_counts=True)

    def _continuations(
        self, longer: np.ndarray, grams: np.ndarray, counts: np.ndarray, documents: Sequence[Tokens], length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """How many different tokens stand before each n-gram; at the start of a document nothing can, and it counts."""
        suffixes, different = np.unique(longer & ((1 << (length * self._bits)) - 1), return_counts=True)
        heads = [self._pack(document[:length].astype(np.int64), length) for document in documents]
        first, at_start = np.unique(np.concatenate(heads), return_counts=True)
        total = np.zeros_like(counts)
        total[np.searchsorted(grams, suffixes)] += different
        total[np.searchsorted(grams, first)] += at_start
        return grams, total

    def _level(self, grams: np.ndarray, counts: np.ndarray) -> _Level:
        discounts = _discounts(counts)
        taken = discounts[np.minimum(counts, 3)]
        contexts, place = np.unique(grams >> self._bits, return_inverse=True)
        totals = np.bincount(place, weights=counts)
        left = np.bincount(place, weights=taken) / totals
        return _Level(grams, counts - taken, contexts, totals, left)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Discount of counts 0, 1, 2 and 3 or more, from the numbers of n-grams that were counted 1 to 4 times."""
    ones, twos, threes, fours = (max(1, int((counts == number).sum())) for number in (1, 2, 3, 4))
    share = ones / (ones + 2 * twos)
    values = [0.0, 1 - 2 * share * twos / ones, 2 - 3 * share * threes / twos, 3 - 4 * share * fours / threes]
    return np.clip(values, [0.0, *[SMALLEST_DISCOUNT] * 3], [0.0, 1.0, 2.0, 3.0])


def _find(ascending: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether each value is there, and where; an arbitrary place where it is not."""
    place = np.minimum(np.searchsorted(ascending, wanted), len(ascending) - 1)
    return ascending[place] == wanted, place
