"""Making an engine from a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from deepinfer_jax.cache.layout import PageLayout
from deepinfer_jax.cache.records import StateFormat
from deepinfer_jax.cache.state import State
from deepinfer_jax.cache.store import BlockStore
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine import Engine
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.memory import block_bytes, free_bytes, page_blocks
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.parallel.spread_engine import empty_shards, spread
from deepinfer_jax.runtime.device import Device, StepSettings, local_functions
from deepinfer_jax.runtime.sampler import Counts
from deepinfer_jax.settings import EngineSettings
from deepinfer_jax.text.tokenizer import Tokenizer


def build_engine(
    params: Model,
    config: ModelConfig,
    numerics: Numerics,
    settings: EngineSettings,
    *,
    devices: Sequence[jax.Device] | None = None,
    weights_id: str = "",
    tokenizer: Tokenizer | None = None,
    store: BlockStore | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Engine:
    """Allocate the state, compile every step unless the settings put it off, and start an engine.

    Args:
      params, config, numerics: the model; in the form that runs fastest here, or unrolled for several devices.
      settings: of the engine.
      devices: one shard each, over which parameters and requests are spread; None takes one device whole.
      weights_id: digest of the checkpoint, for the fingerprint of the state.
      tokenizer: for texts and stop strings.
      store: where finished blocks go and prefix hits continue; engines over one store need ``weights_id``.
      progress: told what is being compiled.

    Raises:
      ConfigError: settings that the model cannot have, or memory that does not hold a block or is not known.
    """
    drafts = config.draft.block_size if config.draft else 0
    settings.replay.check(config, drafts)
    layout = PageLayout.of(config, settings.block_tokens)
    step = StepSettings(
        deterministic=settings.deterministic,
        most=settings.most_logprobs,
        places=max(shape.samples for shape in settings.shapes()),
        scored=max(shape.kept_rows for shape in settings.shapes()),
        narrowed=settings.replay.decoder != "off",
        embedded=config.hidden_size if config.vision else 0,
        encoder_only=settings.encoder_only,
    )

    shards = settings.n_shards
    functions, place = local_functions(config, numerics, step), None
    if devices is not None:
        if len(devices) != shards:
            raise ConfigError("n_shards", shards, f"the number of devices, {len(devices)}")
        if settings.encoder_only:
            raise ConfigError("encoder_only", True, "false over several devices", "run one engine for each device")
        over = spread(params, config, numerics, step, devices)
        params, functions, place = over.params, over.functions, over.place
    elif shards != 1:
        raise ConfigError("n_shards", shards, "1 on a single device", "give as many devices as shards")

    places = devices or sorted(jnp.zeros(()).devices(), key=str)
    blocks = page_blocks(settings, block_bytes(config, numerics, layout), lambda: free_bytes(places))

    def fresh() -> tuple[State, Counts, Array]:
        empty = empty_shards(
            config,
            numerics,
            shards,
            slots=settings.slots,
            blocks=blocks,
            layout=layout,
            places=step.places,
            max_drafts=settings.max_drafts,
            fill=float("nan") if settings.poison else 0.0,
        )
        return empty if place is None else place(*empty)

    device = Device(
        params,
        fresh,
        functions,
        settings.shapes(),
        step,
        n_shards=shards,
        tables_width=settings.tables_width(config),
    )
    costs = device.warm_up(progress) if settings.compile_ahead else {}
    form = StateFormat.of(weights_id, config, numerics, layout)
    return Engine(
        device,
        config,
        settings,
        blocks=blocks,
        form=form,
        costs=costs,
        store=store,
        tokenizer=tokenizer,
    )
