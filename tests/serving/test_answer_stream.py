"""Streams through their messages and back, and every breach of their contract."""

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deepinfer_jax.request import Logprob, Receipt
from serving.answer_stream import PROMPT_POSITIONS, AnswerReader, AnswerWriter
from serving.channels import MESSAGE_BYTES
from serving.errors import ContractError
from serving.events import Answer, Collector, Delta, Finished, PromptLogprobs, ServedReceipt, Started
from serving.proto.deepinfer.v1.inference_pb2 import GenerateResponse
from tests.serving.servers import messages
from tests.serving.strategies import deltas, finished, prompt_logprobs, started

PROMPT = (7, 8, 9)
START, END = {"started": {}}, {"finished": {"reason": 1}}
RECEIPT = ServedReceipt(Receipt(1, 0, 0, 0, (), 0, 0, 0, ""))


def sent(events):
    """Messages as they come out at the other end."""
    writer = AnswerWriter()
    written = [message for event in events for message in writer.messages(event)]
    return [GenerateResponse.FromString(message.SerializeToString()) for message in written]


def read(received, prompt=PROMPT):
    reader = AnswerReader(prompt)
    events = [reader.event(message) for message in received]
    reader.end()
    return events


@given(started(), st.none() | prompt_logprobs(PROMPT), st.lists(deltas(), max_size=4), finished())
def test_a_stream_survives_its_messages(begin, scores, parts, end):
    events = [begin(), *([scores()] if scores else []), *(part() for part in parts), end()]
    assert read(sent(events)) == events


def test_log_probabilities_of_a_long_prompt_come_in_several_messages():
    prompt = tuple(range(2 * PROMPT_POSITIONS + 2))
    top = tuple((token, -1.0) for token in range(20))
    scores = tuple(Logprob(token, -2.0, top) for token in prompt[1:])
    events = [Started(len(prompt), 0, "", ""), PromptLogprobs(1, scores), Delta((5,)), Finished("length", 1, RECEIPT)]
    received = sent(events)
    assert len(received) == 3 + 3
    assert max(message.ByteSize() for message in received) < MESSAGE_BYTES // 16
    collector = Collector()
    for event in read(received, prompt):
        collector.add(event)
    assert collector.answer() == Answer(events[0], (5,), (), scores, events[-1])


def test_what_matched_keeps_its_kind():
    for matched in (None, 0, 7, "", "end"):
        event = Finished("stop", 3, RECEIPT, matched)
        assert read(sent([Started(1, 0, "", ""), event]))[-1] == event


def test_a_receipt_has_every_field_of_the_engines():
    engine = Receipt(2**64 - 1, 1, 2, 9, (3, 4), 5, 6, 7, "f")
    event = Finished("stop", 3, dataclasses.replace(RECEIPT, engine=engine))
    assert read(sent([Started(1, 0, "", ""), event]))[-1].receipt.engine == engine


def delta(seq, **fields):
    return {"delta": {"token_ids": [1], "seq": seq} | fields}


def scores(seq, first=1, count=1, **fields):
    return {"prompt_logprobs": {"first_position": first, "logprobs": [-1.0] * count, "seq": seq} | fields}


BREACHES = {
    "no event": [START, {}],
    "no start": [delta(0)],
    "end without start": [END],
    "two starts": [START, START],
    "start after tokens": [START, delta(0), START],
    "two ends": [START, END, END],
    "tokens after the end": [START, END, delta(0)],
    "lost message": [START, delta(1)],
    "doubled message": [START, delta(0), delta(0)],
    "lost among log-probabilities": [START, scores(0), delta(2)],
    "log-probabilities after tokens": [START, delta(0), scores(1)],
    "of no token": [START, delta(0, token_ids=[])],
    "too few log-probabilities": [START, delta(0, token_ids=[1, 2], logprobs=[-1.0])],
    "too many log-probabilities": [START, delta(0, logprobs=[-1.0, -1.0])],
    "too few others": [START, delta(0, token_ids=[1, 2], logprobs=[-1.0, -1.0], top=[{}])],
    "uneven others": [START, delta(0, logprobs=[-1.0], top=[{"token_ids": [1]}])],
    "position of the first token": [START, scores(0, first=0)],
    "positions behind the prompt": [START, scores(0, first=2, count=2)],
    "no reason": [START, {"finished": {}}],
    "unknown reason": [START, {"finished": {"reason": 99}}],
}


@pytest.mark.parametrize("script", BREACHES.values(), ids=BREACHES.keys())
def test_a_breach_of_the_contract_is_an_error(script):
    """It is found by the last message of each script, before anything is missing at the end."""
    *before, last = messages(*script)
    reader = AnswerReader(PROMPT)
    for message in before:
        reader.event(message)
    with pytest.raises(ContractError):
        reader.event(last)


@pytest.mark.parametrize("script", [[], [START], [START, delta(0)], [START, scores(0)]])
def test_a_stream_without_its_end_is_an_error(script):
    with pytest.raises(ContractError, match="without finished"):
        read(messages(*script))


def test_without_a_breach_the_same_stream_passes():
    read(messages(START, scores(0), scores(1, first=2), delta(2), delta(3), END))


@given(st.lists(st.sampled_from([START, END, delta(0), delta(1), scores(0)]), max_size=5))
@example([START, END])
@example([START, scores(0), delta(1), END])
def test_a_stream_that_passes_has_one_start_and_one_end_and_counts(script):
    try:
        events = read(messages(*script))
    except ContractError:
        return
    assert [type(event) for event in events].count(Started) == 1
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert script[1:-1] in ([], [delta(0)], [scores(0)], [delta(0), delta(1)], [scores(0), delta(1)])
