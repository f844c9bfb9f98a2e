"""A request's state on its way out of an engine: pages as soon as they are computed, the rest at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_jax.cache.records import BlockPlanes, StateFormat, block_count, take_rows
from deepinfer_jax.cache.snapshot import META, SnapshotMeta, pack_blocks, pack_slot
from deepinfer_jax.errors import InputError
from deepinfer_jax.replay import Replay
from deepinfer_jax.request import Request


class Handover:
    """What an engine gives away of one request. Other threads read it, and cut it into sections when they do.

    The engine adds full blocks in the request's order and then completes or fails. Pages alone are worth nothing to a
    receiver: ``meta`` comes at the end, behind a sample that was found finite.
    """

    def __init__(self, form: StateFormat, changed: Callable[[], None] = lambda: None) -> None:
        """Make an empty one.

        ``hit_tokens`` are those of the prompt that a cache had; None until the first step was read. ``computed_at`` is
        when the last token was computed, in seconds of ``time.monotonic``; None before.

        Args:
          form: how the state is cut into records.
          changed: is called on the engine's thread whenever there is more to read, or an end.
        """
        self.form = form
        self._changed, self._lock = changed, threading.Lock()
        self._blocks: list[tuple[Any, int] | None] = []
        self._end: tuple[SnapshotMeta, Any] | None = None
        self._failure: str | None = None
        self.hit_tokens: int | None = None
        self.computed_at: float | None = None

    # The engine's side.

    def add(self, planes: Sequence[Any], count: int, hit_tokens: int) -> None:
        """The next ``count`` blocks, all full: host ``BlockPlanes`` as batches of them were read.

        ``hit_tokens``: of the prompt that were found in a cache.
        """
        with self._lock:
            self.hit_tokens = hit_tokens
            self._extend(planes, count)
        self._changed()

    def computed(self) -> None:
        """Note that the last token was computed: all that takes time from here on is the hand-over."""
        self.computed_at = time.monotonic()

    def complete(self, planes: Sequence[Any], count: int, meta: SnapshotMeta, slot: Any) -> None:
        """The last blocks as in :meth:`add`, the last of them perhaps not full, and everything else."""
        if self.computed_at is None:
            self.computed()
        with self._lock:
            self._extend(planes, count)
            self._end = meta, slot
        self._changed()

    def fail(self, reason: str) -> None:
        """There will be no end; without effect behind one."""
        with self._lock:
            if self._end is not None or self._failure is not None:
                return
            self._failure = reason
        self._changed()

    def _extend(self, planes: Sequence[Any], count: int) -> None:
        places = [(part, place) for part in planes for place in range(block_count(part))]
        self._blocks += places[:count]

    # The reader's side.

    @property
    def ready(self) -> int:
        """Blocks whose pages can be read."""
        # The last ones, which need not be full, must not be seen before ``meta``, which says so.
        with self._lock:
            return len(self._blocks)

    @property
    def meta(self) -> SnapshotMeta | None:
        """What the state is of, once it is complete."""
        return None if self._end is None else self._end[0]

    @property
    def failure(self) -> str | None:
        """Why there will be no end."""
        return self._failure

    def pages(self, first: int, stop: int) -> dict[str, bytes]:
        """The page sections of the blocks ``first`` up to ``stop``, which are ready."""
        meta, packed = self.meta, dict[str, bytes]()
        for block in range(first, stop):
            content = self._blocks[block]
            assert content is not None
            planes, place = content
            paged = (block + 1) * self.form.layout.block_tokens if meta is None else meta.paged
            packed |= pack_blocks(paged, block, _block(planes, place), self.form)
        return packed

    def forget(self, first: int, stop: int) -> None:
        """Let the blocks ``first`` up to ``stop`` go, whose pages are not read again."""
        with self._lock:
            self._blocks[first:stop] = [None] * (stop - first)

    def forget_rest(self) -> None:
        """Let everything else go but ``meta``; it is complete, and not read again."""
        with self._lock:
            assert self._end is not None
            self._end = self._end[0], None

    def rest(self) -> dict[str, bytes]:
        """The other sections, ``meta`` among them; complete ones only."""
        assert self._end is not None
        meta, slot = self._end
        return {META: meta.to_bytes()} | pack_slot(meta, slot, self.form)

    def snapshot(self) -> dict[str, bytes]:
        """All sections of a complete state."""
        return self.pages(0, self.ready) | self.rest()


def check_handover(
    request: Request, replay: Replay, handover: Handover | None, *, encoder_only: bool, half: bool
) -> int | None:
    """Check what an engine is to give away of a request. Returns how many of its tokens run here, None for all.

    Args:
      request: the request.
      replay: the engine's.
      handover: where the state goes, if anywhere.
      encoder_only: rows that decoder layers keep run elsewhere.
      half: the engine has the encoder side alone.

    Raises:
      InputError: the engine cannot do it, or nothing would be left to compute on one of the sides.
    """
    params = request.params
    if half and not encoder_only:
        raise InputError("encoder_only", False, "True, as this engine has no decoder layers", "use another engine")
    if handover is not None and params.n > 1:
        raise InputError("n", params.n, "1 where state is handed over", "send one request for each branch")
    if handover is not None and params.max_tokens <= len(request.answer):
        raise InputError("max_tokens", params.max_tokens, "at least one new token where state is handed over")
    if not encoder_only:
        return None
    if replay.decoder != "compact":
        accepted = "False, as decoder layers keep all rows here"
        raise InputError("encoder_only", True, accepted, "use an engine of replay.decoder compact")
    if handover is None or params.prompt_logprobs is not None:
        raise InputError("encoder_only", True, "True where state is handed over, and no prompt_logprobs are wanted")
    rows = replay.decoder_floor(len(request.prompt))
    if not rows:
        accepted = f"more than the {replay.keep} that decoder layers keep"
        raise InputError("prompt", f"{len(request.prompt)} tokens", accepted)
    return rows


def _block(planes: Any, place: int) -> BlockPlanes:
    at = slice(place, place + 1)
    return BlockPlanes(take_rows(planes.main, at), take_rows(planes.index, at))
