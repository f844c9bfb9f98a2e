"""One receipt of what several workers did for a request."""

from __future__ import annotations

import dataclasses

from deepinfer_jax.request import Receipt
from serving.events import ServedReceipt, Timing


def empty_receipt(seed: int, fingerprint: str) -> ServedReceipt:
    """The receipt of an answer whose last worker gave none. ``seed``: of the branch."""
    return ServedReceipt(Receipt(seed, 0, 0, 0, (), 0, 0, 0, fingerprint))


def join_receipts(
    last: ServedReceipt, prefill: ServedReceipt | None, *, failovers: int, decode: float | None, total: float
) -> ServedReceipt:
    """The receipt of an answer.

    Args:
      last: of the worker that generated the last token.
      prefill: of the worker that computed the prompt, where that is another one.
      failovers: how often the request went on with another worker.
      decode: seconds from the first token to the last.
      total: seconds from arrival to the end.
    """
    timing = dataclasses.replace(last.timing, decode=decode, total=total)
    if prefill is None:
        return dataclasses.replace(last, failovers=failovers, timing=timing)
    first, engine = prefill.engine, last.engine
    return dataclasses.replace(
        last,
        engine=dataclasses.replace(
            engine,
            hit_tokens=first.hit_tokens,
            stored_tokens=first.stored_tokens,
            replays=engine.replays or first.replays,
            computed_tokens=first.computed_tokens + engine.computed_tokens,
            replayed_tokens=first.replayed_tokens + engine.replayed_tokens,
            preemptions=first.preemptions + engine.preemptions,
        ),
        prefill_worker=prefill.worker,
        failovers=failovers,
        timing=_joined(timing, prefill.timing),
    )


def _joined(timing: Timing, prefill: Timing) -> Timing:
    """Times of a whole answer; queue and prefill are those of the prompt's worker."""
    whole = None if prefill.total is None else prefill.total - (prefill.queue or 0.0)
    return dataclasses.replace(
        timing,
        queue=timing.queue if prefill.queue is None else prefill.queue,
        prefill=whole if prefill.prefill is None else prefill.prefill,
    )
