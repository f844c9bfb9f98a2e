"""Running engines side by side on one machine: in turns (A B A B), one at a time, nothing else running."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from deepinfer_jax.bench.comparison import Comparison, Failure, fractions, ratios, row_of
from deepinfer_jax.bench.machine import MachineRates
from deepinfer_jax.bench.peers import PEERS, PRESET, Place, check_installed, machine_command, own_commands
from deepinfer_jax.bench.process import EngineCommand, EngineError, EngineProcess, Turn
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.numerics import Numerics

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compared, and how.

    ``peers``: names of peers. ``numerics``: this engine's. ``batches``: requests side by side, each a measurement.
    ``prompt`` and ``steps``: tokens per request and turn. ``repeats``: turns of each engine at each batch.
    ``processors``: each engine may use so many. ``maximum_load``: one-minute load average above which nothing starts.
    ``environments``: environments of peers that exist already. ``start_seconds`` and ``turn_seconds``: how long an
    engine may take until it is ready, and for a turn with its warm-up.
    """

    peers: tuple[str, ...] = tuple(PEERS)
    numerics: tuple[str, ...] = ("f32", "bf16", "released")
    batches: tuple[int, ...] = (1, 8)
    prompt: int = 512
    steps: int = 64
    repeats: int = 5
    processors: int = 2
    maximum_load: float = 1.0
    environments: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    start_seconds: float = 300.0
    turn_seconds: float = 1800.0

    def check(self, config: ModelConfig) -> None:
        """Refuse what cannot be measured.

        Raises:
          InputError: a peer or numerics is unknown, an environment does not exist, a number is not positive, or the
            tokens do not fit the model's positions.
        """
        for name in self.peers:
            if name not in PEERS:
                raise InputError("peer", name, f"one of {', '.join(PEERS)}")
        for name in self.numerics:
            Numerics.preset(name)
        check_installed(self.environments)
        if not self.batches:
            raise InputError("batches", self.batches, "one or more")
        numbers = [(name, getattr(self, name)) for name in ("prompt", "steps", "repeats", "processors")]
        for name, number in [*(("batch", batch) for batch in self.batches), *numbers]:
            if number < 1:
                raise InputError(name, number, "1 or more")
        if self.prompt + self.steps > config.max_position_embeddings:
            accepted = f"at most max_position_embeddings {config.max_position_embeddings}"
            raise InputError("prompt + steps", self.prompt + self.steps, accepted)


@dataclasses.dataclass
class Results:
    """What has been measured so far: turns by engine, numerics and batch; what engines said; what went wrong."""

    turns: dict[tuple[str, str, int], list[Turn]] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    parameters: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: list[Failure] = dataclasses.field(default_factory=list)

    def note_failure(self, engine: str, error: EngineError) -> None:
        """Keep why an engine failed."""
        self.failures.append(Failure(engine, str(error)))

    def note_facts(self, command: EngineCommand, facts: Mapping[str, Any]) -> None:
        """Keep what an engine said when it started."""
        self.versions |= facts.get("versions", {})
        if "parameters" in facts:
            self.parameters[command.title] = facts["parameters"]


def compare(
    plan: Plan,
    directory: Path,
    *,
    environment: Mapping[str, str],
    own_settings: Mapping[str, str],
    progress: Progress = lambda line: None,
) -> Comparison:
    """Set up the peers, and run all engines in turns on the 50 M models.

    Args:
      plan: what is compared.
      directory: work directory for environments, the checkpoint and logs; kept between runs.
      environment: environment variables of all engines.
      own_settings: further ones of this project's engine, as its commands set them.
      progress: told what is done and measured.

    Raises:
      InputError: the plan is refused, or the machine is busy. An engine that fails is in the result; the others go on.
    """
    config = ModelConfig.preset(PRESET)
    plan.check(config)
    load_before = _quiet_load(plan.maximum_load)
    place = Place(directory.resolve(), environment, own_settings, plan.processors, max(plan.batches))
    place.log("machine").parent.mkdir(parents=True, exist_ok=True)
    results = Results()
    commands = [*own_commands(place, plan.numerics), *_peer_commands(plan, place, results, progress)]
    progress("measuring the machine")
    rates = _machine_rates(plan, place, results)
    run_turns(commands, plan, place, results, progress)
    rows = tuple(
        row_of(engine, numerics, batch, plan.prompt, plan.steps, turns)
        for (engine, numerics, batch), turns in results.turns.items()
    )
    return Comparison(
        prompt=plan.prompt,
        steps=plan.steps,
        processors=plan.processors,
        rows=rows,
        ratios=ratios(rows),
        fractions=fractions(rows, config, rates, plan.prompt, plan.steps) if rates else (),
        machine=rates,
        versions=results.versions,
        parameters=results.parameters,
        failures=tuple(results.failures),
        load_average_before=load_before,
        load_average_after=os.getloadavg()[0],
    )


def run_turns(
    commands: Iterable[EngineCommand], plan: Plan, place: Place, results: Results, progress: Progress
) -> None:
    """Start every engine, then run them in turns: all engines once, then all once more, at each batch.

    An engine that fails is noted in ``results`` and takes no further turn.
    """
    with contextlib.ExitStack() as stack:
        running: list[tuple[EngineCommand, EngineProcess]] = []
        for command in commands:
            progress(f"{command.title}: starting")
            try:
                process = stack.enter_context(EngineProcess(command, place.log(command.title), plan.start_seconds))
            except EngineError as error:
                results.note_failure(command.title, error)
            else:
                running.append((command, process))
                results.note_facts(command, process.facts)
        for turn in range(len(plan.batches) * plan.repeats):
            running = [pair for pair in running if _take_turn(*pair, turn, plan, results, progress)]


def _take_turn(
    command: EngineCommand, process: EngineProcess, number: int, plan: Plan, results: Results, progress: Progress
) -> bool:
    """Turn ``number`` of one engine, counted over batches; whether it went well."""
    batch, repeat = plan.batches[number // plan.repeats], number % plan.repeats
    try:
        # A seed never comes back: an engine may remember a prompt.
        turn = process.turn(batch, plan.prompt, plan.steps, 1 + number, plan.turn_seconds)
    except EngineError as error:
        results.note_failure(command.title, error)
        return False
    results.turns.setdefault((command.name, command.numerics, batch), []).append(turn)
    row = row_of(command.name, command.numerics, batch, plan.prompt, plan.steps, [turn])
    rates = f"prefill {row.prefill_best:,.0f}, decode {row.decode_best:,.1f} tokens/s"
    progress(f"batch {batch}, turn {repeat + 1} of {plan.repeats}: {command.title}: {rates}")
    return True


def _peer_commands(plan: Plan, place: Place, results: Results, progress: Progress) -> list[EngineCommand]:
    commands: list[EngineCommand] = []
    for name in plan.peers:
        try:
            commands += PEERS[name].commands(place, plan.environments.get(name), progress)
        except EngineError as error:
            results.note_failure(name, error)
    return commands


def _machine_rates(plan: Plan, place: Place, results: Results) -> MachineRates | None:
    command = machine_command(place)
    try:
        with EngineProcess(command, place.log(command.title), plan.start_seconds) as process:
            return MachineRates(**process.facts)
    except EngineError as error:
        results.note_failure(command.title, error)
        return None


def _quiet_load(maximum: float) -> float:
    load = os.getloadavg()[0]
    if load > maximum:
        remedy = "wait until nothing else runs, or allow more with --maximum-load"
        raise InputError("load average", round(load, 2), f"at most {maximum:g}", remedy)
    return load
