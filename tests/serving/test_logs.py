"""Lines of the log: what they carry, and what they never do."""

import io
import json
import logging

import pytest

from deepinfer_jax.errors import InputError
from serving.logs import JsonFormatter, TextFormatter, start_logging


def lines(formatter, log):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("serving.test")
    logger.addHandler(handler)
    log(logger)
    return stream.getvalue().splitlines()


def fail(error):
    def log(logger):
        try:
            raise error
        except type(error):
            logger.exception("call failed", extra={"request_id": "r1"})

    return log


def test_every_record_is_one_json_object_with_what_it_is_about():
    (line,) = lines(JsonFormatter("w"), lambda log: log.info("call %d", 3, extra={"request_id": "r1", "seconds": 0.5}))
    record = json.loads(line)
    assert record.pop("time").endswith("+00:00")
    assert record == {
        "level": "info",
        "logger": "serving.test",
        "message": "call 3",
        "process": "w",
        "request_id": "r1",
        "seconds": 0.5,
    }


def test_exceptions_say_where_they_were_and_nothing_of_a_request():
    (line,) = lines(JsonFormatter("w"), fail(InputError("prompt", (5, 6, 7), "fewer")))
    record = json.loads(line)
    assert record["exception"][0] == "InputError: "
    assert record["exception"][1].endswith(" log")
    assert "5, 6" not in line
    (line,) = lines(JsonFormatter("w"), fail(RuntimeError("out of memory")))
    assert json.loads(line)["exception"][0] == "RuntimeError: out of memory"


def test_text_is_for_people():
    (line,) = lines(TextFormatter(), lambda log: log.warning("worker lost", extra={"worker": "d", "reason": ""}))
    assert line.endswith("warning worker lost worker=d")
    assert "call failed request_id=r1" in lines(TextFormatter(), fail(RuntimeError("gone")))[0]


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_process_logs_to_its_stream(form):
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    try:
        start_logging("warning", form, "w", logging.StreamHandler(stream))
        logging.getLogger("serving.calls").info("not this")
        logging.getLogger("serving.calls").warning("this")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    assert stream.getvalue().count("\n") == 1
    assert "this" in stream.getvalue()
    assert "not this" not in stream.getvalue()
