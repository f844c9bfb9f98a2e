"""One branch of a request inside the engine: its tokens, where its state is, and how far it got."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from deepinfer_jax.handover import Handover
from deepinfer_jax.replay import Restart
from deepinfer_jax.request import Logprob, Receipt, Request
from deepinfer_jax.text.stop_strings import StopMatcher
from deepinfer_jax.text.tokenizer import TextStream


@dataclasses.dataclass
class Sequence:
    """The engine's record of a branch. Host knowledge lags the device by one step.

    Attributes:
        id: unique, in order of arrival.
        request_id, branch, request: whose branch it is.
        seed: of the branch.
        arrival: seconds of a steady clock.
        ends: token ids that end it.
        tokens: prompt and generated tokens the host knows.
        on_way: tokens sampled by steps that were not read; at most one while a step is planned.
        source: the place of that token among the step's samples, on its shard.
        computed: tokens whose rows were dispatched.
        confirmed: tokens whose rows were read back as finite.
        slot, shard, blocks: where its state is; no slot while it waits.
        keys, published: identities of its full blocks, and how many are in the prefix index.
        restart: how it began.
        served: the last step that ran any of its rows.
        passed: how often later requests were admitted before it.
        preemptions: how often it gave way.
        hit_tokens, stored_tokens, received_tokens, computed_rows, replayed_rows: see :class:`Receipt`.
        finish_reason: why it ended; None while it goes on.
        begun: when its first row was dispatched.
        last_token: when its last token came.
        suspended: its state while it is off the device: ``Leaving``, a ``Snapshot``, or an ``Arrival``.
        handover: where its state goes; it ends with its first token then, or behind ``cut`` tokens.
        cut: tokens that are run here; the others run where the state goes. None for all.
        handed: blocks that are on their way there.
        prompt_scores, scores_given: log-probabilities of prompt tokens by position, and whether the caller has them.
    """

    id: int
    request_id: int
    branch: int
    request: Request
    seed: int
    arrival: float
    ends: frozenset[int]
    tokens: list[int]
    stream: TextStream | None = None
    matcher: StopMatcher | None = None
    on_way: int = 0
    source: int = -1
    computed: int = 0
    confirmed: int = 0
    slot: int | None = None
    shard: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    keys: list[bytes] = dataclasses.field(default_factory=list)
    published: int = 0
    restart: Restart = dataclasses.field(default_factory=Restart)
    served: int = 0
    passed: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    stored_tokens: int = 0
    received_tokens: int = 0
    computed_rows: int = 0
    replayed_rows: int = 0
    finish_reason: str | None = None
    begun: float | None = None
    last_token: float | None = None
    suspended: Any = None
    handover: Handover | None = None
    cut: int | None = None
    handed: int = 0
    prompt_scores: dict[int, Logprob] = dataclasses.field(default_factory=dict)
    scores_given: bool = False

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def length(self) -> int:
        """Tokens, with the one on its way."""
        return len(self.tokens) + self.on_way

    @property
    def stop(self) -> int:
        """Tokens that are run here as far as is known, with the one on its way."""
        return self.length if self.cut is None else self.cut

    @property
    def generated(self) -> int:
        """Generated tokens, with the one on its way."""
        return self.length - self.prompt_length

    @property
    def limit(self) -> int:
        """Tokens after which it ends, if nothing ends it before."""
        most = self.request.params.max_tokens
        return most if self.handover is None else min(most, len(self.request.answer) + 1)

    @property
    def wants_step(self) -> bool:
        """Whether it has rows to run: not when the token on its way is its last by count."""
        if self.finish_reason is not None or self.slot is None:
            return False
        if self.cut is not None:
            return self.computed < self.cut
        return self.generated < self.limit or self.computed < self.prompt_length

    def image_rows(self, start: int, stop: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Image marks and embeddings of the tokens ``start`` to ``stop``; None where no image reaches in."""
        spans = [span for span in self.request.images if span.start < stop and span.stop > start]
        if not spans:
            return None, None
        mark = np.zeros(stop - start, bool)
        embeddings = np.zeros((stop - start, spans[0].embeddings.shape[1]), np.float32)
        for span in spans:
            first, last = max(start, span.start), min(stop, span.stop)
            mark[first - start : last - start] = True
            embeddings[first - start : last - start] = span.embeddings[first - span.start : last - span.start]
        return mark, embeddings

    @property
    def queue_seconds(self) -> float | None:
        """From arrival until its first row was dispatched; None before."""
        return None if self.begun is None else self.begun - self.arrival

    def receipt(self, fingerprint: str) -> Receipt:
        """What was done for it so far."""
        return Receipt(
            seed=self.seed,
            hit_tokens=self.hit_tokens,
            stored_tokens=self.stored_tokens,
            received_tokens=self.received_tokens,
            replays=self.restart.replays,
            computed_tokens=self.computed_rows,
            replayed_tokens=self.replayed_rows,
            preemptions=self.preemptions,
            fingerprint=fingerprint,
        )


def branch_seed(seed: int, branch: int) -> int:
    """The seed of a branch: branch 0 uses the request's own, the others a mix of both (SplitMix64, Steele 2014)."""
    if branch == 0:
        return seed
    mask = (1 << 64) - 1
    mixed = (seed + branch * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)
