"""Messages of any kind for the calls of the protocol: by their definition, spoiled in one place, and as mere bytes.

The calls and their fields are taken from the definitions, so that new ones are fuzzed, or missed by name.
"""

import math

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import strategies as st

from serving.proto.deepinfer.v1 import inference_pb2, kv_transfer_pb2, prefill_pb2

FILES = (inference_pb2, prefill_pb2, kv_transfer_pb2)
CLEAR = object()
"""Spoils a field by leaving it out."""

_WHOLE = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


def methods():
    """Every call of the protocol by its full name, with its definition."""
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from ((f"/{service.full_name}/{method.name}", method) for method in service.methods)


def request_class(method):
    return message_factory.GetMessageClass(method.input_type)


def leaves(descriptor, prefix=""):
    """Paths of all fields of a message that are no messages themselves; maps are one field."""
    for field in descriptor.fields:
        path = f"{prefix}{field.name}"
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            yield path
        else:
            yield from leaves(field.message_type, f"{path}.")


def _scalars(field):
    if field.cpp_type in _WHOLE:
        least, most = _WHOLE[field.cpp_type]
        return st.integers(least, most) | st.integers(0, 100) | st.sampled_from([least, most])
    return {
        FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
        FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
        FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
        FieldDescriptor.CPPTYPE_STRING: st.binary(max_size=80)
        if field.type == FieldDescriptor.TYPE_BYTES
        else st.text(max_size=150),
    }[field.cpp_type]


def _fields(descriptor):
    """Dictionaries of a message's fields, any of which may be missing."""
    return st.fixed_dictionaries({}, optional={field.name: _values(field) for field in descriptor.fields})


def _values(field):
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return st.dictionaries(_scalars(key), _scalars(value), max_size=4)
    one = _scalars(field) if field.message_type is None else _fields(field.message_type)
    return st.lists(one, max_size=4) if field.is_repeated else one


def any_messages(method):
    """Messages with any values in any fields; what is of one alternative keeps one of them."""
    build = request_class(method)
    return _fields(method.input_type).map(lambda fields: build(**fields))


def damaged(content):
    """Some bytes with a few of them changed, left out or doubled."""

    def damage(changes, cut, whole):
        spoiled = bytearray(content)
        for place, value in changes:
            spoiled[place % len(spoiled)] = value
        end = len(spoiled) if whole else cut % (len(spoiled) + 1)
        return bytes(spoiled[:end])

    if not content:
        return st.just(content)
    changes = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4)
    return st.builds(damage, changes, st.integers(0, 2**16), st.booleans())


def spoiled(message, path, value):
    """A copy of a message with another value in one field."""
    copy = type(message)()
    copy.CopyFrom(message)
    *parents, name = path.split(".")
    place = copy
    for parent in parents:
        field = place.DESCRIPTOR.fields_by_name[parent]
        place = getattr(place, parent)
        if field.is_repeated:
            place = place[0] if place else place.add()
    if value is CLEAR:
        place.ClearField(name)
    elif isinstance(value, dict):
        place.ClearField(name)
        place.MergeFrom(type(place)(**{name: value}))
    elif isinstance(value, list):
        place.ClearField(name)
        getattr(place, name).extend(value)
    else:
        setattr(place, name, value)
    return copy


NUMBERS = (math.nan, math.inf, -math.inf, 3e38, -3e38)
MOST = 2**32 - 1
HUGE = 200_000

# Values of the fields of GenerateRequest that a server of a vocabulary of 96 and a context of 96 tokens refuses.
GENERATE = {
    "request_id": ["a b", "ä", "a" * 129, "\0", "a" * HUGE],
    "prompt_token_ids": [CLEAR, [96], [0, MOST], [1] * 97, [1] * HUGE],
    "sampling.temperature": [-0.5, 100.5, *NUMBERS],
    "sampling.top_p": [0, 1.5, -1, *NUMBERS],
    "sampling.min_p": [-0.5, 1.5, *NUMBERS],
    "sampling.presence_penalty": [2.5, -2.5, *NUMBERS],
    "sampling.frequency_penalty": [2.5, -2.5, *NUMBERS],
    "sampling.repetition_penalty": [0, -1, 101, *NUMBERS],
    "sampling.logit_bias": [
        {96: 1.0},
        {MOST: 1.0},
        {1: 101.0},
        {1: math.nan},
        {1: -math.inf},
        dict.fromkeys(range(HUGE), 1),
    ],
    "sampling.min_tokens": [5, MOST],
    "sampling.branch": [128, MOST],
    "stop.stop_token_ids": [[96], [MOST], [1] * 16, [1] * HUGE],
    "stop.strings": [[""], ["a" * 1025], ["a"] * 17, ["a"], [""] * HUGE],
    "constraint.json_schema": ["", "{}", "a" * HUGE],
    "constraint.regex": ["", "a*"],
    "constraint.ebnf": ["", "a"],
    "constraint.any_json": [True, False],
    "constraint.tools.tools_json": ["", "[]"],
    "constraint.tools.required": [True, False],
    "constraint.start_after_token_ids": [[], [1], [MOST]],
    "images.webp": [b"", b"a", bytes(HUGE)],
    "images.width": [0, MOST],
    "images.height": [0, MOST],
    "images.placeholder_index": [0, MOST],
    "images.token_count": [0, MOST],
    "logprobs.generated": [21, MOST],
    "logprobs.prompt": [21, MOST],
    "cache.salt": [bytes(65), bytes(HUGE)],
    "cache.retention_class": [4, -1, 2**31 - 1],
    "cache.ttl.seconds": [0, -1, -(2**63), 2**63 - 1],
    "cache.ttl.nanos": [-1, 10**9, 2**31 - 1],
    "cache.write": [False],
    "cache.replay_mode": [3, -1, 2**31 - 1],
    "traceparent": ["a b", "a\n", "a" * 257],
    "max_tokens": [77, 10**6, MOST],
    "kv.kv_id": ["", "a b", "a" * 129],
    "kv.endpoints.uri": ["", "a", "shm://a/b", "grpc://a b", "grpc://" + "a" * HUGE],
    "kv.endpoints.opaque": [bytes(HUGE)],
    "kv.fingerprint": ["", "0" * 63, "G" * 64, "a" * HUGE],
    "kv.mode": [0, 3, -1],
    "kv.worker": ["a" * 257, "a" * HUGE],
    "first_token": [96, MOST],
    "prompt_len": [0, 21, MOST],
}
# Every value of them is accepted, or says nothing that is used.
GENERATE_FREE = {
    "sampling.top_k",
    "sampling.seed",
    "stop.ignore_eos",
    "cache.read",
    "priority",
    "kv.bytes",
    "kv.pages",
    "kv.lease_expires.seconds",
    "kv.lease_expires.nanos",
    # Another length than the prompt's is a state that does not fit: FAILED_PRECONDITION.
    "kv.computed_tokens",
}
PREFILL = {f"request.{path}": values for path, values in GENERATE.items()} | {
    "mode": [0, 2, 3, -1],
    "request.prompt_len": [0, 1, 19, 21, MOST],
}
PULL = {
    "kv_id": ["", "a b", "a" * HUGE],
    "fingerprint": ["", "0" * 63, "G" * 64],
    "parts": [[9], [-1], [1, 2, 0]],
    "groups": [[MOST], [0, 99]],
    "pages.first": [MOST],
    "layers.first": [MOST],
    "resume.section": ["", "a", "a" * HUGE],
    "resume.offset": [2**63, 2**64 - 1],
    "chunk_bytes": [0, 1, 65_535, 2_097_153, MOST],
}
"""Values that a state's holder refuses; a pull resumes at ``meta``."""

OFFER = {"kv_id": ["", "a b", "a" * HUGE], "fingerprint": ["", "0" * 63, "G" * 64], "first": [MOST]}
IDS = ["", "a b", "ä", "a" * 129, "a" * HUGE]
SPOILED = {
    "/deepinfer.v1.Inference/Generate": (GENERATE, GENERATE_FREE),
    "/deepinfer.v1.Inference/Abort": ({"request_id": IDS}, set()),
    "/deepinfer.v1.Inference/GetModelInfo": ({}, set()),
    "/deepinfer.v1.Inference/GetLoad": ({}, set()),
    "/deepinfer.v1.Prefill/Prefill": (PREFILL, {f"request.{path}" for path in GENERATE_FREE}),
    "/deepinfer.v1.Prefill/ReleaseKv": ({"kv_id": IDS}, set()),
    "/deepinfer.v1.KvTransfer/Describe": ({"kv_id": IDS}, set()),
    # A range that ends beyond what there is ends there.
    "/deepinfer.v1.KvTransfer/Pull": (PULL, {"sums", "pages.stop", "layers.stop"}),
    # Nothing is offered where no transfer engine runs; the scenarios of tests/serving/jax_scenarios.py have one.
    "/deepinfer.v1.KvTransfer/Offer": (OFFER, {"taken"}),
}
"""By call: values that are refused by field, and fields that take every value."""
