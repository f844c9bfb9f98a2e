"""Bounded replay in a running engine against golden data: chains of turns, each behind a hit of the one before."""

import dataclasses
import functools

import pytest

from deepinfer_jax.engine import Engine
from deepinfer_jax.engine_build import build_engine
from deepinfer_jax.numerics import F32
from deepinfer_jax.replay import Replay
from deepinfer_jax.request import Request, SamplingParams
from deepinfer_jax.settings import EngineSettings
from tests.checkpoints import golden_model
from tests.deepinfer_jax.test_engine_bounded import TOLERANCE, log_softmax, worst_difference
from tests.golden import document, tensors
from tests.running_engines import run

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CASES = document("replay/replay_tiny_a.json")["cases"]
GOLDEN_BLOCK = 8
GOLDEN_SETTINGS = EngineSettings(
    slots=1,
    blocks=24,
    block_tokens=GOLDEN_BLOCK,
    max_context=168,
    decode_rows=(1,),
    prefill_tiles=(2,),
    tile_rows=16,
    window_checkpoints=0,
)
TOP = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=20)


@functools.cache
def golden_engine(decoder: str) -> Engine:
    config, params = golden_model("quant", "f32")
    settings = dataclasses.replace(GOLDEN_SETTINGS, replay=Replay("bounded", decoder, config.max_position_embeddings))
    return build_engine(params, config, F32, settings)


def fresh_golden_engine(keep: int | None) -> Engine:
    """Over an empty state; ``keep`` is no part of any shape."""
    first = golden_engine("off" if keep is None else "compact")
    first._device.reset()
    settings = first.settings
    if keep is not None:
        settings = dataclasses.replace(settings, replay=dataclasses.replace(settings.replay, keep=keep))
    return Engine(
        first._device, first.config, settings, blocks=settings.blocks, form=first.receiver.form, costs=first._costs
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_chains_of_turns_give_the_golden_log_probabilities(case):
    """Numerics f32, not deterministic, bounded replay; decoder replay compact where the case keeps rows, else off."""
    golden = tensors("replay/replay_tiny_a.npz")
    tokens = golden[f"{case['name']}.tokens"].tolist()
    engine, hits = fresh_golden_engine(case["keep"]), case["hits"]
    assert all(hit % GOLDEN_BLOCK == 0 for hit in hits)
    for hit in hits:
        run(engine, [Request(tuple(tokens[: hit + 1]), TOP)])
    (answer,) = run(engine, [Request(tuple(tokens[: case["prompt_len"]]), TOP)])
    receipt = answer.last.receipt
    assert receipt.hit_tokens == (hits or [0])[-1]
    assert receipt.replays == tuple(hit for hit in hits if hit > engine.config.sliding_window)
    wanted = log_softmax(golden[f"{case['name']}.last"])
    assert answer.tokens == [int(wanted.argmax())]
    assert worst_difference(answer, wanted[None]) <= TOLERANCE
