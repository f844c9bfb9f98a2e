"""Requests and events of every kind, for property tests.

Strategies draw functions without arguments that make the values: checks of types, which happen while values are made,
take random samples, and hypothesis refuses that inside a strategy.
"""

import dataclasses
import functools
import struct

from hypothesis import strategies as st

from deepinfer_jax.request import Logprob, Receipt, SamplingParams
from serving.events import Delta, Finished, PromptLogprobs, ServedReceipt, Started, Timing
from serving.generate_call import GenerateCall
from serving.proto.deepinfer.v1 import types_pb2
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvEndpoint, KvHandle
from serving.request_messages import RequestLimits

LIMITS = RequestLimits(vocabulary=500, max_context=64)
COUNTS = st.integers(0, 2**32 - 1)
LONG_COUNTS = st.integers(0, 2**64 - 1)
IDS = st.integers(0, LIMITS.vocabulary - 1)
PRINTABLE = st.characters(min_codepoint=33, max_codepoint=126)
TEXTS = st.text(max_size=20)


def numbers(least, most):
    """Numbers that 32 bits hold."""
    return st.floats(least, most, width=32)


def just_above_zero(most):
    """Numbers above 0 that 32 bits hold."""
    smallest = struct.unpack("<f", struct.pack("<I", 1))[0]
    return st.floats(smallest, most, width=32)


@st.composite
def sampling_params(draw):
    most = draw(st.integers(0, 1000))
    levels = st.none() | st.integers(0, 20)
    return functools.partial(
        SamplingParams,
        max_tokens=most,
        temperature=draw(numbers(0, 100)),
        top_k=draw(COUNTS),
        top_p=draw(just_above_zero(1)),
        min_p=draw(numbers(0, 1)),
        presence_penalty=draw(numbers(-2, 2)),
        frequency_penalty=draw(numbers(-2, 2)),
        repetition_penalty=draw(just_above_zero(100)),
        logit_bias=draw(st.dictionaries(IDS, numbers(-100, 100), max_size=5)),
        stop_ids=draw(st.frozensets(IDS, max_size=15)),
        stop=draw(st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple)),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.integers(0, most)),
        seed=draw(st.none() | LONG_COUNTS),
        logprobs=draw(levels),
        prompt_logprobs=draw(levels),
    )


def handles():
    return st.builds(
        KvHandle,
        kv_id=st.text(PRINTABLE, min_size=1, max_size=20),
        endpoints=st.just([KvEndpoint(uri="grpc://127.0.0.1:7", opaque=b"\0")]),
        fingerprint=st.binary(min_size=32, max_size=32).map(bytes.hex),
        bytes=LONG_COUNTS,
        pages=COUNTS,
        mode=st.sampled_from([types_pb2.PREFILL_MODE_FULL, types_pb2.PREFILL_MODE_ENCODER_ONLY]),
    )


@st.composite
def generate_calls(draw):
    ids = draw(st.lists(IDS, min_size=1, max_size=LIMITS.max_context))
    length = draw(st.integers(1, len(ids)))
    kv, params = draw(st.none() | handles()), draw(sampling_params())
    fields = {
        "prompt": tuple(ids[:length]),
        "answer": tuple(ids[length:]),
        "request_id": draw(st.text(PRINTABLE, max_size=128)),
        "branch": draw(st.integers(0, 127)),
        "priority": draw(st.integers(-(2**31), 2**31 - 1)),
        "salt": draw(st.binary(max_size=64)),
        "read_cache": draw(st.booleans()),
        "write_cache": draw(st.booleans()),
        "retention": draw(st.sampled_from([None, "transient", "chat", "agent", 0.5, 3600.0, 86400.0 * 7])),
        "replay": draw(st.sampled_from([None, "exact", "bounded"])),
        "kv": kv,
        "first_token": None if kv is None else draw(st.none() | IDS),
        "traceparent": draw(st.text(PRINTABLE, max_size=55)),
    }
    return lambda: GenerateCall(params=params(), **fields)


@st.composite
def logprobs(draw, tokens):
    """Those of some tokens, with others or without."""
    tops = draw(st.integers(0, 3))
    top = st.lists(st.tuples(COUNTS, numbers(-50, 0)), min_size=tops, max_size=tops).map(tuple)
    entries = [(token, draw(numbers(-50, 0)), draw(top)) for token in tokens]
    return lambda: tuple(Logprob(*entry) for entry in entries)


@st.composite
def deltas(draw):
    tokens = tuple(draw(st.lists(COUNTS, min_size=1, max_size=5)))
    scores = draw(st.just(tuple) | logprobs(tokens))
    return lambda: Delta(tokens, scores())


@st.composite
def prompt_logprobs(draw, prompt):
    """Log-probabilities of a prompt from its second token on."""
    scores = draw(logprobs(prompt[1:]))
    return lambda: PromptLogprobs(1, scores())


@st.composite
def started(draw):
    fields = draw(st.tuples(COUNTS, COUNTS, TEXTS, TEXTS, TEXTS))
    return lambda: Started(*fields)


@st.composite
def finished(draw):
    seconds = st.none() | st.floats(0, 1e6)
    times = draw(st.tuples(*[seconds] * len(dataclasses.fields(Timing))))
    counts = {field.name: draw(COUNTS) for field in dataclasses.fields(Receipt)}
    engine = counts | {"replays": tuple(draw(st.lists(COUNTS, max_size=4))), "fingerprint": draw(TEXTS)}
    served = draw(st.tuples(TEXTS, TEXTS, LONG_COUNTS, LONG_COUNTS, TEXTS, COUNTS))
    reason = draw(st.sampled_from(["stop", "length", "content_filter", "cancelled"]))
    matched, numbers = draw(st.none() | COUNTS | TEXTS), draw(st.tuples(COUNTS, COUNTS, COUNTS))

    def make():
        receipt = ServedReceipt(Receipt(**engine), *served, Timing(*times))
        return Finished(reason, numbers[0], receipt, matched, *numbers[1:])

    return make
