"""Settings of an engine, checked once."""

from __future__ import annotations

import dataclasses

from deepinfer_jax.cache.layout import DEFAULT_BLOCK_TOKENS
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError, InputError
from deepinfer_jax.replay import Replay
from deepinfer_jax.request import MOST_LOGPROBS, Request
from deepinfer_jax.runtime.batch import StepShape

PREEMPTION_WAYS = ("auto", "snapshot", "recompute")


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """What an engine may use, and how it runs.

    Attributes:
        slots: requests that run at a time, on each shard.
        blocks: blocks in each shard's page pools; absent: as many as the memory holds that the next two name.
        memory_fraction: share of the memory that each shard's device has free beside the parameters, above 0 to 1, for
            its page pools; absent: ``memory`` says it. What steps need besides must fit into the rest.
        memory: bytes of each shard's page pools.
        block_tokens: tokens of a block; also the rows of a prefill tile unless ``tile_rows`` says otherwise.
        max_context: most tokens of a request, prompt and answer; absent: the model's most.
        decode_rows: sizes of decode steps; the largest is at least ``slots`` where every request shall run each step.
        prefill_tiles: sizes of prefill steps, in tiles; the largest is the token budget of a step.
        tile_rows: rows of a prefill tile; absent: ``block_tokens``.
        replay: how windows are rebuilt behind a prefix hit.
        deterministic: results depend on nothing but the request; slower, see ``docs/engine.md``.
        max_waiting: requests that may wait; more are refused.
        window_checkpoints: how many block boundaries keep their windows for exact hits.
        encoder_only: the engine has the encoder side of a model alone, and serves requests that hand over.
        n_shards: shards over which requests are spread.
        most_logprobs: likeliest tokens that can be asked for.
        compile_ahead: compile and time every step before the engine starts; otherwise each when it is first needed, so
            that a first token comes sooner and later ones wait.
        preemption: how a request that gave way comes back: by a snapshot, by running its tokens again, or by cost.
        max_drafts: drafts that a step may verify, for which the window rings have room; absent: the model's block.
        store_patience: seconds that a new request waits for what a block store has of its prompt.
        store_queue: blocks that may wait for the store to take them; the oldest are given up.
        recorded_steps: steps that the flight recorder keeps.
        poison: fill freed slots and blocks with NaN; for tests.
    """

    slots: int = 8
    blocks: int | None = None
    memory_fraction: float | None = None
    memory: int = 1 << 28
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    max_context: int | None = None
    decode_rows: tuple[int, ...] = (1, 8)
    prefill_tiles: tuple[int, ...] = (1, 3)
    tile_rows: int | None = None
    replay: Replay = dataclasses.field(default_factory=Replay)
    deterministic: bool = False
    max_waiting: int = 1024
    window_checkpoints: int = 8
    encoder_only: bool = False
    n_shards: int = 1
    most_logprobs: int = MOST_LOGPROBS
    compile_ahead: bool = True
    preemption: str = "auto"
    max_drafts: int | None = None
    store_patience: float = 0.2
    store_queue: int = 256
    recorded_steps: int = 32
    poison: bool = False

    def __post_init__(self) -> None:
        for name in ("slots", "memory", "block_tokens", "max_waiting", "n_shards"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "1 or more")
        for name in ("blocks", "max_context", "tile_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, value, "1 or more")
        if self.encoder_only and self.replay.decoder != "compact":
            raise ConfigError("encoder_only", True, "False unless replay.decoder is compact")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ConfigError("memory_fraction", self.memory_fraction, "above 0 to 1")
        if self.preemption not in PREEMPTION_WAYS:
            raise ConfigError("preemption", self.preemption, f"one of {', '.join(PREEMPTION_WAYS)}")
        for name in ("window_checkpoints", "store_patience", "store_queue", "max_drafts"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(name, getattr(self, name), "0 or more")
        for name in ("decode_rows", "prefill_tiles"):
            sizes = getattr(self, name)
            if not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
                raise ConfigError(name, sizes, "sizes of 1 or more, ascending")

    @classmethod
    def for_one(cls, tokens: int) -> EngineSettings:
        """For one request at a time, of at most ``tokens`` tokens with its answer: nothing is made that it never needs.

        There is room for a power of two of blocks, so that requests of similar length share compiled steps.
        """
        blocks = 1 << (-(-tokens // cls.block_tokens) - 1).bit_length()
        return cls(
            slots=1,
            blocks=blocks,
            max_context=blocks * cls.block_tokens,
            decode_rows=(1,),
            prefill_tiles=(1,),
            window_checkpoints=0,
            compile_ahead=False,
        )

    @property
    def rows_per_tile(self) -> int:
        """Rows of a prefill tile."""
        return self.tile_rows or self.block_tokens

    def context(self, config: ModelConfig) -> int:
        """Most tokens of a request."""
        return min(self.max_context or config.max_position_embeddings, config.max_position_embeddings)

    def check(self, request: Request, config: ModelConfig) -> None:
        """Refuse a request that an engine of these settings cannot serve.

        Raises:
          InputError: names the value and what is accepted.
        """
        params = request.params
        for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if asked is not None and asked > self.most_logprobs:
                raise InputError(name, asked, f"at most most_logprobs {self.most_logprobs} of this engine")
        total, most = len(request.prompt) + params.max_tokens, self.context(config)
        if total > most:
            raise InputError("prompt and new tokens", total, f"at most max_context {most}", "ask for fewer tokens")

    def tables_width(self, config: ModelConfig) -> int:
        """Blocks of the longest request."""
        return -(-self.context(config) // self.block_tokens)

    def shapes(self) -> tuple[StepShape, ...]:
        """The ladder of step shapes: decode steps, then steps with prefill tiles beside all decode rows.

        With compact decoder replay a prefill step exists without kept tiles, with one, and with all of them; without
        decoder layers only the first of these. A single request never decodes beside a prompt: its prefill steps have
        no decode rows, where other rows are kept.
        """
        if self.encoder_only:
            return tuple(StepShape(0, tiles, self.rows_per_tile, 0) for tiles in self.prefill_tiles)
        alone = self.slots * self.n_shards == 1 and self.replay.decoder != "compact"
        most = 0 if alone else self.decode_rows[-1]
        ladder = [StepShape(rows, 0, 0, self._kept(0)) for rows in self.decode_rows]
        for tiles in self.prefill_tiles:
            for kept in sorted({0, 1, tiles}) if self.replay.decoder == "compact" else [None]:
                ladder.append(StepShape(most, tiles, self.rows_per_tile, kept))
        return tuple(ladder)

    def _kept(self, tiles: int) -> int | None:
        return tiles if self.replay.decoder == "compact" else None
