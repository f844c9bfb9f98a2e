"""Delays where threads, tasks and servers meet, drawn from a seed: orders of events that are seldom seen without."""

import asyncio
import contextlib
import functools
import inspect
import random
import time
from unittest import mock

from deepinfer_jax.arrival import Opening
from deepinfer_jax.async_engine import AsyncEngine
from deepinfer_jax.engine import Engine
from deepinfer_jax.handover import Handover
from serving.arrivals import Arrivals
from serving.decode_run import DecodeRun
from serving.grpc_transport import GrpcTransport
from serving.held_state import HeldState
from serving.inference import InferenceService
from serving.kv_transfer import KvTransferService
from serving.kv_transport import KvFetcher
from serving.news_box import NewsBox
from serving.prefill import PrefillService
from serving.prefill_run import PrefillRun
from serving.routed_answer import RoutedAnswer
from serving.served_call import ServedCall
from serving.shm_transport import ShmTransport
from serving.transcript import Transcript

SEAMS = (
    (Engine, ("step",)),
    (AsyncEngine, ("_deliver", "_submit")),
    (Handover, ("add", "complete")),
    (HeldState, ("_seal_pages", "_seal_end")),
    (Opening, ("take", "finish")),
    (Arrivals, ("_fetch",)),
    (KvFetcher, ("fetch",)),
    (GrpcTransport, ("fetch", "watch", "release")),
    (ShmTransport, ("fetch",)),
    (ServedCall, ("write",)),
    (NewsBox, ("take",)),
    (InferenceService, ("Generate", "Abort")),
    (PrefillService, ("Prefill", "ReleaseKv", "_follow", "_finish")),
    (KvTransferService, ("Pull", "Describe")),
    (PrefillRun, ("_read", "release")),
    (DecodeRun, ("_message",)),
    (RoutedAnswer, ("_attempt", "_answer")),
    (Transcript, ("start", "delta", "finish")),
)
"""Methods that are entered and left late."""


def drawn_delay(draws: random.Random) -> float:
    """Seconds: mostly none, sometimes a moment, seldom many steps of a tiny engine."""
    kind = draws.random()
    return 0.0 if kind < 0.7 else draws.uniform(0.0, 0.005) if kind < 0.95 else draws.uniform(0.0, 0.1)


@contextlib.contextmanager
def delays(seed: int):
    """Everything that begins and ends at a seam does so late, while this context is open."""
    draws = random.Random(seed)

    def late(method):
        if inspect.iscoroutinefunction(method):

            @functools.wraps(method)
            async def wrapped(*arguments, **named):
                await asyncio.sleep(drawn_delay(draws))
                try:
                    return await method(*arguments, **named)
                finally:
                    await asyncio.sleep(drawn_delay(draws))

        else:

            @functools.wraps(method)
            def wrapped(*arguments, **named):
                time.sleep(drawn_delay(draws))
                try:
                    return method(*arguments, **named)
                finally:
                    time.sleep(drawn_delay(draws))

        return wrapped

    with contextlib.ExitStack() as stack:
        for owner, names in SEAMS:
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, late(getattr(owner, name))))
        yield
