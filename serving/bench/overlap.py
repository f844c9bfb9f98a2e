"""Whether the state of a long prompt travels while the prompt is computed.

A prompt goes to a prefill worker, and its handle to a decode worker: in one kind of turn at once, so that pages travel
while later ones are computed, in the other when the state is complete. What the decode worker writes into its receipt
is compared.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from serving.bench.seals import seal_seconds
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
    """A hand-over of ``prompt`` tokens; medians of ``turns`` turns of each kind. Seconds end when the state is checked.

    Attributes:
        transport: grpc or shm.
        bytes: of the state.
        outstanding_bytes: of these, what had not arrived when the last chunk of the prompt was computed.
        exposed_seconds: of the hand-over, behind that moment; its sections are made in it.
        fetch_seconds: of a hand-over that begins when all sections are made.
        sealing_seconds: of making as many bytes of sections in one thread, which one without overlap does first.
    """

    transport: str
    prompt: int
    turns: int
    bytes: int
    outstanding_bytes: float
    exposed_seconds: float
    fetch_seconds: float
    sealing_seconds: float

    @property
    def outstanding_share(self) -> float:
        """Of the bytes."""
        return self.outstanding_bytes / self.bytes

    @property
    def exposed_share(self) -> float:
        """Of a whole hand-over."""
        return self.exposed_seconds / self.whole_seconds

    @property
    def whole_seconds(self) -> float:
        """Of a hand-over that begins when the prompt is computed; what comes from the device is not counted."""
        return self.fetch_seconds + self.sealing_seconds


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
                for kind, early in enumerate((True, False)):
                    receipt = workers.hand_over(random_prompt(random, vocabulary, prompt), transport, early=early)
                    if receipt is not None:
                        found.setdefault(transport, ([], []))[kind].append(receipt)
                    progress()
    figures = [
        overlap_of(transport, prompt, *kinds, _sealing_seconds(kinds[0], turns)) for transport, kinds in found.items()
    ]
    return [one for one in figures if one is not None]


def overlap_of(
    transport: str,
    prompt: int,
    early: Sequence[ServedReceipt],
    late: Sequence[ServedReceipt],
    sealing_seconds: float,
) -> OverlapFigures | None:
    """Figures of receipts: of hand-overs that began with the computation, and of those that began behind it.

    ``sealing_seconds``: of all sections.

    None where no receipt of the former says when the last token was computed.
    """
    # The word when the last token was computed may have come too late.
    known = [(receipt.exposed_bytes, seconds) for receipt in early if (seconds := receipt.timing.exposed_transfer)]
    if not known:
        return None
    return OverlapFigures(
        transport=transport,
        prompt=prompt,
        turns=len(known),
        bytes=early[0].handed_over_bytes,
        outstanding_bytes=float(statistics.median(size for size, _ in known)),
        exposed_seconds=statistics.median(seconds for _, seconds in known),
        fetch_seconds=statistics.median(receipt.timing.transfer or 0.0 for receipt in late),
        sealing_seconds=sealing_seconds,
    )


def _sealing_seconds(receipts: Sequence[ServedReceipt], turns: int) -> float:
    return statistics.median(seal_seconds(receipts[0].handed_over_bytes)[0] for _ in range(turns))


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

    def hand_over(self, prompt: tuple[int, ...], transport: str, *, early: bool) -> ServedReceipt | None:
        """The receipt of an answer whose state was handed over; None where the workers do not have the transport."""
        call = GenerateCall(prompt, greedy(2), read_cache=False)
        request = prefill_pb2.PrefillRequest(request=generate_message(call), mode=types_pb2.PREFILL_MODE_FULL)
        events = self._prefill.Prefill(request, timeout=_ANSWER_SECONDS)
        try:
            handle = _by(next(events).accepted.kv, transport)
            if handle is None:
                return None
            if early:
                answering = self._thread.submit(self._answer, prompt, handle)
            for _ in events:
                continue
        finally:
            # Without effect where it has ended.
            events.cancel()
        return answering.result() if early else self._answer(prompt, handle)

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
