"""What a client has been told of its answer, whoever computed it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable

from deepinfer_jax.sequence import branch_seed
from serving.events import Delta, Event, Finished, PromptLogprobs, ServedReceipt, Started
from serving.generate_call import GenerateCall
from serving.joined_receipt import empty_receipt, join_receipts
from serving.stop_strings import StopStrings


class Transcript:
    """Passes events on: each thing once, in order, and nothing behind a stop string.

    Attributes:
        tokens: all tokens of the answer so far, those that the request came with included.
    """

    def __init__(
        self,
        call: GenerateCall,
        request_id: str,
        write: Callable[[Event], Awaitable[None]],
        stops: StopStrings | None,
        first_token: Callable[[], None],
    ) -> None:
        """Begin an answer.

        Args:
          call: what is asked for, its seed drawn.
          request_id: the client's.
          write: takes events; returns once there is room for more.
          stops: watches for stop strings; None leaves them to the workers.
          first_token: told when it comes.
        """
        self._call, self._request_id, self._write, self._stops = call, request_id, write, stops
        self._first_token = first_token
        self._started, self._next_score = False, 1
        self._arrival = time.monotonic()
        self._first = self._last = self._arrival
        self.tokens = list(call.answer)
        if stops is not None:
            stops.push(self.tokens)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._call.prompt)

    @property
    def fresh(self) -> int:
        """Tokens that were passed on here."""
        return len(self.tokens) - len(self._call.answer)

    @property
    def stopped(self) -> str | None:
        """The stop string that has ended the answer."""
        return None if self._stops is None else self._stops.found

    @property
    def full(self) -> bool:
        """Whether there are all the tokens that were asked for."""
        return 0 < self._call.params.max_tokens <= len(self.tokens)

    @property
    def seconds_to_first_token(self) -> float | None:
        """None where there is none."""
        return self._first - self._arrival if self.fresh else None

    @property
    def seconds(self) -> float:
        """Since the request came."""
        return time.monotonic() - self._arrival

    async def start(self, cached: int, worker: str, fingerprint: str) -> None:
        """Say that the request is under way, if that was not said."""
        if not self._started:
            self._started = True
            await self._write(Started(len(self._call.prompt), cached, fingerprint, self._request_id, worker))

    async def scores(self, event: PromptLogprobs) -> None:
        """Pass log-probabilities of the prompt on, of positions that were not."""
        new = event.logprobs[max(0, self._next_score - event.first_position) :]
        if new:
            first = max(self._next_score, event.first_position)
            self._next_score = first + len(new)
            await self._write(PromptLogprobs(first, new))

    async def delta(self, event: Delta) -> None:
        """Pass tokens on, up to the one that completes a stop string."""
        count = len(event.tokens) if self._stops is None else self._stops.push(event.tokens)
        now = time.monotonic()
        if not self.fresh:
            self._first = now
            self._first_token()
        self._last = now
        self.tokens += event.tokens[:count]
        await self._write(Delta(event.tokens[:count], event.logprobs[:count]))

    async def finish(
        self, end: Finished, last: ServedReceipt | None, prefill: ServedReceipt | None, failovers: int, fingerprint: str
    ) -> Finished:
        """Say how it ended.

        Args:
          end: as the worker says it, or the gateway; without counts and receipt.
          last: receipt of the worker that answered, if it gave one.
          prefill: of the one that computed the prompt, where that is another one.
          failovers: how often the answer went on with another worker.
          fingerprint: of the state.
        """
        if last is None:
            seed = self._call.params.seed
            assert seed is not None
            last = empty_receipt(branch_seed(seed, self._call.branch), fingerprint)
        # One that ends before it is under way has a beginning all the same.
        await self.start(0, last.worker, fingerprint)
        decode = self._last - self._first if self.fresh else None
        first, total = self.seconds_to_first_token, self.seconds
        receipt = join_receipts(last, prefill, failovers=failovers, first=first, decode=decode, total=total)
        finished = dataclasses.replace(end, completion_tokens=len(self.tokens), receipt=receipt)
        await self._write(finished)
        return finished
