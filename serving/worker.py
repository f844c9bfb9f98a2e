"""One worker as a gateway sees it: its connection, whether it can be used, what it serves, how busy it is."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.accounts import Account
from serving.channels import RetryPolicy, client_options
from serving.proto.deepinfer.v1 import inference_pb2, inference_pb2_grpc, prefill_pb2_grpc
from serving.proto.deepinfer.v1.inference_pb2 import ModelInfo

_log = logging.getLogger("serving.workers")

# A worker that comes back is found within this time; gRPC's own default is two minutes.
_RECONNECT_MS = 1000
OPTIONS = (
    *client_options(RetryPolicy(attempts=1)),
    ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS // 10),
    ("grpc.min_reconnect_backoff_ms", _RECONNECT_MS // 10),
    ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
)
"""Of channels to workers."""

_UNKNOWN = "not reached yet"

Check = Callable[[ModelInfo], str]
"""Says why a worker cannot be used; empty if it can."""


class Worker:
    """A worker at one address. What it does, it says itself.

    Attributes:
        address: where it is; unique among a gateway's workers.
        inference, prefill: stubs of its services.
        info: what it serves; None until it was reached.
        account: its load.
        trouble: why it cannot be used now; empty if it can.
    """

    def __init__(self, address: str, call_seconds: float, check: Check) -> None:
        """Must be called in the event loop that will use it.

        Args:
          address: ``HOST:PORT`` or ``unix:PATH``.
          call_seconds: how long a question about its health may take.
          check: of what it serves.
        """
        self.address, self._seconds, self._check = address, call_seconds, check
        self._channel = grpc.aio.insecure_channel(address, OPTIONS)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self.inference = inference_pb2_grpc.InferenceStub(self._channel)
        self.prefill = prefill_pb2_grpc.PrefillStub(self._channel)
        self.info: ModelInfo | None = None
        self.account = Account()
        self.trouble = _UNKNOWN

    @property
    def available(self) -> bool:
        """Whether requests may go there."""
        return not self.trouble

    @property
    def name(self) -> str:
        """What it calls itself."""
        return self.info.worker if self.info is not None and self.info.worker else self.address

    @property
    def role(self) -> str:
        """``all``, ``prefill``, ``decode`` or ``gateway``; empty until it was reached."""
        return "" if self.info is None else self.info.role

    def serves(self, *roles: str) -> bool:
        """Whether it can be used as one of these."""
        return self.available and self.role in roles

    async def poll(self) -> None:
        """Ask how it is; afterwards it is available or there is trouble."""
        asked, timeout = self.account.ask(), self._seconds
        try:
            health = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
            info = await self.inference.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=timeout)
            load = await self.inference.GetLoad(inference_pb2.GetLoadRequest(), timeout=timeout)
        except grpc.RpcError as error:
            self.lost(f"{error.code().name}: {error.details()}")
            return
        self.info = info
        self.account.hear(load, asked)
        if health.status != health_pb2.HealthCheckResponse.SERVING:
            self.lost("not serving")
        elif load.draining:
            self.lost("draining")
        else:
            self._found(self._check(info))

    def lost(self, trouble: str) -> None:
        """Note that it cannot be used until it is found well again."""
        self._found(trouble)

    async def close(self) -> None:
        """End the connection, and every call on it."""
        await self._channel.close()

    def _found(self, trouble: str) -> None:
        before, self.trouble = self.trouble, trouble
        fields = {"worker": self.name, "address": self.address, "role": self.role}
        if trouble and (not before or before == _UNKNOWN):
            _log.warning("worker not available: %s", trouble, extra=fields)
        elif before and not trouble:
            _log.info("worker available", extra=fields)
