"""What comes for a request, as Python values: the events of its stream, and the whole answer."""

from __future__ import annotations

import dataclasses

from deepinfer_jax.request import Logprob, Receipt


@dataclasses.dataclass(frozen=True)
class Started:
    """The request has left the queue.

    Attributes:
        prompt_tokens: of the prompt, ``cached_tokens`` of them found in a cache.
        fingerprint: of the state, hexadecimal.
        request_id: the one it has on the server.
        worker: who answers.
    """

    prompt_tokens: int
    cached_tokens: int
    fingerprint: str
    request_id: str
    worker: str = ""


@dataclasses.dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens, the first of them at ``first_position``."""

    first_position: int
    logprobs: tuple[Logprob, ...]


@dataclasses.dataclass(frozen=True)
class Delta:
    """New tokens, and their log-probabilities where asked for."""

    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()


@dataclasses.dataclass(frozen=True)
class Timing:
    """Where the time went, in seconds; None was not measured. The protocol's ``Timing`` says what each one is."""

    queue: float | None = None
    prefill: float | None = None
    transfer: float | None = None
    exposed_transfer: float | None = None
    decode: float | None = None
    total: float | None = None


@dataclasses.dataclass(frozen=True)
class ServedReceipt:
    """What was done for a request, by which servers.

    Attributes:
        engine: the receipt of the engine that generated the last token.
        worker, prefill_worker: who did that, and who computed the prompt where that is another one.
        handed_over_bytes: size of the state between them, by ``transport``.
        exposed_bytes: of these, what had not arrived when the last token was computed.
        failovers: how often the answer went on with another worker after tokens of it had come.
        timing: where the time went.
    """

    engine: Receipt
    worker: str = ""
    prefill_worker: str = ""
    handed_over_bytes: int = 0
    exposed_bytes: int = 0
    transport: str = ""
    failovers: int = 0
    timing: Timing = dataclasses.field(default_factory=Timing)


@dataclasses.dataclass(frozen=True)
class Finished:
    """The end of an answer.

    Attributes:
        reason: ``stop``, ``length``, ``content_filter`` or ``cancelled``.
        completion_tokens: tokens of the answer.
        matched: the stop string or token id that ended it.
        draft_tokens, accepted_tokens: drafts that were verified, and those of them that were kept.
        receipt: what was done for it.
    """

    reason: str
    completion_tokens: int
    receipt: ServedReceipt
    matched: str | int | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0


Event = Started | PromptLogprobs | Delta | Finished


@dataclasses.dataclass(frozen=True)
class Answer:
    """A whole stream: its beginning, all tokens with their log-probabilities, and its end."""

    started: Started
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    prompt_logprobs: tuple[Logprob, ...]
    finished: Finished


class Collector:
    """Joins the events of a stream."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._tokens: list[int] = []
        self._logprobs: list[Logprob] = []
        self._prompt_logprobs: list[Logprob] = []

    def add(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, Started):
            self._started = event
        elif isinstance(event, PromptLogprobs):
            self._prompt_logprobs += event.logprobs
        elif isinstance(event, Delta):
            self._tokens += event.tokens
            self._logprobs += event.logprobs
        else:
            self._finished = event

    def answer(self) -> Answer:
        """What came, once the stream has ended."""
        assert self._started is not None
        assert self._finished is not None
        return Answer(
            self._started,
            tuple(self._tokens),
            tuple(self._logprobs),
            tuple(self._prompt_logprobs),
            self._finished,
        )
