"""Clusters of server processes over a tiny model, deterministic and exact: what goes on elsewhere is the same."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import time
import urllib.request
from pathlib import Path

from deepinfer_jax.checkpoint.synthetic import synthesize
from deepinfer_jax.request import SamplingParams
from serving.channels import RetryPolicy
from serving.client import Client
from serving.events import Delta
from serving.processes import Processes
from tests.engines import ENVIRONMENT, REPOSITORY, tiny_drafting_configuration

PROCESS_ENVIRONMENT = ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)}
SECONDS = 300.0
ONCE = RetryPolicy(attempts=1)
# Long enough that a signal arrives long before the end.
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = tuple(3 + (7 * place) % 90 for place in range(41))
LONG_PROMPT = tuple(3 + (11 * place + place // 90) % 90 for place in range(3000))
CONFIGURATION = """
[engine]
slots = 4
blocks = 800
decode_rows = [4]
prefill_tiles = [1]
block_tokens = 16
deterministic = true
[engine.replay]
mode = "exact"
[kv]
lease_seconds = 10.0
[gateway]
poll_seconds = 0.2
attempts = 8
stop_strings = false
[server]
drain_seconds = 60.0
"""
SHARED_FILES = "deepinfer-kv-*"


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of a cluster: its role, the names of a gateway's workers, and more options of ``serve``."""

    role: str
    workers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


TWO_WAYS_SLOTS = 6
TWO_WAYS_CONTEXT = 8192
TWO_WAYS_CONFIGURATION = (
    CONFIGURATION.replace("slots = 4", f"slots = {TWO_WAYS_SLOTS}")
    .replace("decode_rows = [4]", f"decode_rows = [{TWO_WAYS_SLOTS}]")
    .replace("blocks = 800", "blocks = 2400")
    .replace("[kv]", "[kv]\npatience_seconds = 1.0\nchunk_bytes = 65536")
)


def two_ways(network):
    """Members of which a prefill worker's states pass through a network, and another one's lie in files.

    Both hand over to the same decode worker; each has a gateway of its own.
    """
    metrics = ("--metrics=127.0.0.1:0",)
    bulk = (f"--set=server.advertise={network.address}", "--set=kv.transports=['grpc']")
    return {
        "p": Member("prefill", options=(*metrics, *bulk)),
        "s": Member("prefill", options=metrics),
        "d": Member("decode", options=metrics),
        "g": Member("gateway", ("p", "d"), metrics),
        "h": Member("gateway", ("s", "d"), metrics),
    }


class Cluster:
    """Named processes; those that a test has ended are started for the next."""

    def __init__(self, directory, processes, members):
        self.directory, self.processes, self.members = directory, processes, members
        self.running, self._clients = {}, {}

    def address(self, name):
        return f"unix:{self.directory / name}"

    def client(self, name="g"):
        """A client of a member that does not repeat its calls."""
        if name not in self._clients:
            self._clients[name] = Client(self.address(name), timeout=SECONDS, retries=ONCE)
        return self._clients[name]

    def ensure(self):
        """Have all members run, and all gateways know all their workers."""
        for name, member in self.members.items():
            process = self.running.get(name)
            if process is None or process.popen.poll() is not None:
                Path(self.directory, name).unlink(missing_ok=True)
                workers = [f"--worker={self.address(other)}" for other in member.workers]
                options = (f"--name={name}", *workers, *member.options)
                self.running[name] = self.processes.start(member.role, self.address(name), *options)
                # One after the other: the first one's compiled steps serve the others.
                self.running[name].wait_healthy(SECONDS)
        self.close()
        end = time.monotonic() + SECONDS
        for name, member in self.members.items():
            while member.workers and len(self.client(name).load().shards) < len(member.workers):
                assert time.monotonic() < end, f"gateway {name} has not found all of its workers"
                time.sleep(0.05)

    def close(self):
        """End the connections."""
        for client in self._clients.values():
            client.close()
        self._clients = {}

    def signal(self, name, number):
        os.kill(self.pid(name), number)

    @contextlib.contextmanager
    def stopped(self, *names):
        """Let members stand still for as long as the context lasts."""
        for name in names:
            self.signal(name, signal.SIGSTOP)
        try:
            yield
        finally:
            for name in names:
                if self.running[name].popen.poll() is None:
                    self.signal(name, signal.SIGCONT)

    def pid(self, name):
        return self.running[name].popen.pid

    def kill(self, name):
        self.running[name].popen.kill()
        self.running[name].popen.wait()

    def log(self, name):
        # The last line may be half written.
        lines = self.running[name].log.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]

    def calls(self, name, request_id):
        """Method and status of a request's calls in the log of a process, once there are any."""
        end, calls = time.monotonic() + 30, []
        while not calls and time.monotonic() < end:
            time.sleep(0.02)
            lines = [line for line in self.log(name) if line.get("request_id") == request_id and "method" in line]
            calls = [(line["method"], line["code"]) for line in lines]
        return calls

    def metrics(self, name):
        """The samples of a member's page of metrics that have no labels; it is started with ``--metrics``."""
        port = re.search(r"metrics at port (\d+)", self.running[name].log.read_text(encoding="utf-8"))[1]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            lines = [line.split() for line in page.read().decode().splitlines()]
        return {line[0]: float(line[1]) for line in lines if len(line) == 2}

    def shared_files(self, name):
        """Files of states that a process has made."""
        paths = Path("/dev/shm").glob(SHARED_FILES)
        return [path for path in paths if int(path.name.split("-")[2]) == self.pid(name)]

    def idle(self, seconds=60.0):
        """Wait until no worker that runs has anything of any request. Returns whether it came to that."""
        end = time.monotonic() + seconds
        while True:
            workers = [name for name, member in self.members.items() if not member.workers]
            alive = [name for name in workers if self.running[name].popen.poll() is None]
            loads = []
            for name in alive:
                with Client(self.address(name), timeout=20.0) as client:
                    load = client.load()
                    loads += [load.queued_requests, *(left for shard in load.shards for left in left_in(shard))]
            if not any(loads) and not any(self.shared_files(name) for name in alive):
                return True
            if time.monotonic() > end:
                return False
            time.sleep(0.1)


def left_in(shard):
    """What a shard has of requests."""
    return shard.running_requests, shard.used_pages, shard.held_requests, shard.held_tokens, shard.read_backlog_bytes


def make_model(directory, max_context=4096):
    """Write the weights of a model of so many tokens."""
    document = tiny_drafting_configuration()
    document["text_config"]["max_position_embeddings"] = max_context
    synthesize(document, directory, quantised=False)
    return directory


@contextlib.contextmanager
def running_cluster(directory, model, members, configuration=CONFIGURATION):
    """A cluster whose members are started by its ``ensure``; at the end no process and no file of it is left."""
    path = directory / "server.toml"
    path.write_text(configuration, encoding="utf-8")
    options = ["--config", str(path), "--model", str(model)]
    with Processes(directory, options, environment=PROCESS_ENVIRONMENT) as processes:
        cluster = Cluster(directory, processes, members)
        yield cluster
        cluster.close()
    assert all(process.popen.returncode is not None for process in processes.running)
    pids = {process.popen.pid for process in processes.running}
    assert [path for path in Path("/dev/shm").glob(SHARED_FILES) if int(path.name.split("-")[2]) in pids] == []


def tokens_of(events):
    return [token for event in events if isinstance(event, Delta) for token in event.tokens]


def until(events, kind):
    """The events up to the first one of a kind."""
    seen = []
    for event in events:
        seen.append(event)
        if isinstance(event, kind):
            return seen
    raise AssertionError(f"the stream ended without {kind}")
