"""What a caller asks for, checked before anything is queued, and what comes back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError

LARGEST_SEED = (1 << 64) - 1
MOST_LOGPROBS = 20
MOST_BRANCHES = 128
MOST_BIASES = 128
MOST_STOP_IDS = 16  # with the model's end token
LARGEST_BIAS = 100.0
LARGEST_PENALTY = 2.0


def _check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    accepted = f"a whole number, {least} or more" if most is None else f"a whole number, {least} to {most}"
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        raise InputError(name, value, accepted)


def _check_number(name: str, value: object, least: float, most: float, *, above: bool = False) -> None:
    """``above``: ``least`` itself is refused."""
    accepted = f"a number {'above' if above else 'from'} {least:g} to {most:g}"
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InputError(name, value, accepted)
    if not least <= value <= most or (above and value == least):
        raise InputError(name, value, accepted)


def _is_id(token: object, vocabulary: int) -> bool:
    # Numpy's integers are welcome; its booleans are none, and Python's are.
    if isinstance(token, bool):
        return False
    return isinstance(token, Integral) and 0 <= int(token) < vocabulary


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Scores are processed in this order: repetition, presence and frequency penalties, logit bias, temperature, then the
    filters top-k, top-p and min-p. Penalties count generated tokens; repetition counts the prompt's too.

    Attributes:
        max_tokens: most tokens to generate; 0 generates none (for prompt log-probabilities).
        temperature: 0 takes the likeliest token.
        top_k: keep so many likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens that together have this probability.
        min_p: keep tokens with at least this share of the likeliest one's probability.
        presence_penalty: subtracted from the score of every token that was generated before.
        frequency_penalty: the same, once for each time.
        repetition_penalty: scores of tokens seen before are divided by it if positive, else multiplied.
        logit_bias: added to the scores of some tokens.
        stop_ids: tokens that end the request besides the end token; they are not part of its text.
        stop: strings that end it; the text ends before them.
        ignore_eos: the end token does not end it.
        min_tokens: no end or stop token before so many tokens were generated.
        seed: a number below 2^64; None draws one, which the receipt names.
        n: branches; branch i folds i into the seed.
        logprobs: report the log-probability of every chosen token and of so many likeliest ones; None reports none.
        prompt_logprobs: the same for the prompt's tokens from the second on.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_whole("max_tokens", self.max_tokens, 0)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_whole("top_k", self.top_k, 0)
        _check_number("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -LARGEST_PENALTY, LARGEST_PENALTY)
        _check_number("frequency_penalty", self.frequency_penalty, -LARGEST_PENALTY, LARGEST_PENALTY)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        if len(self.logit_bias) > MOST_BIASES:
            raise InputError("logit_bias", f"{len(self.logit_bias)} tokens", f"at most {MOST_BIASES}")
        if len(self.stop_ids) >= MOST_STOP_IDS:
            raise InputError("stop_ids", f"{len(self.stop_ids)} tokens", f"at most {MOST_STOP_IDS - 1}")
        for token, bias in self.logit_bias.items():
            _check_number(f"logit_bias[{token}]", bias, -LARGEST_BIAS, LARGEST_BIAS)
        if any(not text for text in self.stop):
            raise InputError("stop", self.stop, "strings that are not empty")
        _check_whole("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise InputError("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, LARGEST_SEED)
        _check_whole("n", self.n, 1, MOST_BRANCHES)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), 0, MOST_LOGPROBS)

    @property
    def penalised(self) -> bool:
        """Whether tokens seen so far change the scores."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check(self, prompt: Sequence[int], config: ModelConfig) -> None:
        """Check the request against a model.

        Raises:
            InputError: the prompt is empty, an id lies outside the vocabulary, or prompt and answer are too long.
        """
        if not prompt:
            raise InputError("prompt", list(prompt), "at least one token")
        accepted = f"0 to {config.vocab_size - 1}, the ids of this model's vocabulary"
        for name, tokens in (("token id", prompt), ("stop_ids", self.stop_ids), ("logit_bias", self.logit_bias)):
            for token in tokens:
                if not _is_id(token, config.vocab_size):
                    raise InputError(name, token, accepted)
        total = len(prompt) + self.max_tokens
        if total > config.max_position_embeddings:
            limit = f"at most max_position_embeddings {config.max_position_embeddings}"
            raise InputError("prompt and new tokens", total, limit, "shorten the prompt or ask for fewer tokens")


@dataclasses.dataclass(frozen=True)
class ImageSpan:
    """An image in a prompt: positions ``start`` to ``stop``, what identifies it, and its embeddings.

    ``embeddings``: float ``[stop - start, hidden]``.
    """

    start: int
    stop: int
    digest: bytes
    embeddings: Any = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how it is answered.

    Attributes:
        prompt: token ids.
        params: sampling parameters.
        answer: tokens that were generated before, by an engine that handed over or failed. Limits, penalties and stop
            strings count them; news hold what comes behind them.
        priority: higher ones come first.
        deadline: seconds after arrival at which the request ends unfinished; None has no end.
        salt: requests share cached prefixes only with those of the same salt.
        images: spans of the prompt that are images, in order.
        read_cache: whether cached prefixes may serve it. Prompt log-probabilities never use any.
    """

    prompt: tuple[int, ...]
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    priority: int = 0
    deadline: float | None = None
    salt: bytes = b""
    images: tuple[ImageSpan, ...] = ()
    read_cache: bool = True
    answer: tuple[int, ...] = ()

    def check(self, config: ModelConfig) -> None:
        """Check against a model.

        Raises:
            InputError: names the first value that cannot be served, and what is accepted.
        """
        self.params.check(self.prompt, config)
        if self.deadline is not None and not self.deadline > 0:
            raise InputError("deadline", self.deadline, "seconds above 0")
        if self.images and config.vision is None:
            raise InputError("images", len(self.images), "none, as this model has no vision")
        end = 0
        for span in self.images:
            if not end <= span.start < span.stop <= len(self.prompt):
                accepted = f"inside the prompt and behind the image before, {end} to {len(self.prompt)}"
                raise InputError("image span", (span.start, span.stop), accepted)
            shape, end = (span.stop - span.start, config.hidden_size), span.stop
            if tuple(span.embeddings.shape) != shape:
                raise InputError("image embeddings", tuple(span.embeddings.shape), f"shape {shape}, of the span")


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Log-probability of a token under the raw scores, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Receipt:
    """What was done for a request; it answers why an output differs from another.

    Attributes:
        seed: of the branch, given or drawn.
        hit_tokens: prompt tokens found in device pages or the store, ``stored_tokens`` of them in the store.
        received_tokens: tokens whose state was handed over by another engine.
        replays: hit lengths of the bounded replays that its state descends from; () is exact.
        computed_tokens: rows that were run.
        replayed_tokens: those among them whose pages were held already.
        preemptions: how often it gave way.
        fingerprint: of the state.
    """

    seed: int
    hit_tokens: int
    stored_tokens: int
    received_tokens: int
    replays: tuple[int, ...]
    computed_tokens: int
    replayed_tokens: int
    preemptions: int
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class Output:
    """News of one branch of a request: what came with one step.

    Attributes:
        request_id, branch: whose news.
        tokens: new tokens; one that ended the answer is not among them.
        text: new text, where the engine has a tokenizer.
        logprobs: of the new tokens, where asked for.
        prompt_logprobs: of the prompt's tokens from the second on; once, with the first news.
        finish_reason: ``stop``, ``length``, ``abort``, ``deadline``, ``handover`` or ``error``; None while it goes on.
        matched: the stop string or token id that ended it.
        error: what went wrong, with reason ``error``.
        receipt: with the first news, of what is known then, and with the last.
        queue_seconds: from arrival until the first row ran; with the receipt, None where none has run.
    """

    request_id: int
    branch: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] | None = None
    finish_reason: str | None = None
    matched: str | int | None = None
    error: str | None = None
    receipt: Receipt | None = None
    queue_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """The whole answer of one branch; fields as in :class:`Output`."""

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[Logprob, ...]
    prompt_logprobs: tuple[Logprob, ...] | None
    finish_reason: str
    matched: str | int | None
    error: str | None
    receipt: Receipt

    @classmethod
    def of(cls, news: Sequence[Output]) -> Completion:
        """Join the news of a branch, the last one included."""
        last = news[-1]
        assert last.finish_reason is not None
        assert last.receipt is not None
        return cls(
            tokens=tuple(token for output in news for token in output.tokens),
            text="".join(output.text for output in news),
            logprobs=tuple(logprob for output in news for logprob in output.logprobs),
            prompt_logprobs=next((output.prompt_logprobs for output in news if output.prompt_logprobs), None),
            finish_reason=last.finish_reason,
            matched=last.matched,
            error=last.error,
            receipt=last.receipt,
        )
