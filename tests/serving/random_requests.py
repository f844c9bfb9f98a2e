"""Random requests that share beginnings: drawn from a seed, and resolved as the answers come that they refer to."""

import dataclasses
import functools
from collections import Counter

import numpy as np

from deepinfer_jax.checkpoint.default_model import default_model
from deepinfer_jax.request import SamplingParams
from deepinfer_jax.text.tokenizer import Tokenizer
from tests.deepinfer_jax.test_engine_machine import stream
from tests.running_engines import BLOCK_TOKENS, KEEP, SETTINGS

CONTEXT = SETTINGS.max_context
WINDOW = 16
LONGEST_RING = WINDOW + 5 + 1
# Around the ends of blocks, windows, rings and kept rows; the others are uniform.
EDGES = (1, 2, 15, 16, 17, 19, 20, 21, 22, 23, 31, 32, 33, 36, 37, 47, 48, 49, 63, 64, 65, 77)
LETTERS = ("Q", "a", "z7", "e", "T", "0", "?", "k", "M", "[")
# So far back that most parents have ended when their children are due.
LEAST_DISTANCE = 6


@dataclasses.dataclass(frozen=True)
class Plan:
    """A request before it is known what the ones before it were answered.

    Attributes:
        params: without the stop string of ``stop_at``.
        own: the tokens of its prompt, behind those that it takes from a parent.
        parent: number of an earlier request; None takes nothing.
        taken: so many tokens of the parent's prompt and answer; None takes the prompt alone, and nothing is added.
        stop_at: it ends where the parent's answer has these two tokens.
    """

    params: SamplingParams
    own: tuple[int, ...] = ()
    parent: int | None = None
    taken: int | None = 0
    stop_at: int | None = None
    branch: int = 0
    priority: int = 0
    salt: bytes = b""
    read_cache: bool = True

    @property
    def more(self):
        """What a client is told besides prompt and parameters."""
        names = ("branch", "priority", "salt", "read_cache")
        return {name: getattr(self, name) for name in names}

    def resolved(self, before, tokenizer):
        """Prompt and parameters; ``before``: prompt and answered tokens of its parent."""
        prompt, params = self.own, self.params
        if before is not None:
            first, answer = before
            known = first if self.taken is None else (*first, *answer)[: self.taken]
            prompt = (*known, *self.own)
            if self.stop_at is not None and len(answer) > self.stop_at + 1:
                text = tokenizer.decode(answer[self.stop_at : self.stop_at + 2])
                params = dataclasses.replace(params, stop=(*params.stop, text))
        return prompt[: CONTEXT - params.max_tokens], params


def drawn_params(random):
    """Numbers pass through 32 bits unchanged."""

    def one(*values):
        return values[random.integers(len(values))]

    prompt_logprobs = one(*[None] * 9, 0, 2)
    most = int(random.integers(1, 17))
    penalised = random.random() < 0.4
    return SamplingParams(
        max_tokens=0 if prompt_logprobs is not None and random.random() < 0.3 else most,
        temperature=one(0.0, 0.0, 0.75, 1.5),
        top_k=one(0, 0, 0, 5),
        top_p=one(1.0, 1.0, 1.0, 0.875),
        min_p=one(0.0, 0.0, 0.0, 0.0625),
        presence_penalty=one(0.0, 1.0, -0.5) if penalised else 0.0,
        frequency_penalty=one(0.0, 0.5) if penalised else 0.0,
        repetition_penalty=one(1.0, 1.25, 1.5) if penalised else 1.0,
        logit_bias=dict(one((), (), (), ((5, 3.0), (7, -100.0), (40, 1.5)))),
        stop_ids=one(*[frozenset()] * 3, frozenset(range(10, 25))),
        stop=one((), (), (), LETTERS),
        ignore_eos=bool(random.integers(2)),
        seed=one(None, *range(4), (1 << 64) - 1),
        logprobs=one(None, 0, 3, 20),
        prompt_logprobs=prompt_logprobs,
    )


def _with_least(params, random):
    least = int(random.integers(params.max_tokens + 1)) if random.random() < 0.2 else 0
    return dataclasses.replace(params, min_tokens=least)


def drawn_plan(random, number, earlier):
    """A fresh prompt of a shared stream, the next turn of a conversation, a part of one, or the same once more."""
    params, kind = _with_least(drawn_params(random), random), random.random()
    more = {
        "priority": int(random.integers(2)),
        "salt": b"apart" if random.random() < 0.08 else b"",
        "read_cache": bool(random.random() < 0.93),
    }
    if number < LEAST_DISTANCE or kind < 0.4:
        length = int(random.choice(EDGES) if random.random() < 0.6 else random.integers(1, 77))
        return Plan(params, stream(int(random.integers(3)))[:length], **more)
    parent = int(random.integers(max(0, number - 60), number - LEAST_DISTANCE + 1))
    if kind < 0.65:
        return Plan(params, stream(9)[: random.integers(1, 14)], parent, CONTEXT, **more)
    if kind < 0.82:
        return Plan(params, stream(8)[: random.integers(0, 10)], parent, int(random.integers(17, 75)), **more)
    again = dataclasses.replace(earlier[parent].params, max_tokens=max(6, earlier[parent].params.max_tokens))
    if kind < 0.91:
        # The same answer, up to two of its tokens.
        return Plan(again, (), parent, None, int(random.integers(0, 4)), branch=earlier[parent].branch)
    return Plan(again, (), parent, None, branch=int(random.integers(1, 128)), priority=more["priority"])


@functools.cache
def plans(count, seed=7):
    """So many requests; of two counts the smaller one's are the beginning of the larger one's."""
    random, made = np.random.default_rng(seed), []
    for number in range(count):
        made.append(drawn_plan(random, number, made))
    return tuple(made)


@functools.cache
def tokenizer():
    """Of the shipped model: the ids of the tiny one are single characters."""
    return Tokenizer.from_directory(default_model())


def features(plan, prompt, params):
    """What a resolved request has that could go wrong."""
    length = len(prompt)
    found = {
        "odd length": length % 2 == 1,
        "whole blocks": length % BLOCK_TOKENS == 0,
        "inside a block": length % BLOCK_TOKENS != 0,
        "one more than whole blocks": length > 1 and length % BLOCK_TOKENS == 1,
        "one token": length == 1,
        "within the window": length <= WINDOW,
        "beyond the window": length > WINDOW,
        "beyond the rings": length > LONGEST_RING,
        "as many as are kept": length == KEEP,
        "beyond what is kept": length > KEEP,
        "twice beyond what is kept": length > 3 * KEEP,
        "shares a stream": plan.parent is None,
        "continues an answer": plan.parent is not None and plan.taken == CONTEXT,
        "continues a part": plan.parent is not None and plan.taken not in (None, CONTEXT),
        "comes once more": plan.parent is not None and plan.taken is None,
        "branch": plan.branch > 0,
        "salt": plan.salt != b"",
        "reads no cache": not plan.read_cache,
        "priority": plan.priority > 0,
        "likeliest token": params.temperature == 0,
        "noise": params.temperature > 0,
        "seed": params.seed is not None,
        "large seed": params.seed == (1 << 64) - 1,
        "no seed": params.seed is None and params.temperature > 0,
        "top k": params.top_k > 0,
        "top p": params.top_p < 1,
        "min p": params.min_p > 0,
        "presence": params.presence_penalty != 0,
        "frequency": params.frequency_penalty != 0,
        "repetition": params.repetition_penalty != 1,
        "bias": bool(params.logit_bias),
        "stop ids": bool(params.stop_ids),
        "stop strings": bool(params.stop),
        "end token ignored": params.ignore_eos,
        "least tokens": params.min_tokens > 0,
        "log-probabilities": params.logprobs is not None,
        "likeliest tokens": bool(params.logprobs),
        "prompt log-probabilities": params.prompt_logprobs is not None,
        "no token": params.max_tokens == 0,
        "one token asked for": params.max_tokens == 1,
    }
    return Counter(name for name, has in found.items() if has), set(found)
