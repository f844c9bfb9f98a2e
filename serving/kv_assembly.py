"""The receiving end of pulls: chunks in, sections out, and the place from which a broken pull is resumed.

A pull sends its sections in order, so that every byte has one place where it can come: anything else is refused, and
memory is bounded by what the plan allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serving.kv_chunks import DEFAULT_CHUNK_BYTES, ChunkError, read_chunk
from serving.kv_sections import PlannedSection, StatePlan
from serving.proto.deepinfer.v1.kv_transfer_pb2 import KvPiece, KvPosition


class PullReader:
    """Reads one pull, over any number of streams that go on where the one before broke.

    Attributes:
        sections: those that are whole, by name; views of the messages they came in where one held them whole.
        received: bytes of data so far.
        computed: when the last token was, as the latest chunk says: seconds before, and at; None if it does not.
        done: whether the last chunk has come.
    """

    def __init__(self, sections: Sequence[PlannedSection], chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        """``sections``: those asked for, in order; ``chunk_bytes``: most bytes of data in a chunk."""
        self._planned, self._chunk_bytes = sections, chunk_bytes
        self._place = 0
        # The section that has begun and is not whole, and how much of it is there.
        self._begun = bytearray()
        self._filled = 0
        self.sections: dict[str, bytes | memoryview] = {}
        self.received = 0
        self.computed: tuple[float, float] | None = None
        self.done = False

    @property
    def position(self) -> KvPosition | None:
        """Where the next stream goes on; None where it begins anew."""
        if self._place == len(self._planned):
            # Everything is there but the word that it is the last.
            if not self._planned:
                return None
            last = self._planned[-1].name
            return KvPosition(section=last, offset=len(self.sections[last]))
        if not self.received:
            return None
        return KvPosition(section=self._planned[self._place].name, offset=self._filled)

    @property
    def due(self) -> PlannedSection | None:
        """The section that the next byte belongs to; None behind all of them."""
        return self._planned[self._place] if self._place < len(self._planned) else None

    def add(self, message: bytes) -> dict[str, bytes | memoryview]:
        """Take the next chunk of the stream. Returns the sections that are whole with it.

        Raises:
          ChunkError: see :func:`serving.kv_chunks.read_chunk`; or it holds what cannot come here. Nothing was taken.
        """
        if self.done:
            raise ChunkError("a chunk came behind the last one")
        chunk = read_chunk(message, self._chunk_bytes)
        place = self._check(chunk.pieces)
        if chunk.last and place != len(self._planned):
            raise ChunkError(f"the last chunk came before {self._planned[place].name} was whole")
        at, whole = 0, dict[str, bytes | memoryview]()
        for piece in chunk.pieces:
            self._take(piece, chunk.data[at : at + piece.length], whole)
            at += piece.length
        self.sections |= whole
        self.received += at
        self.done, self.computed = chunk.last, chunk.computed
        return whole

    def end(self) -> None:
        """Note that a stream has ended well.

        Raises:
          ChunkError: the last chunk has not come.
        """
        if not self.done:
            raise ChunkError("the stream ended before its last chunk")

    def _check(self, pieces: Iterable[KvPiece]) -> int:
        """Check that pieces go on where the reader is. Returns the section behind them."""
        place, filled, size = self._place, self._filled, len(self._begun)
        for piece in pieces:
            if place == len(self._planned):
                raise ChunkError(f"a piece of {piece.section!r} came behind all that was asked for")
            planned = self._planned[place]
            if (piece.section, piece.offset) != (planned.name, filled):
                found = f"byte {piece.offset} of {piece.section!r}"
                raise ChunkError(f"{found} came where byte {filled} of {planned.name!r} was due")
            if not planned.least <= piece.section_bytes <= planned.most or (filled and piece.section_bytes != size):
                raise ChunkError(f"{planned.name} cannot have {piece.section_bytes} bytes")
            size = piece.section_bytes
            filled += piece.length
            if not piece.length or filled > size:
                raise ChunkError(f"{piece.length} bytes from {piece.offset} on are no piece of {size} bytes")
            if filled == size:
                place, filled = place + 1, 0
        return place

    def _take(self, piece: KvPiece, data: memoryview, whole: dict[str, bytes | memoryview]) -> None:
        """Take a piece; its section is added to ``whole`` if it is."""
        section: bytes | memoryview
        if piece.length == piece.section_bytes:
            section = data
        else:
            if not piece.offset:
                self._begun = bytearray(piece.section_bytes)
            self._begun[piece.offset : piece.offset + piece.length] = data
            self._filled = piece.offset + piece.length
            if self._filled < piece.section_bytes:
                return
            section = memoryview(self._begun)
        whole[piece.section] = section
        self._begun, self._filled, self._place = bytearray(), 0, self._place + 1


def join(plan: StatePlan, readers: Iterable[PullReader]) -> dict[str, bytes | memoryview]:
    """The sections of a plan that some pulls have read between them, each by one of them.

    Raises:
      ChunkError: one is missing.
    """
    found: dict[str, bytes | memoryview] = {}
    for reader in readers:
        found |= reader.sections
    for section in plan.sections:
        if section.name not in found:
            raise ChunkError(f"{section.name} was not pulled")
    return {section.name: found[section.name] for section in plan.sections}
