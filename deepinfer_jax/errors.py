"""The errors a caller can act on: each says in one sentence which value was refused and what is accepted."""

from __future__ import annotations

from typing import ClassVar

# A refused value may be a whole file or a long prompt; the sentence must stay readable.
VALUE_CHARACTERS = 120


class DeepInferError(Exception):
    """A refused value; base of every error that this project raises on purpose.

    ``exit_code`` is the status with which the command line ends. All arguments are kept in ``args``, so that an error
    can be pickled across processes.

    Args:
        key: name of what was refused, spelled as the user wrote it (a configuration key, a tensor, an option).
        value: the refused value.
        accepted: a phrase that completes "accepted: ...".
        remedy: what to do about it, where ``accepted`` does not already say so.
    """

    exit_code: ClassVar[int] = 1
    subject: ClassVar[str] = "value"

    def __init__(self, key: str, value: object, accepted: str, remedy: str = "") -> None:
        super().__init__(key, value, accepted, remedy)
        self.key = key
        self.value = value
        self.accepted = accepted
        self.remedy = remedy

    def __str__(self) -> str:
        sentence = f"{self.subject} {self.key!r} is {_shorten(self.value)}; accepted: {self.accepted}"
        return f"{sentence} ({self.remedy})" if self.remedy else sentence


class InputError(DeepInferError):
    """A prompt, token id or request parameter that cannot be served."""

    exit_code = 2
    subject = "input"


class ConfigError(DeepInferError):
    """A model, layout or engine configuration that contradicts itself or names what is not supported."""

    exit_code = 3
    subject = "configuration key"


class CheckpointError(DeepInferError):
    """A checkpoint that is missing, incomplete, or differs from its configuration or digest."""

    exit_code = 4
    subject = "checkpoint entry"


class SnapshotError(DeepInferError):
    """A section of a request's state that is missing, damaged, or of another model, version or layout."""

    exit_code = 5
    subject = "state section"


class OverloadError(DeepInferError):
    """A request that came when too many were waiting already; later it may be served."""

    exit_code = 6
    subject = "load"


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= VALUE_CHARACTERS else f"{text[:VALUE_CHARACTERS]}... ({len(text)} characters)"
