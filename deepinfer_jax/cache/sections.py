"""Sealed sections: named pieces of a request's state as bytes that carry what is needed to refuse them.

| offset | bytes | field (little-endian) |
|---:|---:|---|
| 0 | 8 | ``DIJXSECT`` |
| 8 | 4 | version, :data:`deepinfer_jax.cache.fingerprint.SCHEMA_VERSION` |
| 12 | 4 | bytes of a record |
| 16 | 8 | what the first record stands for, such as its absolute position in tokens |
| 24 | 8 | bytes of the payload, a whole number of records |
| 32 | 32 | fingerprint of the state |
| 64 | 8 | BLAKE2b of the name, the 64 bytes before, and the payload |
| 72 | - | payload |

The name is not stored, but a section opens under its own name alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct

from deepinfer_jax.cache.fingerprint import SCHEMA_VERSION
from deepinfer_jax.errors import SnapshotError

MAGIC = b"DIJXSECT"
_FIELDS = struct.Struct("<8sIIQQ32s")
_CHECKSUM_BYTES = 8
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES
_REMEDY = "fetch it again, or compute the tokens again"


@dataclasses.dataclass(frozen=True)
class Section:
    """An opened section: its payload, records of ``record_bytes`` bytes, and what the first one stands for."""

    payload: memoryview
    record_bytes: int
    first: int

    @property
    def records(self) -> int:
        """How many records there are."""
        return len(self.payload) // self.record_bytes


def seal(name: str, fingerprint: bytes, payload: bytes, record_bytes: int = 1, first: int = 0) -> bytes:
    """A section that opens under ``name`` for states of this fingerprint."""
    fields = _FIELDS.pack(MAGIC, SCHEMA_VERSION, record_bytes, first, len(payload), fingerprint)
    return b"".join((fields, _checksum(name, fields, payload), payload))


def open_section(name: str, fingerprint: bytes, content: bytes | memoryview) -> Section:
    """Check a section and give its payload, without a copy.

    Raises:
      SnapshotError: it is cut short or damaged, belongs under another name, or has another version or fingerprint.
    """
    content = memoryview(content)
    if len(content) < HEADER_BYTES:
        raise SnapshotError(name, f"{len(content)} bytes", f"{HEADER_BYTES} bytes or more", _REMEDY)
    fields = content[: _FIELDS.size]
    magic, version, record_bytes, first, size, found = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise SnapshotError(name, magic, f"a section, which begins with {MAGIC!r}", _REMEDY)
    if version != SCHEMA_VERSION:
        raise SnapshotError(
            name, f"version {version}", f"version {SCHEMA_VERSION}", "run the same release on both ends"
        )
    payload = content[HEADER_BYTES:]
    if len(payload) != size:
        raise SnapshotError(name, f"a payload of {len(payload)} bytes", f"{size} bytes, as it says itself", _REMEDY)
    checksum = bytes(content[_FIELDS.size : HEADER_BYTES])
    if checksum != _checksum(name, fields, payload):
        accepted = "content, name and checksum that belong together"
        raise SnapshotError(name, f"a section of checksum {checksum.hex()}", accepted, _REMEDY)
    if found != fingerprint:
        accepted = f"fingerprint {fingerprint.hex()}"
        remedy = "weights, configuration, numerics and block_tokens of both ends must be the same"
        raise SnapshotError(name, f"of fingerprint {found.hex()}", accepted, remedy)
    if not record_bytes or size % record_bytes:
        raise SnapshotError(name, f"{size} bytes", f"whole records of {record_bytes} bytes", _REMEDY)
    return Section(payload, record_bytes, first)


def split(content: bytes | memoryview) -> list[memoryview]:
    """The sections of a row of them, by the sizes they state themselves; nothing else is checked.

    A rest that is no section comes last, whatever it is.
    """
    rest, found = memoryview(content), []
    while rest:
        size = stated_bytes(rest) or len(rest)
        found.append(rest[:size])
        rest = rest[size:]
    return found


def stated_bytes(content: bytes | memoryview) -> int | None:
    """Bytes of the section that content begins with, as it says itself; None where it is too short to say."""
    if len(content) < HEADER_BYTES:
        return None
    size: int = _FIELDS.unpack(content[: _FIELDS.size])[4]
    return size + HEADER_BYTES


def _checksum(name: str, fields: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(fields, digest_size=_CHECKSUM_BYTES, key=hashlib.blake2b(name.encode()).digest())
    digest.update(payload)
    return digest.digest()
