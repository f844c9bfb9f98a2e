"""Arithmetic and traffic of a configuration, beside published counts and sums written out by hand."""

import math

import pytest

from deepinfer_jax.bench.cost import decode_bytes_per_step, prefill_flops_per_token
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.params import Stored, count, parameters
from deepinfer_jax.model.transformer import Model
from deepinfer_jax.numerics import BF16, F32, RELEASED
from tests.configurations import raw_preset
from tests.engines import tiny_configuration

# Active parameters of a decode token of the release: layers, Engram projections, head (model specification, 19).
RELEASED_ACTIVE = 15_153_984_624 + 314_654_720 + 661_913_600


def configured(**changes: object) -> ModelConfig:
    raw = tiny_configuration()
    raw["text_config"] |= changes
    return ModelConfig.from_dict(raw)


def test_one_token_of_the_release_costs_two_operations_per_active_parameter():
    flops = prefill_flops_per_token(ModelConfig.preset("v4.1-flash"), prompt=1)
    assert flops / 2 == pytest.approx(RELEASED_ACTIVE, rel=1e-3)


def test_arithmetic_of_a_prompt_grows_with_what_its_tokens_see():
    config = configured()
    hidden, streams, rank, heads, head_dim, index_heads, index_dim, width = 32, 4, 32, 2, 32, 2, 32, 32
    mixes = (2 + streams) * streams
    layer = 2 * mixes * streams * hidden  # the mixes of both sub-layers
    layer += rank * hidden + heads * head_dim * rank + head_dim * hidden  # queries and window key
    layer += 32 * heads * head_dim + hidden * 32  # output, down and up
    layer += 4 * hidden  # router
    layer += (2 + 1) * 3 * width * hidden  # two routed experts and the shared one
    source = head_dim * hidden + index_dim * head_dim + index_heads * index_dim * rank + index_heads * hidden
    matrices = 3 * layer + 2 * source + head_dim * hidden  # the gate of ratio 2
    for prompt in (1, 5, 40):
        positions = range(prompt)
        window = sum(min(position + 1, 16) for position in positions)
        visible = {ratio: [(position + 1) // ratio for position in positions] for ratio in (1, 2)}
        attended = 3 * window + sum(min(entries, 8) for ratio in (1, 2) for entries in visible[ratio])
        scored = sum(visible[1]) + sum(visible[2])
        products = matrices + 96 * hidden / prompt
        products += (2 * heads * head_dim * attended + index_heads * index_dim * scored) / prompt
        assert prefill_flops_per_token(config, prompt) == pytest.approx(2 * products, rel=1e-12)


def test_candidate_blocks_bound_what_later_layers_score():
    raw = raw_preset("v4.1-flash")
    bounded = ModelConfig.from_dict(raw)
    raw["text_config"]["candidate_topk_blocks"] *= 2
    wider = ModelConfig.from_dict(raw)
    prompt = 65536
    limit = raw["text_config"]["candidate_topk_blocks"] // 2 * raw["text_config"]["candidate_block_size"]
    # Four layers select inside the candidates; positions behind the limit score up to twice as many.
    more = sum(min(position + 1, 2 * limit) - min(position + 1, limit) for position in range(prompt))
    heads, index_dim = raw["text_config"]["index_n_heads"], raw["text_config"]["index_head_dim"]
    difference = prefill_flops_per_token(wider, prompt) - prefill_flops_per_token(bounded, prompt)
    assert difference == pytest.approx(2 * heads * index_dim * 4 * more / prompt, rel=1e-6)


@pytest.mark.parametrize(("numerics", "size"), [(F32, 4), (BF16, 2)])
def test_a_step_reads_every_weight_once_and_each_row_its_keys(numerics, size):
    config = configured(num_experts_per_tok=4)
    described = parameters(Model.describe(config))
    exact = sum(item.size for item in described if item.stored is Stored.F32)
    weights = 4 * exact + size * (count(Model.describe(config)) - exact - config.vocab_size * config.hidden_size)
    keys = 3 * 16 * 32 + 2 * 8 * 32 + (51 + 25) * 32  # windows, selected entries, index keys
    assert decode_bytes_per_step(config, numerics, batch=3, position=50) == weights + 3 * size * keys


def test_packed_weights_are_read_packed():
    config = configured(num_experts_per_tok=4)
    read = 0
    for item in parameters(Model.describe(config)):
        if item.released != (("embed.weight",),):
            scales = math.prod(item.shape) / {Stored.FP8_BLOCKS: 32 * 32, Stored.FP4_ROWS: 32}.get(
                item.stored, math.inf
            )
            width = {Stored.F32: 4, Stored.BF16: 2, Stored.FP8_BLOCKS: 1, Stored.FP4_ROWS: 0.5}[item.stored]
            read += item.size * width + scales
    keys = 3 * 32 + 32 + 32  # at the first position there is one entry, of the layer of ratio 1
    assert decode_bytes_per_step(config, RELEASED, batch=1, position=0) == read + 2 * keys


def test_few_rows_leave_experts_unread():
    one, two, many = (decode_bytes_per_step(configured(), F32, batch, 0) for batch in (1, 2, 1000))
    experts = 3 * 4 * 3 * 32 * 32 * 4
    keys = (3 * 32 + 32 + 32) * 4
    assert two - one == pytest.approx(experts * (0.75 - 0.5) + keys)
    assert many - two == pytest.approx(experts * 0.25 + 998 * keys)
