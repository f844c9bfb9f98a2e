"""What an engine serves, as its server tells it."""

from __future__ import annotations

import deepinfer_jax
from deepinfer_jax.engine import Engine
from serving.proto.deepinfer.v1 import types_pb2
from serving.proto.deepinfer.v1.inference_pb2 import ModelInfo

_MODES = {"exact": types_pb2.REPLAY_MODE_EXACT, "bounded": types_pb2.REPLAY_MODE_BOUNDED}


def model_info(
    engine: Engine,
    *,
    model: str,
    weights_id: str,
    numerics: str,
    fingerprint: bytes,
    stop_strings: bool,
    worker: str = "",
    role: str = "all",
    kv_handles: bool = False,
) -> ModelInfo:
    """Describe an engine.

    Args:
      engine: what computes.
      model: name by which people know the model.
      weights_id: digest of its weights.
      numerics: name of the arithmetic.
      fingerprint: of the state, 32 bytes.
      stop_strings: whether the engine has a tokenizer.
      worker: name of the server.
      role: all, prefill, decode or gateway.
      kv_handles: whether states of other workers are fetched.
    """
    config, settings = engine.config, engine.settings
    return ModelInfo(
        model=model,
        weights_id=weights_id,
        vocabulary=config.vocab_size,
        eos_token_id=config.eos_token_id,
        max_context=settings.context(config),
        fingerprint=fingerprint.hex(),
        numerics=numerics,
        deterministic=settings.deterministic,
        replay_mode=_MODES[settings.replay.mode],
        keep=0 if settings.replay.decoder == "off" else settings.replay.keep,
        page_tokens=settings.block_tokens,
        max_logprobs=settings.most_logprobs,
        max_running=settings.n_shards * settings.slots,
        max_waiting=settings.max_waiting,
        stop_strings=stop_strings,
        kv_handles=kv_handles,
        worker=worker,
        role=role,
        version=deepinfer_jax.__version__,
    )
