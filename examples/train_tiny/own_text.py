"""What the backbone itself says behind prompts of the training text, which is what its drafts are to foretell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import F32
from examples.train_tiny.batches import Batches, Tokens
from examples.train_tiny.continuations import continue_prompts, draw_prompts, is_loop

OWN_TEXT_FILE = "own_text.npy"
CONTEXT = 128  # tokens of a prompt
NEW_TOKENS = 64  # tokens of a continuation
NOTHING = np.zeros((0, CONTEXT + NEW_TOKENS + 1), np.int32)
GROUP = 128  # prompts that are continued together


def own_text(
    backbone: Model,
    config: ModelConfig,
    documents: Sequence[Tokens],
    prompts: int,
    directory: Path,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Int32[np.ndarray, "continuations window"]:
    """Greedy continuations, each with its prompt and one token more than the continuation; loops are left out.

    They are kept in the directory, so that a run that goes on does not write them again. ``progress`` is told how many
    prompts are done.
    """
    path = directory / OWN_TEXT_FILE
    if path.exists():
        return np.load(path)
    drawn = draw_prompts(documents, prompts, CONTEXT, 0, seed)
    kept: list[Tokens] = []
    for start in range(0, prompts, GROUP):
        group = drawn[start : start + GROUP]
        written = continue_prompts(backbone, config, F32, group, NEW_TOKENS + 1, 0.0)
        kept += [tokens for tokens in written if not is_loop(tokens[CONTEXT:].tolist())]
        progress(min(prompts, start + GROUP))
    windows = np.asarray(kept, np.int32).reshape(-1, CONTEXT + NEW_TOKENS + 1)
    unfinished = path.with_suffix(".part.npy")
    np.save(unfinished, windows)
    unfinished.replace(path)
    return windows


@dataclasses.dataclass(frozen=True)
class DraftWindows:
    """Windows of text, and every second step of own text where there is any: all of it before any comes again."""

    text: Batches
    own: Int32[np.ndarray, "continuations window"]
    seed: int = 0

    def batch(self, step: int, size: int) -> tuple[Int32[np.ndarray, "windows window"], int]:
        """The windows of one step, a function of the step, and the first place behind which drafts are trained.

        ``size`` windows of text, or as many tokens of own text, where the prompt's last token is the first anchor.
        """
        text = self.text.batch(step, size)
        if step % 2 or not len(self.own):
            return text, 0
        count = max(1, size * text.shape[1] // self.own.shape[1])
        places = [divmod(step // 2 * count + place, len(self.own)) for place in range(count)]
        orders = {epoch: np.random.default_rng((self.seed, epoch)).permutation(len(self.own)) for epoch, _ in places}
        return self.own[[orders[epoch][place] for epoch, place in places]], CONTEXT - 2
