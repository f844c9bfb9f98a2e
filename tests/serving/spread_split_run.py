"""A program: random requests through workers whose engines have other numbers of shards, each on devices of its own.

``python -m tests.serving.spread_split_run COUNT DECODER among|between``: also among engines of several shards, or only
between those and engines of one. A process of its own, because the number of devices is fixed when JAX starts. It fails
where an answer is not what it should be, and prints what was seen, as JSON.
"""

# ruff: noqa: E402  # what is imported after the settings must see them

import dataclasses
import functools
import json
import sys
from collections import Counter
from collections.abc import Iterator

import jax
from jaxtyping import install_import_hook

DEVICES = 8
SHARDS = 2

if __name__ == "__main__":
    # Importing it sets strict dtypes and ranks and the compilation cache.
    import tests.conftest  # noqa: F401

    # More than are used: collectives of several programs wait in threads, of which there are as many as devices.
    jax.config.update("jax_num_cpu_devices", DEVICES)
    install_import_hook(["deepinfer_jax", "pallas_kernels", "serving"], "beartype.beartype")

import numpy as np

from deepinfer_jax.engine import Engine
from deepinfer_jax.engine_build import build_engine
from deepinfer_jax.model.params import initialise
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.replay import Replay
from tests.deepinfer_jax.test_engine_bounded import TOLERANCE
from tests.deepinfer_jax.test_engine_machine import Build, alone
from tests.running_engines import KEEP, SEED, SETTINGS, built, encoder, receiver, tiny_model
from tests.serving.cells import Asked, Cell, check_alone, check_hand_over, check_replayed, tally, through
from tests.serving.random_requests import tokenizer


def spread(first: int, numerics: str, decoder: str) -> Engine:
    """An engine over some devices from the one numbered ``first`` on, each a shard."""
    config, chosen, _ = tiny_model(numerics)
    params = initialise(Model.describe(config), jax.random.key(SEED), chosen)
    settings = dataclasses.replace(
        SETTINGS, replay=Replay("exact", decoder, KEEP), n_shards=SHARDS, slots=2, decode_rows=(2,), max_drafts=5
    )
    return build_engine(params, config, chosen, settings, devices=jax.devices()[first : first + SHARDS])


@functools.cache
def shards(numerics: str, decoder: str) -> Engine:
    return spread(SHARDS, numerics, decoder)


@functools.cache
def others(numerics: str, decoder: str) -> Engine:
    """The same on other devices: two engines at a time must not meet on one."""
    return spread(2 * SHARDS, numerics, decoder)


def check_close(cell: Cell, one: Asked) -> Counter[str]:
    """Sums over devices round otherwise: tokens where their choice is clear, and log-probabilities nearly."""
    if one.params.prompt_logprobs is not None:
        (wanted,) = alone("f32", cell.decoder, one.request(), tokenizer())
        got, expected = (
            [item.logprob for item in items or ()] for items in (one.answer.prompt_logprobs, wanted.prompt_logprobs)
        )
        np.testing.assert_allclose(got, expected, atol=TOLERANCE)
    return check_replayed(cell, one)


def ways(decoder: str, among: bool) -> Iterator[tuple[str, Build, Build]]:
    """Mode, and what builds the engines of both sides; ``among``: between engines of several shards too."""
    yield "full", built, shards
    yield "full", shards, receiver
    if decoder == "compact":
        yield "encoder_only", encoder, shards
        yield "encoder_only", shards, receiver
    if among:
        yield "full", shards, others


def main(count: int, decoder: str, among: bool) -> None:
    found = {}
    for mode, one_side, other_side in ways(decoder, among):
        cell = Cell(1, 1, mode, decoder, "exact")
        asked = through(cell, count, senders=(one_side,), receivers=(other_side,))
        seen = tally(asked)
        for one in asked:
            check_hand_over(cell, one)
            if other_side is others:
                check_alone(cell, one, others)
            else:
                seen += check_close(cell, one)
        found[f"{mode} {one_side.__name__} {other_side.__name__}"] = seen
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "among")
