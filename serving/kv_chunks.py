"""Chunks of sections: what ``KvTransfer.Pull`` sends, packed without a needless copy of the data, and read again.

While packing, data is copied into a buffer that stays in the processor's cache, and once more out of it; while reading,
not at all. A chunk is written with its data first, which any protobuf parser reads; :func:`read_chunk` parses what
another sender ordered differently, at the price of copies.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from serving.errors import bad_field
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvChunk, KvPiece, KvPullRequest

DEFAULT_CHUNK_BYTES = 1 << 20
LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES = 1 << 16, 1 << 21

# Field 2, of wire type "length-delimited".
_DATA_TAG = b"\x12"
_LONGEST_VARINT = 10
_WORD_BYTES = 8
# Room for everything but data; what is larger would be kept in memory with the data.
_HEAD_ROOM, _PIECE_ROOM = 1024, 128


class ChunkError(Exception):
    """A chunk that arrived damaged, or that cannot come where it came; it changed nothing."""


class Chunk(NamedTuple):
    """A chunk as it was read. ``data`` is a view of the message; ``computed``: seconds ago, and at; None: not known."""

    pieces: list[KvPiece]
    data: memoryview
    last: bool
    computed: tuple[float, float] | None


def chunk_bytes_of(request: KvPullRequest) -> int:
    """The size of chunks that a pull asks for.

    Raises:
      InvalidRequestError: it is out of range.
    """
    if not request.HasField("chunk_bytes"):
        return DEFAULT_CHUNK_BYTES
    if not LEAST_CHUNK_BYTES <= request.chunk_bytes <= MOST_CHUNK_BYTES:
        raise bad_field("chunk_bytes", request.chunk_bytes, f"{LEAST_CHUNK_BYTES} to {MOST_CHUNK_BYTES}")
    return request.chunk_bytes


class ChunkPacker:
    """Packs sections, one behind the other, into serialised ``KvChunk`` messages of at most ``chunk_bytes`` of data.

    ``sums``: they carry sums instead of CRCs; ``computed_at``: says when the last token was computed, by
    ``time.monotonic``.
    """

    def __init__(
        self,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        *,
        sums: bool = False,
        computed_at: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._chunk_bytes, self._sums, self._computed_at = chunk_bytes, sums, computed_at
        self._pieces: list[KvPiece] = []
        self._data = memoryview(bytearray(chunk_bytes))
        self._size = 0

    def add(self, name: str, content: bytes | memoryview, offset: int = 0) -> Iterator[bytes]:
        """Take a section from a byte on. Gives the chunks that are full with it."""
        view = memoryview(content)
        while offset < len(view):
            length = min(len(view) - offset, self._chunk_bytes - self._size)
            self._pieces.append(KvPiece(section=name, offset=offset, length=length, section_bytes=len(view)))
            self._data[self._size : self._size + length] = view[offset : offset + length]
            self._size += length
            offset += length
            if self._size == self._chunk_bytes:
                yield self._chunk(last=False)

    def flush(self) -> Iterator[bytes]:
        """The chunk of what is left, if anything is."""
        if self._size:
            yield self._chunk(last=False)

    def finish(self) -> bytes:
        """The last chunk, which may be empty."""
        return self._chunk(last=True)

    def _chunk(self, *, last: bool) -> bytes:
        data = self._data[: self._size]
        head, at = KvChunk(pieces=self._pieces, last=last), self._computed_at()
        if at is not None:
            head.computed_ago, head.computed_at = time.monotonic() - at, at
        if self._sums:
            head.sum = word_sum(data)
        else:
            head.crc32 = zlib.crc32(data)
        message = b"".join((_DATA_TAG, _varint(self._size), data, head.SerializeToString()))
        self._pieces, self._size = [], 0
        return message


def word_sum(data: bytes | memoryview) -> int:
    """``KvChunk.sum`` of data."""
    words = len(data) // _WORD_BYTES
    rest = int.from_bytes(data[words * _WORD_BYTES :], "little")
    return (int(np.frombuffer(data, "<u8", words).sum(dtype=np.uint64)) + rest) % (1 << 64)


def read_chunk(message: bytes, most_bytes: int = MOST_CHUNK_BYTES) -> Chunk:
    """Read a serialised ``KvChunk`` with at most so many bytes of data.

    Raises:
      ChunkError: it is no chunk, too large, or its data is not what the checksum is of.
    """
    data, behind = _leading_data(message)
    try:
        chunk = KvChunk.FromString(message[behind:])
    except DecodeError as error:
        raise ChunkError(f"a message of {len(message)} bytes is no chunk") from error
    if chunk.data:
        data = memoryview(chunk.data)
    pieces = list(chunk.pieces)
    if len(data) > most_bytes:
        raise ChunkError(f"a chunk holds {len(data)} bytes, asked for were at most {most_bytes}")
    if len(message) - len(data) > _HEAD_ROOM + _PIECE_ROOM * len(pieces):
        raise ChunkError(f"a chunk of {len(pieces)} pieces is {len(message) - len(data)} bytes larger than its data")
    if sum(piece.length for piece in pieces) != len(data):
        raise ChunkError(f"the pieces of a chunk are not the {len(data)} bytes that it holds")
    found, stated = (word_sum(data), chunk.sum) if chunk.HasField("sum") else (zlib.crc32(data), chunk.crc32)
    if found != stated:
        raise ChunkError(f"the data of a chunk has not its checksum {stated:08x}")
    computed = (chunk.computed_ago, chunk.computed_at) if chunk.HasField("computed_ago") else None
    return Chunk(pieces, data, chunk.last, computed)


def _leading_data(message: bytes) -> tuple[memoryview, int]:
    """Data that a message begins with, and where it ends; empty if the message begins with something else."""
    nothing = memoryview(b""), 0
    if message[:1] != _DATA_TAG:
        return nothing
    size, at = 0, 1
    for shift in range(0, 7 * _LONGEST_VARINT, 7):
        byte = message[at] if at < len(message) else 0
        size |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            break
    # A length that reaches beyond the message is left to the parser, which refuses it.
    return (memoryview(message)[at : at + size], at + size) if at + size <= len(message) else nothing


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
