"""News of an engine's request as the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from deepinfer_jax.request import Output, Receipt
from serving.errors import refusal
from serving.events import Delta, Event, Finished, PromptLogprobs, ServedReceipt, Started, Timing

_REASONS = {"stop": "stop", "length": "length", "abort": "cancelled"}


class AnswerEvents:
    """Makes the events of one branch from its news, however many come at a time."""

    def __init__(
        self,
        prompt_tokens: int,
        request_id: str,
        worker: str,
        *,
        answered: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``answered``: tokens of the answer that came before, from another worker."""
        self._prompt_tokens, self._request_id, self._worker, self._clock = prompt_tokens, request_id, worker, clock
        self._arrival = clock()
        self._first: float | None = None
        self._count = answered
        self._started = False
        self.ended = False

    def events(self, news: Sequence[Output]) -> Iterator[Event]:
        """The events of news that came together: all their tokens are one event.

        Raises:
          DeadlineError: the engine ended the request at its deadline.
          ServerFaultError: it failed.
        """
        if not self._started:
            self._started = True
            yield self._start(news[0])
        for output in news:
            if output.prompt_logprobs:
                yield PromptLogprobs(1, output.prompt_logprobs)
        tokens = tuple(token for output in news for token in output.tokens)
        if tokens:
            self._count += len(tokens)
            self._first = self._clock() if self._first is None else self._first
            yield Delta(tokens, tuple(logprob for output in news for logprob in output.logprobs))
        last = news[-1]
        if last.finish_reason is not None:
            self.ended = True
            yield self._finish(last)

    def _start(self, first: Output) -> Started:
        receipt = _receipt(first)
        return Started(self._prompt_tokens, receipt.hit_tokens, receipt.fingerprint, self._request_id, self._worker)

    def _finish(self, last: Output) -> Finished:
        assert last.finish_reason is not None
        if last.finish_reason == "deadline":
            raise refusal("DEADLINE_PASSED", "the deadline passed")
        if last.finish_reason not in _REASONS:
            raise refusal("ENGINE_FAULT", last.error or f"the engine ended the request: {last.finish_reason}")
        now, queue, first = self._clock(), last.queue_seconds, self._first
        timing = Timing(
            queue=queue,
            prefill=None if queue is None or first is None else max(0.0, first - self._arrival - queue),
            decode=None if first is None else now - first,
            total=now - self._arrival,
        )
        return Finished(
            reason=_REASONS[last.finish_reason],
            completion_tokens=self._count,
            receipt=ServedReceipt(_receipt(last), worker=self._worker, timing=timing),
            matched=last.matched,
        )


def _receipt(output: Output) -> Receipt:
    """The first news have one, and the last."""
    assert output.receipt is not None
    return output.receipt
