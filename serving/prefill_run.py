"""A prompt on a prefill worker, as its gateway sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc

from serving.errors import ContractError, ServingError, error_of
from serving.event_messages import prompt_logprobs_event
from serving.events import PromptLogprobs
from serving.generate_call import GenerateCall
from serving.proto.deepinfer.v1 import prefill_pb2
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvHandle
from serving.request_messages import generate_message
from serving.status import Metadata, error_from
from serving.workers import Place

_REQUEST = "request."


class PrefillRun:
    """One call of ``Prefill.Prefill``, sent when this is made and read by a task of its own. End it by :meth:`close`.

    Attributes:
        place: where it runs.
        handle: where the state can be had, once the worker has accepted the prompt.
        cached: prompt tokens that its caches hold, once that is known.
        done: the end of the computation.
        error: how it failed.
    """

    def __init__(
        self,
        place: Place,
        call: GenerateCall,
        mode: str,
        timeout: float,
        metadata: Metadata,
        changed: Callable[[], None],
    ) -> None:
        """Send the call.

        Args:
          place: the worker.
          call: the request, as a decode worker would get it.
          mode: name of a ``PrefillMode``.
          timeout: seconds until its deadline.
          metadata: of the call.
          changed: called whenever one of the attributes has changed.
        """
        self.place = place
        self.handle: KvHandle | None = None
        self.cached: int | None = None
        self.done: prefill_pb2.PrefillDone | None = None
        self.error: ServingError | None = None
        self._prompt, self._scores = call.prompt, list[PromptLogprobs]()
        self._metadata, self._changed = metadata, changed
        request = prefill_pb2.PrefillRequest(request=generate_message(call), mode=mode)
        self._stream = place.worker.prefill.Prefill(request, timeout=timeout, metadata=metadata)
        self._reading = asyncio.create_task(self._read())

    def prompt_logprobs(self) -> Sequence[PromptLogprobs]:
        """Those that came since the last time, in order."""
        scores, self._scores = self._scores, []
        return scores

    def close(self) -> None:
        """End the computation, if it goes on. What is held then is another matter, see :meth:`release`."""
        if self.done is None:
            self._stream.cancel()
            self._reading.cancel()
        self.place.leave()

    async def release(self, seconds: float) -> None:
        """Have the state given back, if there may be any. The worker may be gone, or hold nothing any more."""
        if self.handle is not None:
            request = prefill_pb2.ReleaseKvRequest(kv_id=self.handle.kv_id)
            try:
                await self.place.worker.prefill.ReleaseKv(request, timeout=seconds, metadata=self._metadata)
            except grpc.RpcError:
                # Its lease ends by itself.
                return

    async def _read(self) -> None:
        try:
            while (event := await self._stream.read()) is not grpc.aio.EOF:
                self._take(event)
                self._changed()
            if self.done is None:
                raise ContractError("the stream ended without done")
        except grpc.RpcError as error:
            # Behind the end nothing matters any more.
            if self.done is None:
                self.error = _of_request(error_from(error))
        except ServingError as error:
            self.error = error
            self._stream.cancel()
        finally:
            self.place.leave()
            self._changed()

    def _take(self, event: prefill_pb2.PrefillEvent) -> None:
        kind = event.WhichOneof("event")
        if (kind == "accepted") != (self.handle is None) or self.done is not None:
            raise ContractError(f"prefill sent {kind} out of order")
        if kind == "accepted":
            self.handle = event.accepted.kv
        elif kind == "progress":
            self._found(event.progress.cached_tokens)
        elif kind == "prompt_logprobs":
            self._scores.append(prompt_logprobs_event(event.prompt_logprobs, self._prompt))
        elif kind == "done":
            self._found(event.done.receipt.hit_tokens)
            self.done = event.done

    def _found(self, cached: int) -> None:
        if self.cached is None:
            self.cached = cached
            self.place.cached(cached)


def _of_request(error: ServingError) -> ServingError:
    """An error about a field as the caller of the gateway knows it, who has sent no ``PrefillRequest``."""
    field = error.metadata.get("field", "")
    name = field.removeprefix(_REQUEST)
    if name == field:
        return error
    message = error.message.replace(field, name, 1)
    return error_of(error.code, message, error.reason, dict(error.metadata) | {"field": name}, error.retry_after)
