"""The engine of a worker, made from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from deepinfer_jax.checkpoint.default_model import DEFAULT_MODEL_NAME, default_model
from deepinfer_jax.checkpoint.digest import weights_id
from deepinfer_jax.checkpoint.reader import load_model
from deepinfer_jax.checkpoint.subset import encoder_only, everything
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine import Engine
from deepinfer_jax.engine_build import build_engine
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.params import backend_form
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.settings import EngineSettings
from serving.configuration import Configuration, ModelSection
from serving.model_info import model_info
from serving.proto.deepinfer.v1.inference_pb2 import ModelInfo


def model_directory(section: ModelSection) -> Path:
    """Where the model is.

    Raises:
      CheckpointError: none is named, and the small one is not installed.
    """
    return Path(section.directory) if section.directory else default_model()


def load_engine(configuration: Configuration, worker: str, progress: Callable[[str], None]) -> tuple[Engine, ModelInfo]:
    """Read the model, compile all steps, and start an engine. Also what it serves.

    Args:
      configuration: of the process.
      worker: its name.
      progress: told what is going on.

    Raises:
      ConfigError: settings that contradict each other or the model.
      CheckpointError: the model cannot be read.
    """
    section, settings, role = configuration.model, configuration.engine, configuration.server.role
    directory, numerics = model_directory(section), Numerics.preset(section.numerics)
    _check_context(settings, ModelConfig.from_directory(directory))
    progress(f"reading {directory}")
    subset = encoder_only if settings.encoder_only else everything
    model, params = load_model(directory, numerics, subset=subset, form=backend_form)
    identity = weights_id(directory)
    if not identity.verified:
        progress("the weights have no digests: their identity comes from names and sizes alone")
    engine = build_engine(
        params,
        model,
        numerics,
        settings,
        devices=_devices(settings.n_shards),
        weights_id=identity.value,
        progress=progress,
    )
    info = model_info(
        engine,
        model=section.name or (directory.name if section.directory else DEFAULT_MODEL_NAME),
        weights_id=identity.value,
        numerics=section.numerics,
        fingerprint=engine.receiver.form.fingerprint,
        stop_strings=False,
        worker=worker,
        role=role,
        kv_handles=role == "decode",
    )
    return engine, info


def _check_context(settings: EngineSettings, model: ModelConfig) -> None:
    """Engines take the lesser of both; who asked for more must not learn that from refused requests."""
    asked, most = settings.max_context, model.max_position_embeddings
    if asked is not None and asked > most:
        raise ConfigError("engine.max_context", asked, f"at most {most}, the model's max_position_embeddings")


def _devices(shards: int) -> list[jax.Device] | None:
    """One device for each shard; None takes the default one."""
    if shards == 1:
        return None
    if shards > jax.device_count():
        raise ConfigError("engine.n_shards", shards, f"at most {jax.device_count()}, the devices there are")
    return jax.devices()[:shards]
