"""The page that Prometheus reads, over HTTP in a thread of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from serving.addresses import split_address


class _Joined(Collector):
    """All metrics of several registries."""

    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        for registry in self._registries:
            yield from registry.collect()


@contextlib.contextmanager
def metrics_page(address: str, registries: Sequence[CollectorRegistry]) -> Iterator[int]:
    """Serve the metrics of some registries at ``HOST:PORT`` while the context lasts. The value is the port.

    Raises:
      OSError: the address cannot be had.
    """
    host, port = split_address(address, "metrics.listen")
    joined = CollectorRegistry()
    joined.register(_Joined(registries))
    server, thread = start_http_server(port, host, joined)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
