"""Modified Kneser-Ney against its textbook definition, written out with dictionaries."""

import collections
import itertools

import numpy as np
import pytest

from examples.train_tiny.kneser_ney import SMALLEST_DISCOUNT, KneserNey

VOCABULARY = 5


def random_documents(seed, count=6, longest=40):
    """Skewed, so that every count from one to more than three occurs at every order."""
    random = np.random.default_rng(seed)
    shares = [0.45, 0.25, 0.15, 0.1, 0.05]
    return [random.choice(VOCABULARY, random.integers(1, longest), p=shares).astype(np.int32) for _ in range(count)]


class Textbook:
    """Chen and Goodman's interpolated model, one n-gram at a time."""

    def __init__(self, documents, order):
        raw = [
            collections.Counter(
                tuple(document[at : at + length].tolist())
                for document in documents
                for at in range(len(document) - length + 1)
            )
            for length in range(1, order + 1)
        ]
        self.counts = []
        for length in range(1, order):
            different = collections.Counter(gram[1:] for gram in raw[length])
            for document in documents:
                if len(document) >= length:
                    different[tuple(document[:length].tolist())] += 1
            self.counts.append(different)
        self.counts.append(raw[-1])

    def probability(self, context, token):
        shorter = self.probability(context[1:], token) if context else 1 / VOCABULARY
        counts = self.counts[len(context)]
        behind = {one: counts[(*context, one)] for one in range(VOCABULARY) if counts[(*context, one)]}
        if not behind:
            return shorter
        number = collections.Counter(min(count, 5) for count in counts.values() if count)
        n = [max(1, number[k]) for k in (1, 2, 3, 4)]
        share = n[0] / (n[0] + 2 * n[1])
        discount = {k: min(max(k - (k + 1) * share * n[k] / n[k - 1], SMALLEST_DISCOUNT), k) for k in (1, 2, 3)}
        total = sum(behind.values())
        taken = sum(discount[min(count, 3)] for count in behind.values())
        own = behind.get(token, 0)
        return (own - (discount[min(own, 3)] if own else 0) + taken * shorter) / total


@pytest.mark.parametrize(("seed", "order"), list(itertools.product(range(4), (1, 2, 3, 5))))
def test_every_prediction_is_the_textbooks(seed, order):
    documents = random_documents(seed)
    model, textbook = KneserNey(documents, VOCABULARY, order), Textbook(documents, order)
    for document in random_documents(seed + 100):
        expected = [
            textbook.probability(tuple(document[max(0, at - order + 1) : at].tolist()), int(document[at]))
            for at in range(1, len(document))
        ]
        np.testing.assert_allclose(model.log_probabilities(document), np.log(expected), rtol=1e-9, atol=1e-12)


def test_probabilities_of_all_tokens_sum_to_one():
    model = KneserNey(random_documents(1), VOCABULARY)
    for context in ([0], [1, 0, 3], [4, 4, 4, 4, 4], [2, 0, 1, 0, 0, 1]):
        continued = [np.asarray([*context, token]) for token in range(VOCABULARY)]
        assert sum(np.exp(model.log_probabilities(tokens)[-1]) for tokens in continued) == pytest.approx(1)


def test_n_grams_that_do_not_fit_an_integer_are_refused():
    with pytest.raises(ValueError, match="5 tokens of 13 bits do not fit 63 bits"):
        KneserNey(random_documents(0), 8192)
