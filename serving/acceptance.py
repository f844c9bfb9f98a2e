"""Whether a server takes a request, by what it says of itself: asked before anything is done for the request."""

from __future__ import annotations

from serving.errors import bad_field
from serving.generate_call import GenerateCall
from serving.proto.deepinfer.v1 import types_pb2
from serving.proto.deepinfer.v1.inference_pb2 import ModelInfo


def check_acceptable(asked: GenerateCall, info: ModelInfo) -> None:
    """Refuse what is too long for a server, or what it has not; nothing that is asked for is passed over.

    Args:
      asked: the request.
      info: what is served: by the server itself, or for a gateway by its workers.

    Raises:
      InvalidRequestError: names the field.
    """
    _check_sizes(asked, info)
    if asked.params.stop and not info.stop_strings:
        accepted = "none, as there is no tokenizer here"
        raise bad_field("stop.strings", f"{len(asked.params.stop)} strings", accepted, "NOT_SUPPORTED")
    _check_cache(asked, info)


def _check_sizes(asked: GenerateCall, info: ModelInfo) -> None:
    total = len(asked.prompt) + asked.params.max_tokens
    if total > info.max_context:
        fields = "prompt_token_ids and max_tokens"
        raise bad_field(fields, total, f"at most {info.max_context} tokens together", "CONTEXT_TOO_LONG")
    for field, most in (("generated", asked.params.logprobs), ("prompt", asked.params.prompt_logprobs)):
        if most is not None and most > info.max_logprobs:
            raise bad_field(f"logprobs.{field}", most, f"0 to {info.max_logprobs}")


def _check_cache(asked: GenerateCall, info: ModelInfo) -> None:
    if not asked.write_cache:
        raise bad_field("cache.write", False, "true, as this server keeps all blocks", "NOT_SUPPORTED")
    if asked.retention is not None:
        field = "cache.retention_class" if isinstance(asked.retention, str) else "cache.ttl"
        accepted = "absent, as this server has no store of blocks"
        raise bad_field(field, asked.retention, accepted, "NOT_SUPPORTED")
    if asked.replay == "exact" and info.replay_mode == types_pb2.REPLAY_MODE_BOUNDED:
        raise bad_field("cache.replay_mode", "exact", "bounded, this server's mode", "NOT_SUPPORTED")
