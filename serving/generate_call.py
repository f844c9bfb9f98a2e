"""A request for tokens as servers and clients hold it, between its message and the engine's own request."""

from __future__ import annotations

import dataclasses

from deepinfer_jax.request import Request, SamplingParams
from deepinfer_jax.sequence import branch_seed
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvHandle
from serving.served_call import REQUEST_ID

Retention = str | float
"""``transient``, ``chat`` or ``agent``, or seconds."""


@dataclasses.dataclass(frozen=True)
class GenerateCall:
    """What one call of ``Generate`` asks for.

    Attributes:
        prompt: token ids.
        params: sampling parameters of one branch; ``n`` is 1.
        request_id: names the request on its server; empty leaves that to the server.
        branch: which of the answers to this prompt it is; folded into the seed.
        answer: tokens that were generated before, by another worker.
        priority: higher ones come first.
        salt: requests share cached prefixes only with those of the same salt.
        read_cache, write_cache: whether cached prefixes may serve it, and whether it may leave blocks for others.
        retention: how long a store should keep its blocks; None is the server's default.
        replay: ``exact`` or ``bounded``; None is the server's mode.
        kv: where the prompt's state can be had.
        first_token: the token that was sampled behind that state.
        traceparent: W3C trace context.
    """

    prompt: tuple[int, ...]
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    request_id: str = ""
    branch: int = 0
    answer: tuple[int, ...] = ()
    priority: int = 0
    salt: bytes = b""
    read_cache: bool = True
    write_cache: bool = True
    retention: Retention | None = None
    replay: str | None = None
    kv: KvHandle | None = None
    first_token: int | None = None
    traceparent: str = ""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What names the call in the logs of servers."""
        return ((REQUEST_ID, self.request_id),) if self.request_id else ()

    def engine_request(self, deadline: float | None) -> Request:
        """What the engine is asked for; ``deadline``: seconds from now."""
        params, seed = self.params, self.params.seed
        if seed is not None:
            params = dataclasses.replace(params, seed=branch_seed(seed, self.branch))
        return Request(
            prompt=self.prompt,
            params=params,
            priority=self.priority,
            deadline=deadline,
            salt=self.salt,
            read_cache=self.read_cache,
            answer=self.answer,
        )
