"""Files that two processes share: they grow by whole writes, end with their owner, and are never another's."""

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from serving import shared_files
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvEndpoint
from serving.shared_files import DIRECTORY, SharedStorage, host_id, path_of, remove_orphans

SECTIONS = {f"page({block}, {group})": os.urandom(10 + 7 * block) for block in range(700) for group in range(2)}


def only_file(directory):
    (path,) = directory.iterdir()
    return path


def test_a_file_holds_what_was_put_in_its_order(tmp_path):
    storage = SharedStorage(tmp_path)
    names = list(SECTIONS)
    for begin in range(0, len(names), 1300):
        storage.put({name: SECTIONS[name] for name in names[begin : begin + 1300]})
    assert {name: storage.get(name) for name in SECTIONS} == SECTIONS
    assert storage.get("meta") is None
    path = path_of(storage.endpoint, tmp_path)
    assert path == only_file(tmp_path)
    assert path.read_bytes() == b"".join(SECTIONS.values())
    assert path.stat().st_mode & 0o777 == 0o600
    with path.open("rb") as reader:
        storage.close()
        assert reader.read() == b""
    assert list(tmp_path.iterdir()) == []
    assert storage.get("page(0, 0)") is None
    storage.put({"meta": b"late"})
    storage.close()
    assert list(tmp_path.iterdir()) == []


def test_what_memory_cannot_hold_stays_on_the_heap_and_readers_learn_of_it(tmp_path, monkeypatch):
    storage = SharedStorage(tmp_path)
    storage.put({"page(0, 0)": b"first"})

    def full(file, views, at):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    storage.put({"page(0, 1)": b"second"})
    monkeypatch.undo()
    storage.put({"meta": b"third"})
    assert [storage.get(name) for name in ("page(0, 0)", "page(0, 1)", "meta")] == [b"first", b"second", b"third"]
    assert not path_of(storage.endpoint, tmp_path).exists()
    storage.close()


@settings(max_examples=50, phases=[Phase.generate])
@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8), limit=st.integers(1, 30))
def test_writes_that_are_cut_short_are_continued(tmp_path_factory, sizes, limit):
    path = tmp_path_factory.mktemp("cut") / "file"
    contents = [os.urandom(size) for size in sizes]
    whole_write = os.pwritev

    def short_write(file, views, at):
        return whole_write(file, [b"".join(views)[:limit]], at)

    file = os.open(path, os.O_RDWR | os.O_CREAT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", short_write)
        assert shared_files._write(file, contents, 3) == 3 + sum(sizes)
    os.close(file)
    assert path.read_bytes()[3:] == b"".join(contents)


OWNER = """
import pathlib, sys, time
from serving.shared_files import SharedStorage
storage = SharedStorage(pathlib.Path(sys.argv[1]))
storage.put({"meta": bytes(1000)})
print("here", flush=True)
time.sleep(1000)
"""


def test_files_of_killed_processes_are_removed_and_no_others(tmp_path):
    own = SharedStorage(tmp_path)
    (tmp_path / "deepinfer-kv-1-short").touch()
    (tmp_path / "other").touch()
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert owner.stdout.readline() == b"here\n"
        assert len(list(tmp_path.iterdir())) == 4
        assert remove_orphans(tmp_path) == 0
        assert len(list(tmp_path.iterdir())) == 4
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    assert remove_orphans(tmp_path) == 1
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {path_of(own.endpoint, tmp_path).name, "deepinfer-kv-1-short", "other"}
    own.close()


def test_a_file_that_was_taken_for_an_orphan_while_it_was_made_is_made_anew(tmp_path, monkeypatch):
    lock, stolen = shared_files.fcntl.flock, []

    def steal_first(file, how):
        if not stolen:
            stolen.append(only_file(tmp_path))
            stolen[0].unlink()
        lock(file, how)

    monkeypatch.setattr(shared_files.fcntl, "flock", steal_first)
    storage = SharedStorage(tmp_path)
    assert only_file(tmp_path) == path_of(storage.endpoint, tmp_path) != stolen[0]
    storage.close()


def test_a_file_that_took_the_place_of_an_orphan_is_not_removed(tmp_path, monkeypatch):
    lock, path = shared_files.fcntl.flock, tmp_path / f"deepinfer-kv-1-{'0' * 32}"
    path.touch()

    def replace_first(file, how):
        path.unlink()
        path.write_bytes(b"another")
        lock(file, how)

    monkeypatch.setattr(shared_files.fcntl, "flock", replace_first)
    assert remove_orphans(tmp_path) == 0
    assert path.read_bytes() == b"another"


def test_endpoints_elsewhere_and_names_that_are_no_files_of_ours_are_not_opened(tmp_path):
    name = f"deepinfer-kv-1-{'0' * 32}"
    here = host_id(tmp_path)
    assert path_of(KvEndpoint(uri=f"shm://{here}/{name}"), tmp_path) == tmp_path / name
    for uri in (
        f"grpc://{here}/{name}",
        f"shm://{'0' * 32}/{name}",
        f"shm://{here}/../{name}",
        f"shm://{here}/passwd",
        f"shm://{here}/{name}/x",
        f"shm://{here}",
        "shm://",
    ):
        assert path_of(KvEndpoint(uri=uri), tmp_path) is None
    assert host_id(tmp_path / "missing") is None
    if DIRECTORY.exists():
        assert host_id(DIRECTORY) != host_id(tmp_path)
    with pytest.raises(OSError, match="missing"):
        SharedStorage(tmp_path / "missing")
    assert remove_orphans(tmp_path / "missing") == 0
