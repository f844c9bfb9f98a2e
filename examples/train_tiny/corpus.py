"""The training text: the Python standard library's sources and its documentation topics, split by file.

Everything is read from the running interpreter's own library (Python Software Foundation Licence), so that nothing has
to be fetched. The same Python version gives the same documents in the same order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# Tables, data and test inputs, which nobody would want to see continued.
LEFT_OUT = frozenset({"site-packages", "test", "tests", "encodings", "lib2to3", "__pycache__", "ensurepip"})
LONGEST_LINE = 400
SHINGLE_LINES = 4
# A document whose shingles have been seen to this share is a near-duplicate.
DUPLICATE_SHARE = 0.5
HELD_OUT_ONE_IN = 20


@dataclasses.dataclass(frozen=True)
class Document:
    """One file: its name relative to the library, with forward slashes, and its text."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents to train on, and documents that training never sees."""

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over names and texts; two machines with the same digest train on the same text."""
        digest = hashlib.sha256()
        for document in (*self.training, *self.held_out):
            for part in (document.name, document.text):
                encoded = part.encode()
                digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.hexdigest()


def read_corpus(library: Path | None = None) -> Corpus:
    """The standard library at ``library`` (the running interpreter's by default), without near-duplicates, split."""
    documents = without_near_duplicates(read_documents(library or Path(sysconfig.get_paths()["stdlib"])))
    held_out = [document for document in documents if _is_held_out(document.name)]
    training = [document for document in documents if not _is_held_out(document.name)]
    return Corpus(tuple(training), tuple(held_out))


def read_documents(library: Path) -> list[Document]:
    """Every Python file below ``library`` that is text for people, by name."""
    paths = sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).as_posix())
    documents = []
    for path in paths:
        name = path.relative_to(library)
        if LEFT_OUT.isdisjoint(name.parts):
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if text.strip() and max(map(len, text.splitlines())) <= LONGEST_LINE:
                documents.append(Document(name.as_posix(), text))
    return documents


def without_near_duplicates(documents: Sequence[Document]) -> list[Document]:
    """The documents in order, without those most of whose lines, a few at a time, stand in earlier ones."""
    seen: set[bytes] = set()
    kept = []
    for document in documents:
        shingles = set(_shingles(document.text))
        if shingles and len(shingles & seen) > DUPLICATE_SHARE * len(shingles):
            continue
        seen |= shingles
        kept.append(document)
    return kept


def _shingles(text: str) -> Iterator[bytes]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for start in range(max(1, len(lines) - SHINGLE_LINES + 1)):
        yield _digest(lines[start : start + SHINGLE_LINES])


def _digest(lines: Iterable[str]) -> bytes:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()


def _is_held_out(name: str) -> bool:
    """By name alone, so that a file stays on its side when others come or go."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") % HELD_OUT_ONE_IN == 0
