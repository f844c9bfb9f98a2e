"""Whether the state of a long prompt travels while the prompt is computed.

A prompt goes to a prefill worker, and its handle to a decode worker at once, so that pages travel while later ones are
computed. Then the same prompt goes there again: the worker has its pages, runs the last tokens in one step and hands
over everything behind it. What the decode worker writes into its receipts is compared.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from serving.bench.turn import greedy, random_prompt
from serving.channels import RetryPolicy, open_channel
from serving.client import Client
from serving.events import ServedReceipt
from serving.generate_call import GenerateCall
from serving.proto.deepinfer.v1 import prefill_pb2, types_pb2
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvHandle
from serving.proto.deepinfer.v1.prefill_pb2_grpc import PrefillStub
from serving.request_messages import generate_message

_ANSWER_SECONDS = 600.0
_SCHEMES = {"shm": "shm://", "grpc": "grpc"}


@dataclasses.dataclass(frozen=True)
class OverlapFigures:
    """A hand-over of ``prompt`` tokens; medians of ``turns`` turns.

    Attributes:
        transport: grpc or shm.
        bytes: of the state.
        outstanding_bytes: of these, what had not arrived when the last chunk of the prompt was computed.
        exposed_seconds: from that moment until the state was checked.
        whole_seconds: the same where everything had still to be read from the device then, sealed, sent and checked;
            None if the servers do not compute the end of a prompt that they know in one step.
    """

    transport: str
    prompt: int
    turns: int
    bytes: int
    outstanding_bytes: float
    exposed_seconds: float
    whole_seconds: float | None

    @property
    def outstanding_share(self) -> float:
        """Of the bytes."""
        return self.outstanding_bytes / self.bytes

    @property
    def exposed_share(self) -> float | None:
        """Of a whole hand-over."""
        return None if self.whole_seconds is None else self.exposed_seconds / self.whole_seconds


def measure_overlap(
    prefill: str,
    decode: str,
    vocabulary: int,
    *,
    prompt: int = 4000,
    turns: int = 3,
    transports: Sequence[str] = ("shm", "grpc"),
    progress: Callable[[], None] = lambda: None,
) -> list[OverlapFigures]:
    """Hand states over, while they are computed and behind that, in turns.

    Args:
      prefill, decode: addresses of workers.
      vocabulary: ids are below it.
      prompt: tokens.
      turns: of each kind and transport.
      transports: ways; one that the workers do not have is left out.
      progress: called behind each turn.
    """
    random = np.random.default_rng()
    found: dict[str, tuple[list[ServedReceipt], list[ServedReceipt]]] = {}
    with _Workers(prefill, decode) as workers:
        for _ in range(turns):
            for transport in transports:
                tokens = random_prompt(random, vocabulary, prompt)
                for kind in range(2):
                    receipt = workers.hand_over(tokens, transport)
                    if receipt is not None:
                        found.setdefault(transport, ([], []))[kind].append(receipt)
                    progress()
    figures = [overlap_of(transport, prompt, *kinds) for transport, kinds in found.items()]
    return [one for one in figures if one is not None]


def overlap_of(
    transport: str, prompt: int, fresh: Sequence[ServedReceipt], known: Sequence[ServedReceipt]
) -> OverlapFigures | None:
    """Figures of receipts: of prompts that were computed, and of the same once more.

    None where no receipt of the former says when the last token was computed.
    """
    exposed, whole = _exposed(fresh), [pair for pair in _exposed(known) if pair[0] == known[0].handed_over_bytes]
    if not exposed:
        return None
    return OverlapFigures(
        transport=transport,
        prompt=prompt,
        turns=len(exposed),
        bytes=fresh[0].handed_over_bytes,
        outstanding_bytes=float(statistics.median(size for size, _ in exposed)),
        exposed_seconds=statistics.median(seconds for _, seconds in exposed),
        whole_seconds=statistics.median(seconds for _, seconds in whole) if whole else None,
    )


def _exposed(receipts: Sequence[ServedReceipt]) -> list[tuple[int, float]]:
    """Bytes and seconds behind the last token of those hand-overs of which they are known."""
    # The word when the last token was computed may have come too late.
    return [(one.exposed_bytes, seconds) for one in receipts if (seconds := one.timing.exposed_transfer)]


class _Workers:
    """Calls of a prefill worker and of a decode worker, as a gateway makes them."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._channel = open_channel(prefill, RetryPolicy(attempts=1), None)
        self._prefill = PrefillStub(self._channel)
        self._decode = Client(decode, timeout=_ANSWER_SECONDS)
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *details: object) -> None:
        self._channel.close()
        self._decode.close()
        self._thread.shutdown()

    def hand_over(self, prompt: tuple[int, ...], transport: str) -> ServedReceipt | None:
        """The receipt of an answer whose state was handed over; None where the workers do not have the transport."""
        call = GenerateCall(prompt, greedy(2))
        request = prefill_pb2.PrefillRequest(request=generate_message(call), mode=types_pb2.PREFILL_MODE_FULL)
        events = self._prefill.Prefill(request, timeout=_ANSWER_SECONDS)
        try:
            handle = _by(next(events).accepted.kv, transport)
            if handle is None:
                return None
            answering = self._thread.submit(self._answer, prompt, handle)
            for _ in events:
                continue
        finally:
            # Without effect where it has ended.
            events.cancel()
        return answering.result()

    def _answer(self, prompt: tuple[int, ...], handle: KvHandle) -> ServedReceipt:
        return self._decode.complete(prompt, greedy(2), kv=handle).finished.receipt


def _by(handle: KvHandle, transport: str) -> KvHandle | None:
    """A handle by which a state is fetched in one way; calls of its holder stay possible."""
    chosen = [endpoint for endpoint in handle.endpoints if endpoint.uri.startswith(_SCHEMES[transport])]
    calls = [endpoint for endpoint in handle.endpoints if endpoint.uri.startswith(_SCHEMES["grpc"])]
    if not chosen:
        return None
    narrowed = KvHandle()
    narrowed.CopyFrom(handle)
    del narrowed.endpoints[:]
    narrowed.endpoints.extend(chosen if transport == "grpc" else [*chosen, *calls])
    return narrowed
