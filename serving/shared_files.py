"""Sections in files that other processes of the same host read: a directory of files in memory.

A file holds the sections of one state, one behind the other in the order of the plan, and grows by whole writes: its
size says how much is there. Nothing is mapped, so that a file that shrinks or a full memory is an error and never a
signal. The process that made a file holds a lock on it, which ends with the process however that ends: a file without
its lock has no owner, and anyone may remove it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvEndpoint

_log = logging.getLogger("serving.kv")

SCHEME = "shm://"
DIRECTORY = Path("/dev/shm")
"""Where Linux keeps files in memory."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PREFIX = "deepinfer-kv"
_NAME = re.compile(rf"{_PREFIX}-[0-9]+-[0-9a-f]{{32}}")
# Linux writes at most 1,024 buffers at a time.
_BUFFERS_AT_ONCE = 1024
_REMOVAL_SECONDS = 30.0


def host_id(directory: Path = DIRECTORY) -> str | None:
    """What two processes have in common that see the same files there; None where there is no such directory.

    It is of the running kernel and of the mounted file system, so that containers with directories of their own differ.
    """
    try:
        content = f"{_boot_id()} {directory.stat().st_dev}"
    except OSError:
        return None
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


@functools.cache
def _boot_id() -> str:
    # Reading it takes milliseconds, again and again.
    return _BOOT_ID.read_text().strip()


def path_of(endpoint: KvEndpoint, directory: Path = DIRECTORY) -> Path | None:
    """The file of an endpoint; None if it is not on this host, or could not be one of ours."""
    host, slash, name = endpoint.uri.removeprefix(SCHEME).partition("/")
    if not (endpoint.uri.startswith(SCHEME) and slash and _NAME.fullmatch(name)):
        return None
    return directory / name if host == host_id(directory) else None


class SharedStorage:
    """A ``SectionStorage`` in one file. What it cannot take for want of memory stays on the heap, for Pulls."""

    def __init__(self, directory: Path = DIRECTORY) -> None:
        """Make an empty file.

        Raises:
          OSError: there is no such directory, or no room.
        """
        self._lock = threading.Lock()
        self._path, self._file = _create(directory)
        self._uri = f"{SCHEME}{host_id(directory)}/{self._path.name}"
        self._places: dict[str, tuple[int, int]] = {}
        self._heap: dict[str, bytes] = {}
        self._size = 0
        self._spilled = self._closed = False

    @property
    def endpoint(self) -> KvEndpoint | None:
        return KvEndpoint(uri=self._uri)

    def put(self, sections: Mapping[str, bytes]) -> None:
        with self._lock:
            if self._closed:
                return
            if not self._spilled:
                try:
                    self._append(sections)
                    return
                except OSError:
                    _log.warning("no room for a state in shared memory", exc_info=True)
                    # Readers must not wait for what will never come.
                    self._spilled = True
                    self._path.unlink(missing_ok=True)
            self._heap |= sections

    def get(self, name: str) -> bytes | None:
        with self._lock:
            if self._closed:
                return None
            if name in self._places:
                offset, size = self._places[name]
                return os.pread(self._file, size, offset)
            return self._heap.get(name)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed, self._heap, self._places = True, {}, {}
            self._path.unlink(missing_ok=True)
            # The memory is free now, and readers see it, though they may have the file open.
            os.ftruncate(self._file, 0)
            os.close(self._file)

    def _append(self, sections: Mapping[str, bytes]) -> None:
        contents, behind = list(sections.values()), self._size
        for begin in range(0, len(contents), _BUFFERS_AT_ONCE):
            behind = _write(self._file, contents[begin : begin + _BUFFERS_AT_ONCE], behind)
        for name, content in sections.items():
            self._places[name] = self._size, len(content)
            self._size += len(content)


def remove_orphans(directory: Path = DIRECTORY) -> int:
    """Remove the files of processes that have ended. Returns how many there were."""
    count = 0
    for path in _files(directory):
        # Another process may remove it too, or be another user's.
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(file, path):
                    path.unlink()
                    count += 1
            finally:
                os.close(file)
    return count


async def keep_removed(directory: Path = DIRECTORY) -> None:
    """Remove files of processes that have ended, now and again; never returns."""
    while True:
        count = await asyncio.to_thread(remove_orphans, directory)
        if count:
            _log.warning("%d states of processes that have ended were removed", count)
        await asyncio.sleep(_REMOVAL_SECONDS)


def _files(directory: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]


def _create(directory: Path) -> tuple[Path, int]:
    while True:
        path = directory / f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(16)}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if _is_at(file, path):
            return path, file
        # It was taken for an orphan before it had its lock.
        os.close(file)


def _is_at(file: int, path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    own = os.fstat(file)
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


def _write(file: int, contents: Iterable[bytes], at: int) -> int:
    """Write all contents at a place. Returns the place behind them."""
    views = [memoryview(content) for content in contents if content]
    while views:
        written = os.pwritev(file, views, at)
        at += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]
    return at
