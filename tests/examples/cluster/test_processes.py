"""The example's file serves every role, and servers that fail to start say where their log is."""

import pytest

from examples.cluster.__main__ import CONFIGURATION, PLACES
from serving.configuration import load_configuration
from serving.processes import Process, ProcessError, Processes
from tests.engines import ENVIRONMENT, REPOSITORY

WORKERS = [address for role, address in PLACES if role != "gateway"]


@pytest.mark.parametrize(("role", "address"), PLACES)
def test_one_file_serves_every_process(role, address):
    configuration = load_configuration(CONFIGURATION, {"server": {"role": role, "listen": address}})
    assert list(configuration.gateway.workers) == WORKERS
    assert configuration.engine.replay.mode == "bounded"


def test_a_server_that_cannot_start_is_reported_with_its_log(tmp_path):
    environment = ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)}
    notes = []
    with Processes(tmp_path, ["--set", "engine.slots=0"], notes.append, environment) as processes:
        with pytest.raises(ProcessError, match="has ended with status 3; see") as failed:
            processes.start_all([("decode", f"unix:{tmp_path / 'd'}")], seconds=120.0)
        (process,) = processes.running
    assert isinstance(process, Process)
    assert str(process.log) in str(failed.value)
    assert "'engine.slots' is 0" in process.log.read_text(encoding="utf-8")
    assert notes == []
