"""What a gateway counts, in the Prometheus data model."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_PREFIX = "deepinfer_gateway_"


class GatewayMetrics:
    """Counters, gauges and histograms of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.open = self._gauge("open_requests", "Requests that are open")
        self.waiting_tokens = self._gauge("waiting_prompt_tokens", "Prompt tokens that wait for their first token")
        self.placed = self._gauge("placed_requests", "Parts of them that are on workers")
        self.workers = self._gauge("available_workers", "Workers that requests can go to", ["role"])
        self.finished = self._counter("finished_requests", "Requests that were answered, by why they ended", ["reason"])
        self.failed = self._counter("failed_requests", "Requests that failed or were refused", ["reason"])
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered requests, hits included")
        self.hit_tokens = self._counter("hit_tokens", "Of them, tokens found in a cache")
        self.generated_tokens = self._counter("generated_tokens", "Tokens that were passed on")
        self.handed_over_bytes = self._counter("handed_over_bytes", "State handed over for answered requests")
        self.repeats = self._counter("repeats", "Requests sent to another worker, by what failed", ["side"])
        self.failovers = self._counter("failovers", "Of them, those whose answer had begun")
        self.unassisted = self._counter("unassisted_prompts", "Prompts that found no prefill worker")
        self.first_token_seconds = self._histogram("first_token_seconds", "From arrival to the first token")
        self.request_seconds = self._histogram("request_seconds", "From arrival to the end")

    def value(self, name: str, **labels: str) -> float:
        """One sample, as ``failovers_total`` or ``open_requests``; 0 where nothing was counted."""
        return self.registry.get_sample_value(f"{_PREFIX}{name}", labels or None) or 0.0

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] | list[str] = ()) -> Gauge:
        return Gauge(f"{_PREFIX}{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] | list[str] = ()) -> Counter:
        return Counter(f"{_PREFIX}{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"{_PREFIX}{name}", text, registry=self.registry, buckets=_SECONDS)
