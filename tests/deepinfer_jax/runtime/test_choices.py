"""Processing of scores against a plain NumPy version of its rules, row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.runtime.sampler import Choices, Counts, choose, counted, filtered, penalised, sample, seed_words

VOCABULARY, SLOTS = 50, 6


def choices(rows, **changed):
    """Plain choices for some rows; ``changed`` gives one value a row, or one for all."""
    fields = {
        "slots": np.arange(rows) % SLOTS,
        "positions": 10 + np.arange(rows),
        "seeds": np.stack([seed_words(7 + row) for row in range(rows)]),
        "temperatures": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence": 0.0,
        "frequency": 0.0,
        "repetition": 1.0,
        "biased": np.full((rows, 2), -1),
        "biases": np.zeros((rows, 2)),
        "banned": np.full((rows, 2), -1),
        "reported": True,
        "counted": True,
    } | changed
    whole = {"slots", "positions", "top_k", "biased", "banned"}
    arrays = {}
    for name, value in fields.items():
        dtype = (
            np.int32
            if name in whole
            else np.uint32
            if name == "seeds"
            else bool
            if name in ("counted", "reported")
            else np.float32
        )
        value = np.asarray(value, dtype)
        arrays[name] = jnp.asarray(np.broadcast_to(value, (rows,)) if value.ndim == 0 else value)
    return Choices(**arrays)


def oracle(scores, row, choice, generated, in_prompt):
    """The processed scores of one row in float64, -inf where a token cannot come."""
    scores = np.asarray(scores, np.float64).copy()
    for token in range(len(scores)):
        if generated[token] or in_prompt[token]:
            scores[token] = (
                scores[token] / choice["repetition"] if scores[token] > 0 else scores[token] * choice["repetition"]
            )
        scores[token] -= choice["presence"] * (generated[token] > 0) + choice["frequency"] * generated[token]
    for token, bias in zip(choice["biased"], choice["biases"], strict=True):
        if token >= 0:
            scores[token] += bias
    for token in choice["banned"]:
        if token >= 0:
            scores[token] = -np.inf
    scores /= choice["temperatures"] or 1.0
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if choice["top_k"]:
        order = order[: choice["top_k"]]
    chances = np.exp([scores[token] - scores[order[0]] for token in order])
    chances /= chances.sum()
    kept = [
        token
        for place, token in enumerate(order)
        if place == 0
        or (
            (choice["top_p"] == 1 or chances[:place].sum() < choice["top_p"])
            and chances[place] >= choice["min_p"] * chances[0]
        )
    ]
    result = np.full(len(scores), -np.inf)
    result[kept] = scores[kept]
    return result


def random_case(seed, rows=40):
    random = np.random.default_rng(seed)
    pick = functools.partial(random.choice, size=rows)
    tokens = np.stack([random.permutation(VOCABULARY)[:4] for _ in range(rows)])
    some = random.random((rows, 4)) < 0.5
    named = np.where(some, tokens, -1)
    asked = choices(
        rows,
        temperatures=pick([0.0, 0.3, 1.0, 2.0]),
        top_k=pick([0, 0, 1, 5, 80]),
        top_p=pick([1.0, 0.9, 0.35, 0.01]),
        min_p=pick([0.0, 0.02, 0.5]),
        presence=pick([0.0, 1.5, -1.0]),
        frequency=pick([0.0, 0.4]),
        repetition=pick([1.0, 1.3, 0.8]),
        biased=named[:, :2],
        biases=random.normal(size=(rows, 2)) * 5,
        banned=named[:, 2:],
    )
    logits = random.normal(size=(rows, VOCABULARY)).astype(np.float32) * 3
    generated = random.integers(0, 3, (SLOTS, VOCABULARY)) * (random.random((SLOTS, VOCABULARY)) < 0.3)
    counts = Counts(jnp.asarray(generated, jnp.int32), jnp.asarray(random.random((SLOTS, VOCABULARY)) < 0.2))
    return jnp.asarray(logits), asked, counts


@jax.jit
def processed(logits, asked, counts):
    return filtered(penalised(logits, asked, counts), asked)


@pytest.mark.parametrize("seed", range(8))
def test_scores_are_processed_by_the_rules(seed):
    logits, asked, counts = random_case(seed)
    found = np.asarray(processed(logits, asked, counts))
    for row in range(len(found)):
        one = {name: np.asarray(getattr(asked, name))[row] for name in Choices.__dataclass_fields__}
        slot = int(one["slots"])
        expected = oracle(logits[row], row, one, np.asarray(counts.generated)[slot], np.asarray(counts.in_prompt)[slot])
        np.testing.assert_array_equal(np.isfinite(found[row]), np.isfinite(expected), err_msg=str((row, one)))
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-4)


def test_without_extras_the_choice_is_the_plain_sampler():
    logits, _, counts = random_case(3)
    asked = choices(40, temperatures=np.tile([0.0, 0.7, 1.0, 1.4], 10))
    sampled = jax.jit(functools.partial(choose, most=3))(logits, asked, counts)
    plain = sample(logits, asked.temperatures, asked.seeds, asked.positions)
    np.testing.assert_array_equal(sampled.tokens, plain)


def test_log_probabilities_are_those_of_the_raw_scores():
    logits, asked, counts = random_case(4)
    sampled = jax.jit(functools.partial(choose, most=3))(logits, asked, counts)
    raw = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    np.testing.assert_allclose(sampled.logprobs, raw[np.arange(40), sampled.tokens], atol=1e-6)
    np.testing.assert_array_equal(sampled.top_tokens, np.argsort(-raw, axis=-1, kind="stable")[:, :3])
    np.testing.assert_allclose(sampled.top_logprobs, -np.sort(-raw, axis=-1)[:, :3], atol=1e-6)


def test_a_chosen_token_is_counted_in_its_slot_where_it_shall_be():
    logits, _, _ = random_case(5)
    counts = Counts.empty(SLOTS, VOCABULARY)
    asked = choices(SLOTS, counted=np.arange(SLOTS) % 2 == 0)
    sampled = jax.jit(functools.partial(choose, most=1))(logits[:SLOTS], asked, counts)
    after = counted(counts, asked, sampled.tokens)
    expected = np.zeros((SLOTS, VOCABULARY), int)
    for slot in range(0, SLOTS, 2):
        expected[slot, int(sampled.tokens[slot])] = 1
    np.testing.assert_array_equal(after.generated, expected)


def test_a_row_that_is_not_finite_says_so():
    logits, _, counts = random_case(6)
    logits = logits.at[3, 7].set(jnp.nan).at[5, 0].set(jnp.inf)
    sampled = jax.jit(functools.partial(choose, most=1))(logits, choices(40), counts)
    assert np.flatnonzero(~np.asarray(sampled.finite)).tolist() == [3, 5]


def test_filters_leave_the_distribution_of_what_stays():
    """Ten thousand draws with top-k 3: only the three likeliest, each as often as its share of them."""
    rows = 10_000
    logits = jnp.tile(jnp.asarray([[2.0, 1.0, 0.5, 0.0, -1.0]]), (rows, 1))
    asked = choices(rows, top_k=3, seeds=np.stack([seed_words(row) for row in range(rows)]))
    sampled = jax.jit(functools.partial(choose, most=1))(logits, asked, Counts.empty(SLOTS, 5))
    shares = np.bincount(sampled.tokens, minlength=5) / rows
    expected = np.exp([2.0, 1.0, 0.5]) / np.exp([2.0, 1.0, 0.5]).sum()
    np.testing.assert_allclose(shares[:3], expected, atol=0.015)
    assert shares[3:].sum() == 0
