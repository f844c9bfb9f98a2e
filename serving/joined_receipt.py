"""One receipt of what several workers did for a request."""

from __future__ import annotations

import dataclasses

from deepinfer_jax.request import Receipt
from serving.events import ServedReceipt


def empty_receipt(seed: int, fingerprint: str) -> ServedReceipt:
    """The receipt of an answer whose last worker gave none. ``seed``: of the branch."""
    return ServedReceipt(Receipt(seed, 0, 0, 0, (), 0, 0, 0, fingerprint))


def join_receipts(
    last: ServedReceipt,
    prefill: ServedReceipt | None,
    *,
    failovers: int,
    first: float | None,
    decode: float | None,
    total: float,
) -> ServedReceipt:
    """The receipt of an answer.

    Args:
      last: of the worker that generated the last token.
      prefill: of the worker that computed the prompt, where that is another one.
      failovers: how often the answer went on with another worker after tokens of it had come.
      first: seconds from arrival to the first token.
      decode: seconds from the first token to the last.
      total: seconds from arrival to the end.
    """
    queue = (prefill or last).timing.queue
    if failovers and prefill is None:
        # The worker where the prompt waited first is gone.
        queue = None
    behind = None if queue is None or first is None else max(0.0, first - queue)
    timing = dataclasses.replace(last.timing, queue=queue, prefill=behind, decode=decode, total=total)
    if prefill is None:
        return dataclasses.replace(last, failovers=failovers, timing=timing)
    prompt, engine = prefill.engine, last.engine
    return dataclasses.replace(
        last,
        engine=dataclasses.replace(
            engine,
            hit_tokens=prompt.hit_tokens,
            stored_tokens=prompt.stored_tokens,
            replays=engine.replays or prompt.replays,
            computed_tokens=prompt.computed_tokens + engine.computed_tokens,
            replayed_tokens=prompt.replayed_tokens + engine.replayed_tokens,
            preemptions=prompt.preemptions + engine.preemptions,
        ),
        prefill_worker=prefill.worker,
        failovers=failovers,
        timing=timing,
    )
