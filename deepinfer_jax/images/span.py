"""Image spans: the positions an image takes in a prompt (model specification, 14.5).

Every position of a span has the placeholder's token id, as in the vendor's reference; what it stands for is its
:class:`TokenType`. (DeepInfer numbers the positions beyond the vocabulary instead. Both are internal: span positions
never reach the embedding table, and all their types are alike to router and Engram.) Two images of one size therefore
have the same ids: whatever identifies a prompt by its ids must add the images.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from deepinfer_jax.errors import InputError
from deepinfer_jax.images.plan import ImagePlan


class TokenType(enum.IntEnum):
    """What a position stands for, numbered as in the reference; all but TEXT are image-type."""

    TEXT = -1
    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3


class SplicedPrompt(NamedTuple):
    """A prompt with its image spans.

    ``image`` marks the positions of spans, ``offsets`` are the positions of their START tokens, in image order.
    """

    token_ids: tuple[int, ...]
    image: Bool[np.ndarray, " tokens"]
    offsets: tuple[int, ...]


def span_tokens(plan: ImagePlan) -> Int[np.ndarray, " span"]:
    """The token types of an image's span: START, rows of IMAGE each closed by a NEWLINE, END."""
    rows, columns = plan.token_grid
    row = [TokenType.IMAGE] * columns + [TokenType.NEWLINE]
    return np.array([TokenType.START, *row * rows, TokenType.END], np.int32)


def splice_spans(token_ids: Sequence[int], image_token_id: int, plans: Sequence[ImagePlan]) -> SplicedPrompt:
    """Widen each placeholder of a prompt to the span of its image, in order.

    Raises:
      InputError: the prompt has not as many placeholders as there are images.
    """
    placeholders = [position for position, token in enumerate(token_ids) if token == image_token_id]
    if len(placeholders) != len(plans):
        accepted = f"{len(placeholders)}, one for each image placeholder {image_token_id} in the prompt"
        raise InputError("number of images", len(plans), accepted)
    repeats = np.ones(len(token_ids), np.int64)
    repeats[placeholders] = [plan.tokens for plan in plans]
    starts = np.cumsum(repeats) - repeats
    spliced = np.repeat(np.asarray(token_ids, np.int64), repeats)
    return SplicedPrompt(
        token_ids=tuple(spliced.tolist()),
        image=spliced == image_token_id,
        offsets=tuple(starts[placeholders].tolist()),
    )
