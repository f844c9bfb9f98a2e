"""Logs of a server: one line a record, as JSON or as text, without anything of prompts and answers.

Records carry what they are about in ``extra``: request id, method, status, worker, seconds. Of an exception its class
and where it happened are written, and its message unless that is about a request's own values.
"""

from __future__ import annotations

import datetime
import json
import logging
import traceback
from typing import Any

from deepinfer_jax.errors import InputError

# What every record has; anything else was put there by ``extra``.
_COMMON = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Every record as one JSON object."""

    def __init__(self, worker: str) -> None:
        """``worker``: name of the process, in every line."""
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """The record's line."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": self._worker,
        }
        fields |= extras(record)
        if record.exc_info is not None and record.exc_info[1] is not None:
            fields["exception"] = describe_exception(record.exc_info[1])
        return json.dumps(fields, default=str)


class TextFormatter(logging.Formatter):
    """Every record as words and ``key=value``, for people."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's line."""
        time = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        words = [time, record.levelname.lower(), record.getMessage()]
        words += [f"{key}={value}" for key, value in extras(record).items() if value not in ("", None)]
        if record.exc_info is not None and record.exc_info[1] is not None:
            words += ["\n", *describe_exception(record.exc_info[1])]
        return " ".join(words)


def extras(record: logging.LogRecord) -> dict[str, Any]:
    """What a record is about."""
    return {key: value for key, value in vars(record).items() if key not in _COMMON}


def describe_exception(error: BaseException) -> list[str]:
    """Class, message and places of an exception, the outermost call first."""
    message = "" if isinstance(error, InputError) else str(error)
    places = traceback.extract_tb(error.__traceback__)
    return [f"{type(error).__name__}: {message}", *(f"{at.filename}:{at.lineno} {at.name}" for at in places)]


def start_logging(level: str, form: str, worker: str, handler: logging.Handler) -> None:
    """Write the logs of this process.

    Args:
      level: debug, info, warning or error.
      form: json or text.
      worker: name of the process.
      handler: writes them somewhere.
    """
    handler.setFormatter(JsonFormatter(worker) if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Other libraries say what they do at this level, and some say it of every call.
    for name in ("jax", "absl", "grpc", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
