"""Stop strings: the same answer however its text is cut, and nothing held back for no reason."""

import itertools

import hypothesis.strategies as st
from hypothesis import given

from deepinfer_jax.text.stop_strings import StopMatcher

TEXTS = st.text("ab\u00e4", max_size=24)
STOPS = st.lists(st.text("ab\u00e4", min_size=1, max_size=4), max_size=3, unique=True)


def whole(text, stops):
    """The definition: cut before the stop string that ends first, the longest of those that end there."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(TEXTS, STOPS, st.lists(st.integers(0, 24), max_size=6))
def test_any_cut_of_the_text_gives_the_same_answer(text, stops, cuts):
    matcher = StopMatcher(stops)
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    shown = "".join(matcher.push(text[start:end]) for start, end in itertools.pairwise(places))
    found = matcher.found
    assert (shown + matcher.finish(), found) == whole(text, stops)


@given(TEXTS, STOPS)
def test_only_a_possible_beginning_is_held_back(text, stops):
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    if matcher.found is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
        assert not any(
            stop.startswith(text[-length:]) and len(stop) > length
            for stop in stops
            for length in range(len(held) + 1, len(text) + 1)
        )


def test_nothing_is_shown_after_the_stop():
    matcher = StopMatcher(["END"])
    assert matcher.push("one EN") == "one "
    assert matcher.push("D two") == ""
    assert matcher.found == "END"
    assert matcher.push("three") == ""
    assert matcher.finish() == ""
