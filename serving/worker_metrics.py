"""What workers count of states on their way between them, in the Prometheus data model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.arrivals import Arrivals
from serving.prefill_worker import PrefillWorker

_PREFIX = "deepinfer_kv_"


class _Read(Collector):
    """Reads values when they are asked for."""

    def __init__(self, read: Callable[[], Iterator[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        return self._read()


def holding_registry(worker: PrefillWorker) -> CollectorRegistry:
    """Of a worker that holds states."""

    def read() -> Iterator[Metric]:
        leases, transfer = worker.leases, worker.transfer.counts
        yield GaugeMetricFamily(f"{_PREFIX}held_states", "States that are computed or held", len(leases))
        yield GaugeMetricFamily(f"{_PREFIX}held_bytes", "Bytes of them, at most", leases.bytes)
        yield GaugeMetricFamily(f"{_PREFIX}held_tokens", "Tokens whose states they are", leases.tokens)
        ends = CounterMetricFamily(f"{_PREFIX}leases", "Leases, by what became of them", labels=["event"])
        for name, count in dataclasses.asdict(leases.counts).items():
            ends.add_metric([name], count)
        yield ends
        yield GaugeMetricFamily(f"{_PREFIX}running_pulls", "Pulls that run", transfer.running)
        yield CounterMetricFamily(f"{_PREFIX}pulls", "Pulls that began", transfer.pulls)
        yield CounterMetricFamily(f"{_PREFIX}sent_bytes", "Bytes of state that were sent", transfer.sent_bytes)

    return _registry(read)


def arrivals_registry(arrivals: Arrivals) -> CollectorRegistry:
    """Of a worker that fetches states."""

    def read() -> Iterator[Metric]:
        yield GaugeMetricFamily(f"{_PREFIX}arriving_bytes", "Bytes of states on their way, at most", arrivals.bytes)
        yield GaugeMetricFamily(f"{_PREFIX}backlog_bytes", "Of them, bytes that are still to come", arrivals.backlog)

    return _registry(read)


def _registry(read: Callable[[], Iterator[Metric]]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Read(read))
    return registry
