"""The contract of a stream, on both ends: one ``Started``, counted messages, one ``Finished``.

``seq`` counts the messages between the two, ``PromptLogprobs`` before ``TokenDelta``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from serving.errors import ContractError
from serving.event_messages import (
    delta_event,
    delta_message,
    finished_event,
    finished_message,
    prompt_logprobs_event,
    prompt_logprobs_message,
    started_event,
    started_message,
)
from serving.events import Delta, Event, Finished, PromptLogprobs, Started
from serving.proto.deepinfer.v1.inference_pb2 import GenerateResponse

PROMPT_POSITIONS = 1024
"""Positions of a prompt in one message: about a quarter of a megabyte with 20 log-probabilities each."""


class AnswerWriter:
    """Turns the events of one stream into messages; whoever calls it keeps their order."""

    def __init__(self) -> None:
        self._seq = 0

    def messages(self, event: Event) -> Iterator[GenerateResponse]:
        """The messages of the next event: one, or several for a long prompt's log-probabilities."""
        if isinstance(event, Started):
            yield GenerateResponse(started=started_message(event))
        elif isinstance(event, Finished):
            yield GenerateResponse(finished=finished_message(event))
        elif isinstance(event, Delta):
            yield GenerateResponse(delta=delta_message(event, self._next()))
        else:
            for begin in range(0, len(event.logprobs), PROMPT_POSITIONS):
                part = event.logprobs[begin : begin + PROMPT_POSITIONS]
                message = prompt_logprobs_message(PromptLogprobs(event.first_position + begin, part), self._next())
                yield GenerateResponse(prompt_logprobs=message)

    def _next(self) -> int:
        self._seq += 1
        return self._seq - 1


class AnswerReader:
    """Turns the messages of one stream into events, and holds their sender to the contract."""

    def __init__(self, prompt: Sequence[int]) -> None:
        """``prompt``: ids whose log-probabilities may come."""
        self._prompt, self._seq = prompt, 0
        self._started = self._finished = self._tokens = False

    def event(self, message: GenerateResponse) -> Event:
        """The event of the next message.

        Raises:
          ContractError: it cannot come here, or contradicts itself.
        """
        kind = message.WhichOneof("event")
        if kind is None:
            raise ContractError("a message of the stream has no event that is known here")
        if self._finished:
            raise ContractError(f"{kind} came after finished")
        if self._started == (kind == "started"):
            raise ContractError("started came twice" if self._started else f"{kind} came before started")
        if kind == "started":
            self._started = True
            return started_event(message.started)
        if kind == "finished":
            self._finished = True
            return finished_event(message.finished)
        if kind == "delta":
            self._count(message.delta.seq)
            self._tokens = True
            return delta_event(message.delta)
        self._count(message.prompt_logprobs.seq)
        if self._tokens:
            raise ContractError("prompt_logprobs came after tokens")
        return prompt_logprobs_event(message.prompt_logprobs, self._prompt)

    def end(self) -> None:
        """Note that the stream has ended with status OK.

        Raises:
          ContractError: something is missing.
        """
        if not self._finished:
            raise ContractError("the stream ended without finished")

    def _count(self, seq: int) -> None:
        if seq != self._seq:
            raise ContractError(f"message {self._seq} of the stream has seq {seq}")
        self._seq += 1
