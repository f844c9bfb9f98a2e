"""News of the engine as events, however many come at a time."""

import itertools

import pytest

from deepinfer_jax.request import Logprob, Output, Receipt
from serving.answer_events import AnswerEvents
from serving.errors import DeadlineError, ServerFaultError
from serving.events import Delta, Finished, PromptLogprobs, ServedReceipt, Started, Timing

RECEIPT = Receipt(9, 32, 16, 0, (), 40, 0, 0, "f")
SCORES = (Logprob(8, -1.0), Logprob(9, -2.0))


def news(*tokens, first=False, **more):
    """One step's news."""
    more = ({"receipt": RECEIPT} if first or "finish_reason" in more else {}) | more
    return Output(0, 0, tokens, **more)


def answer():
    """By a clock that is one second later at every look."""
    return AnswerEvents(3, "r", "w", clock=itertools.count(1.0).__next__)


STARTED = Started(3, 32, "f", "r", "w")


def test_news_that_come_together_are_one_event():
    made = answer()
    assert list(made.events([news(5, first=True), news(6), news(7)])) == [STARTED, Delta((5, 6, 7))]
    assert list(made.events([news(8)])) == [Delta((8,))]
    assert not made.ended
    events = list(made.events([news(9, finish_reason="length", queue_seconds=0.25)]))
    assert made.ended
    # From 1 s at its arrival and 2 s at its first token to 3 s at its end.
    served = ServedReceipt(RECEIPT, "w", timing=Timing(queue=0.25, prefill=0.75, decode=1.0, total=2.0))
    assert events == [Delta((9,)), Finished("length", 5, served)]


def test_an_answer_without_tokens_starts_and_ends():
    events = list(answer().events([news(finish_reason="stop", matched=1)]))
    served = ServedReceipt(RECEIPT, "w", timing=Timing(total=1.0))
    assert events == [STARTED, Finished("stop", 0, served, matched=1)]


@pytest.mark.parametrize("matched", [0, 7, "end"])
def test_what_matched_is_named(matched):
    *_, last = answer().events([news(5, first=True), news(finish_reason="stop", matched=matched)])
    assert (last.reason, last.matched, last.completion_tokens) == ("stop", matched, 1)


def test_log_probabilities_come_before_tokens():
    first = news(5, first=True, prompt_logprobs=SCORES, logprobs=(Logprob(5, -3.0),))
    events = list(answer().events([first, news(6, logprobs=(Logprob(6, -4.0),))]))
    both = (Logprob(5, -3.0), Logprob(6, -4.0))
    assert events == [STARTED, PromptLogprobs(1, SCORES), Delta((5, 6), both)]


def test_a_prompt_of_one_token_has_no_log_probabilities():
    assert list(answer().events([news(5, first=True, prompt_logprobs=())])) == [STARTED, Delta((5,))]


def test_an_aborted_request_ends_as_cancelled():
    *_, last = answer().events([news(finish_reason="abort")])
    assert last.reason == "cancelled"


@pytest.mark.parametrize(
    ("reason", "kind"), [("deadline", DeadlineError), ("error", ServerFaultError), ("unheard of", ServerFaultError)]
)
def test_other_ends_are_errors_behind_the_tokens_that_came(reason, kind):
    events = answer().events([news(5, first=True), news(finish_reason=reason, error="not finite")])
    assert [next(events), next(events)] == [STARTED, Delta((5,))]
    with pytest.raises(kind) as caught:
        next(events)
    assert caught.value.reason == ("DEADLINE_PASSED" if reason == "deadline" else "ENGINE_FAULT")
