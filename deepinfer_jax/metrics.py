"""What an engine counts, in the Prometheus data model."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counters, gauges and histograms of one engine, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.waiting = self._gauge("waiting_requests", "Branches that wait for a slot")
        self.running = self._gauge("running_requests", "Branches that have a slot")
        self.used_blocks = self._gauge("used_blocks", "Blocks that running branches count on")
        self.used_slots = self._gauge("used_slots", "Slots in use")
        self.held_windows = self._gauge("held_windows", "Block boundaries whose windows are held")
        self.finished = self._counter("finished_requests", "Finished branches by reason", ["reason"])
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted branches, hits included")
        self.hit_tokens = self._counter("hit_tokens", "Prompt tokens found in device pages or the store")
        self.stored_tokens = self._counter("stored_tokens", "Prompt tokens found in the store")
        self.saved_blocks = self._counter("saved_blocks", "Blocks given to the store")
        self.unsaved_blocks = self._counter("unsaved_blocks", "Blocks given up because the store was too slow")
        self.damaged_blocks = self._counter("damaged_blocks", "Blocks from the store that did not open")
        self.store_failures = self._counter("store_failures", "Calls of the store that failed")
        self.prefill_rows = self._counter("prefill_rows", "Rows of prompt tokens run, without padding")
        self.replayed_rows = self._counter("replayed_rows", "Rows run again for their windows, pages being held")
        self.decode_rows = self._counter("decode_rows", "Rows run one a step, without padding")
        self.decoder_rows = self._counter("decoder_rows", "Rows that ran through the decoder layers, without padding")
        self.generated_tokens = self._counter("generated_tokens", "Tokens that reached a caller")
        self.wasted_rows = self._counter("wasted_rows", "Rows of branches that had ended when they ran")
        self.preemptions = self._counter("preemptions", "Branches that gave way, by how they come back", ["way"])
        self.steps = self._counter("steps", "Steps dispatched")
        self.recompiles = self._counter("recompiles", "Compilations after warm-up")
        self.step_seconds = self._histogram("step_seconds", "From one read step to the next")
        self.host_seconds = self._histogram("host_seconds", "Processor time of the engine's thread for a step")
        self.first_token_seconds = self._histogram("first_token_seconds", "From arrival to the first token")
        self.token_seconds = self._histogram("token_seconds", "From a branch's token to its next")

    def text(self) -> str:
        """Everything in the Prometheus text format."""
        return generate_latest(self.registry).decode()

    def value(self, name: str, **labels: str) -> float:
        """One sample, as ``steps_total`` or ``waiting_requests``; 0 where nothing was counted."""
        return self.registry.get_sample_value(f"deepinfer_{name}", labels or None) or 0.0

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"deepinfer_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"deepinfer_{name}", text, labels or [], registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"deepinfer_{name}", text, registry=self.registry, buckets=_SECONDS)
