"""The flight recorder: the last steps as they were dispatched, to look at or to run again."""

from __future__ import annotations

import collections
import dataclasses
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_jax.runtime.batch import StepShape
from deepinfer_jax.runtime.device import Device
from deepinfer_jax.runtime.sampler import Choices
from deepinfer_jax.runtime.step import StepInput

DISPATCH, READ = "dispatch", "read"


@dataclasses.dataclass
class RecordedStep:
    """A step as it went to the device, and the tokens that came back; None while they have not."""

    number: int
    shape: StepShape
    step: StepInput
    choices: Choices
    tokens: np.ndarray | None = None


class Recorder:
    """Keeps the last steps, and the order of dispatches and reads."""

    def __init__(self, capacity: int) -> None:
        self.steps: collections.deque[RecordedStep] = collections.deque(maxlen=capacity)
        self.events: collections.deque[tuple[str, int]] = collections.deque(maxlen=4 * capacity)

    def dispatched(self, number: int, shape: StepShape, step: StepInput, choices: Choices) -> None:
        """Note a step that is on its way."""
        self.events.append((DISPATCH, number))
        self.steps.append(RecordedStep(number, shape, step, choices))

    def read(self, number: int, sampled: Any) -> None:
        """Note what a step gave."""
        self.events.append((READ, number))
        for recorded in self.steps:
            if recorded.number == number:
                recorded.tokens = sampled.tokens

    def save(self, path: Path) -> None:
        """Write the steps to a file, for :func:`load_steps`; it holds token ids."""
        path.write_bytes(pickle.dumps(list(self.steps)))


def load_steps(path: Path) -> list[RecordedStep]:
    """Steps that :meth:`Recorder.save` wrote. Only for files of one's own: the format can run code."""
    steps: list[RecordedStep] = pickle.loads(path.read_bytes())
    return steps


def run_again(steps: Iterable[RecordedStep], device: Device) -> list[np.ndarray]:
    """The tokens that recorded steps give on a device, in its present state.

    They equal the recorded ones if the device stands where the first of the steps began, and nothing but steps was
    dispatched in between.
    """
    return [device.dispatch(step.shape, step.step, step.choices).read().sampled.tokens for step in steps]
