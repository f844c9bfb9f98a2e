"""The accelerator's side of the engine: parameters, state, and the functions compiled over them.

A :class:`Device` is the one owner of the state. Work is dispatched in order and runs in order; results leave as
:class:`InFlight`. A function is compiled when it is first needed; :meth:`Device.warm_up` needs all of them, so that
nothing compiles after it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from deepinfer_jax.cache.snapshot import Rings
from deepinfer_jax.cache.state import State
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.engram import IMAGE_TOKEN
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.runtime.batch import Chunk, StepShape, pack
from deepinfer_jax.runtime.choices import ChoiceTable
from deepinfer_jax.runtime.compiles import CompileCounter
from deepinfer_jax.runtime.inflight import InFlight
from deepinfer_jax.runtime.sampler import Choices, Counts, Sampled
from deepinfer_jax.runtime.step import StepInput, encode_step, forward_step, no_logits, sample_step, score_step
from deepinfer_jax.runtime.transfer import BLOCKS_AT_ONCE, UNUSED, BlockPlanes, SlotPlanes, Transfer, batches

_TIMED_RUNS = 3


@dataclasses.dataclass(frozen=True)
class StepFunctions:
    """The traceable parts of a step for one way of placing arrays, see :mod:`deepinfer_jax.runtime.step`."""

    forward: Callable[..., Any]
    sample: Callable[..., Any]
    score: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """Static settings of the compiled functions.

    ``most``: likeliest tokens that can be reported. ``places``: tokens that any step of a shard can sample. ``scored``:
    rows of a shard that any step can score. ``narrowed``: decoder layers see less than everything (decoder replay).
    ``embedded``: width of image embeddings of prefill rows, 0 where none are taken. ``encoder_only``: there are no
    decoder layers.
    """

    deterministic: bool
    most: int
    places: int
    scored: int
    narrowed: bool
    embedded: int = 0
    encoder_only: bool = False

    def samples(self, shape: StepShape) -> int:
        """Tokens that a step of this shape samples, unused ones included.

        Deterministic execution samples in one program whatever the step's shape: another program may round otherwise.
        """
        return self.places if self.deterministic else shape.samples

    def rows(self, shape: StepShape) -> int:
        """Rows that a step of this shape hands to scoring; likewise."""
        return self.scored if self.deterministic else shape.kept_rows


def local_functions(config: ModelConfig, numerics: Numerics, settings: StepSettings) -> StepFunctions:
    """The step on a single device."""
    most, deterministic = settings.most, settings.deterministic
    if settings.encoder_only:
        return StepFunctions(
            forward=functools.partial(encode_step, config=config, numerics=numerics, deterministic=deterministic),
            sample=functools.partial(sample_step, places=settings.places, most=most, head=no_logits),
            score=functools.partial(score_step, most=most, head=no_logits),
        )
    return StepFunctions(
        forward=functools.partial(
            forward_step,
            config=config,
            numerics=numerics,
            scored=settings.scored if settings.deterministic else 0,
            deterministic=settings.deterministic,
        ),
        sample=functools.partial(sample_step, places=settings.places, most=most, deterministic=deterministic),
        score=functools.partial(score_step, most=most, deterministic=deterministic),
    )


@struct.dataclass
class Stepped:
    """What comes of a step.

    ``sampled``: of all shards. ``finite``: of all rows of all shards, whether what a row put into the pages is finite.
    """

    sampled: Sampled
    finite: Any


class Device:
    """All device work of one engine."""

    def __init__(
        self,
        params: Model,
        fresh: Callable[[], tuple[State, Counts, Array]],
        functions: StepFunctions,
        shapes: Sequence[StepShape],
        settings: StepSettings,
        *,
        n_shards: int = 1,
        tables_width: int,
    ) -> None:
        """Hold parameters, and make a state.

        Args:
          params: parameters, placed.
          fresh: makes an empty state, empty counts and the tokens before the first step, placed.
          functions: the parts of a step.
          shapes: every shape that a step may take.
          settings: static.
          n_shards: shards, each with its own rows, slots and blocks; step inputs concatenate theirs.
          tables_width: blocks that a request can have.
        """
        self._params, self._fresh, self._functions = params, fresh, functions
        self.settings, self._n_shards, self._width = settings, n_shards, tables_width
        self.shapes = tuple(shapes)
        self._state, self._counts, self._previous = fresh()
        self._hidden: Array | None = None
        self._programs: dict[Hashable, Callable[..., Any]] = {}
        self._compiles: CompileCounter | None = None
        self._seen_compiles = 0
        self.block_seconds = 0.0

    def new_compiles(self) -> int:
        """Compilations since the last call, none of which should be."""
        if self._compiles is None:
            return 0
        count = self._compiles.count
        new, self._seen_compiles = count - self._seen_compiles, count
        return new

    def close(self) -> None:
        """Stop counting compilations."""
        if self._compiles is not None:
            self._compiles.close()
            self._compiles = None

    @property
    def slots(self) -> int:
        """Slots of one shard."""
        return int(self._state.history.shape[0]) // self._n_shards

    def warm_up(self, progress: Callable[[str], None] = lambda line: None) -> dict[StepShape, float]:
        """Compile everything and time every shape: seconds of a full step, best of a few."""
        curve = {}
        for number, shape in enumerate(self.shapes, 1):
            progress(f"compiling step {number} of {len(self.shapes)}: {shape}")
            self._timed(shape)
            if shape.prefill_tiles and not self.settings.encoder_only:
                self.score(shape, np.zeros(self._n_shards * self.settings.rows(shape), np.int32))
            curve[shape] = min(self._timed(shape) for _ in range(_TIMED_RUNS))
        progress("compiling state transfer")
        vocabulary = self._counts.generated.shape[1]
        self.load_counts(0, np.zeros(vocabulary, np.int32), np.zeros(vocabulary, bool))
        nothing = np.zeros(self.lookback, np.int32)
        self.seed_history(0, nothing, nothing.astype(bool), nothing)
        self.write_slot(0, self.read_slot(0).on_device)
        self._timed_blocks()
        self.block_seconds = min(self._timed_blocks() for _ in range(_TIMED_RUNS)) / BLOCKS_AT_ONCE
        self._compiles = CompileCounter()
        self.reset()
        return curve

    def reset(self) -> None:
        """Begin with an empty state again."""
        self._state, self._counts, self._previous = self._fresh()
        jax.block_until_ready(self._state)
        self.new_compiles()

    def ready(self, shape: StepShape) -> bool:
        """Whether a step of this shape can run without a compilation."""
        return {("forward", shape), ("sample", self.settings.samples(shape))} <= self._programs.keys()

    def dispatch(self, shape: StepShape, step: StepInput, choices: Choices) -> InFlight:
        """Run a step behind everything dispatched so far; gives the ``Stepped`` of all shards.

        The arrays are copied: the device may alias what it is given, and reads it later.
        """
        step, choices = jax.tree.map(np.array, (step, choices))
        functions, inputs = self._functions, (self._params, self._state, step, self._previous)
        self._state, hidden, self._hidden, finite = self._run(
            ("forward", shape), lambda: jax.jit(functions.forward, donate_argnums=1), *inputs
        )
        sampled, self._counts, self._previous = self._run(
            ("sample", self.settings.samples(shape)),
            lambda: jax.jit(functions.sample, donate_argnums=3),
            self._params,
            hidden,
            choices,
            self._counts,
        )
        return InFlight(Stepped(sampled, finite))

    def score(self, shape: StepShape, targets: np.ndarray) -> InFlight:
        """Log-probabilities of ``targets`` behind the kept rows of the step dispatched last."""
        key, inputs = ("score", self.settings.rows(shape)), (self._params, self._hidden, np.array(targets))
        return InFlight(self._run(key, lambda: jax.jit(self._functions.score), *inputs))

    def load_counts(self, slot: int, generated: np.ndarray, in_prompt: np.ndarray) -> None:
        """Set what penalties look at in a slot; slots are numbered over all shards."""
        self._counts = self._run(
            "load_counts",
            lambda: jax.jit(_load_counts, donate_argnums=0, out_shardings=_shardings(self._counts)),
            self._counts,
            np.int32(slot),
            np.array(generated),
            np.array(in_prompt),
        )

    @property
    def lookback(self) -> int:
        """Tokens before a row that the model looks up beside their state, for Engram."""
        table = self._params.token_map
        return 0 if table is None else int(self._state.history.shape[1])

    def seed_history(self, slot: int, tokens: np.ndarray, image: np.ndarray, positions: np.ndarray) -> None:
        """Set the token ids before a restart, ``lookback`` of them; a negative position is padding."""
        if self.lookback:
            self._state = self._run(
                "seed_history",
                lambda: jax.jit(_seed_history, donate_argnums=0, out_shardings=_shardings(self._state)),
                self._state,
                self._params.token_map,
                np.int32(slot),
                *jax.tree.map(np.array, (tokens, image, positions)),
            )

    def read_blocks(self, blocks: np.ndarray) -> InFlight:
        """The content of some blocks, numbered over all shards, as it is behind everything dispatched so far."""
        return InFlight(self._transfer.read_blocks(self._state, np.array(blocks)))

    def write_blocks(self, blocks: np.ndarray, planes: Any) -> None:
        """Fill blocks; ``planes`` as read, on either side."""
        self._state = self._transfer.write_blocks(self._state, np.array(blocks), planes)

    @property
    def block_planes(self) -> BlockPlanes:
        """Abstract planes that :meth:`write_blocks` takes, see :mod:`deepinfer_jax.runtime.host_planes`."""
        return self._transfer.block_planes

    @property
    def token_map(self) -> Int[np.ndarray, " vocabulary"] | None:
        """Compressed id of every token id, on the host, for a model with Engram."""
        table = self._params.token_map
        return None if table is None else InFlight(table).read()

    @property
    def rings(self) -> Rings:
        """Ring lengths of a slot."""
        window = getattr(self._state.window, "scale", self._state.window)
        return Rings(window.shape[2], self._state.pending.shape[2], self._state.history.shape[1])

    @property
    def slot_planes(self) -> SlotPlanes:
        """Abstract planes that :meth:`write_slot` takes, see :mod:`deepinfer_jax.runtime.host_planes`."""
        return self._transfer.slot_planes

    def read_slot(self, slot: int) -> InFlight:
        """The rings of a slot, numbered over all shards."""
        return InFlight(self._transfer.read_slot(self._state, slot))

    def write_slot(self, slot: int, planes: Any) -> None:
        """Fill the rings of a slot."""
        self._state = self._transfer.write_slot(self._state, slot, planes)

    def poison(self, blocks: Sequence[int], slots: Sequence[int] = ()) -> None:
        """Fill blocks and slots with NaN; for tests, since nothing may read what a request does not own."""
        for part in batches(blocks):
            self._state = self._transfer.poison_blocks(self._state, part)
        for slot in slots:
            self._state = self._transfer.poison_slot(self._state, slot)

    @functools.cached_property
    def _transfer(self) -> Transfer:
        return Transfer(self._state)

    def _run(self, name: Hashable, make: Callable[[], Any], *arguments: Any) -> Any:
        """Run the program of this name; the first time it is made and compiled for arguments like these."""
        if name not in self._programs:
            self._programs[name] = make().lower(*arguments).compile()
        return self._programs[name](*arguments)

    def _timed(self, shape: StepShape) -> float:
        step, choices = self._example(shape)
        begin = time.perf_counter()
        self.dispatch(shape, step, choices).read()
        return time.perf_counter() - begin

    def _timed_blocks(self) -> float:
        numbers = np.full(BLOCKS_AT_ONCE, UNUSED, np.int32)
        begin = time.perf_counter()
        self.write_blocks(numbers, jax.tree.map(np.array, self.read_blocks(numbers).read()))
        jax.block_until_ready(self._state)
        return time.perf_counter() - begin

    def _example(self, shape: StepShape) -> tuple[StepInput, Choices]:
        """A full step of the shape; what it writes means nothing."""
        slots, samples = self.slots, self.settings.samples(shape)
        chunks = [Chunk(row % slots, 0, [0]) for row in range(shape.decode_rows)]
        count = shape.prefill_tiles * shape.tile_rows
        if count:
            kept = count if shape.kept_tiles is None else shape.kept_tiles * shape.tile_rows
            chunks.append(Chunk(0, 0, [0] * count, decoder_floor=count - kept))
        packed = pack(chunks, shape, narrowed=self.settings.narrowed, embedded=self.settings.embedded * bool(count))
        shards = self._n_shards
        step = StepInput(
            batch=packed.batch,
            block_tables=np.zeros((slots, self._width), np.int32),
            samples=np.zeros(samples, np.int32),
        )
        nothing = np.zeros(samples, np.int32)
        choices = ChoiceTable(1).rows(nothing, nothing, np.full(samples, -1))
        return jax.tree.map(lambda leaf: np.concatenate([leaf] * shards), (step, choices))


def _shardings(arrays: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, arrays)


def _load_counts(
    counts: Counts, slot: Int[Array, ""], generated: Int[Array, " vocabulary"], in_prompt: Bool[Array, " vocabulary"]
) -> Counts:
    return Counts(counts.generated.at[slot].set(generated), counts.in_prompt.at[slot].set(in_prompt))


def _seed_history(
    state: State,
    token_map: Int[Array, " vocabulary"],
    slot: Int[Array, ""],
    tokens: Int[Array, " back"],
    image: Bool[Array, " back"],
    positions: Int[Array, " back"],
) -> State:
    ring = state.history.shape[1]
    ids = jnp.where(image, IMAGE_TOKEN, token_map[tokens]).astype(state.history.dtype)
    place = jnp.where(positions >= 0, positions % ring, ring)
    return dataclasses.replace(state, history=state.history.at[slot, place].set(ids, mode="drop"))
