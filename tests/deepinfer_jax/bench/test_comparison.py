"""Rates of turns, which rows a ratio compares, and the part of the machine that rows reach."""

import dataclasses

import pytest

from deepinfer_jax.bench.comparison import OWN_NAME, QUESTIONS, Row, fractions, ratios, row_of
from deepinfer_jax.bench.cost import decode_bytes_per_step, prefill_flops_per_token
from deepinfer_jax.bench.machine import MachineRates, measure_machine
from deepinfer_jax.bench.process import Turn
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.numerics import Numerics


def row(engine: str, numerics: str, batch: int, prefill: float, decode: float) -> Row:
    """A row whose medians are half of its best figures."""
    return Row(engine, numerics, batch, prefill, prefill / 2, decode, decode / 2, cpu_ms_per_token=1.0, turns=5)


def test_a_row_holds_best_and_median_of_its_turns():
    turns = [
        Turn(prefill_seconds=4.0, decode_seconds=2.0, decode_tokens=512.0, cpu_seconds=9.216),
        Turn(prefill_seconds=2.0, decode_seconds=8.0, decode_tokens=512.0, cpu_seconds=4.608),
        Turn(prefill_seconds=8.0, decode_seconds=4.0, decode_tokens=512.0, cpu_seconds=0.1),
    ]
    assert row_of("torch", "f32", 8, 512, 64, turns) == Row(
        engine="torch",
        numerics="f32",
        batch=8,
        prefill_best=2048.0,
        prefill_median=1024.0,
        decode_best=256.0,
        decode_median=128.0,
        cpu_ms_per_token=1.0,
        turns=3,
    )


def test_ratios_compare_the_best_of_both_sides():
    rows = [
        row(OWN_NAME, "f32", 8, 2000.0, 500.0),
        row(OWN_NAME, "bf16", 8, 3300.0, 600.0),
        row(OWN_NAME, "released", 8, 9000.0, 300.0),
        row("torch", "f32", 8, 1000.0, 200.0),
        row("torch", "bf16", 8, 3000.0, 100.0),
        row("mlx", "f32", 8, 1600.0, 40.0),
        row("fastllm", "fp8+fp4", 8, 400.0, 250.0),
        row(OWN_NAME, "f32", 1, 1.0, 200.0),
        row(OWN_NAME, "bf16", 1, 1.0, 100.0),
        row("torch", "f32", 1, 1.0, 50.0),
        row("torch", "bf16", 1, 1.0, 40.0),
        row("fastllm", "fp8+fp4", 1, 1.0, 250.0),
    ]
    found = {one.what: (one.ours, one.peer, one.best, one.aim) for one in ratios(rows)}
    assert found == {
        "prefill, batch 8, f32": ("f32", "mlx f32", 1.25, 1.5),
        "prefill, batch 8, bf16": ("bf16", "torch bf16", 1.1, 1.3),
        "decode, batch 8": ("bf16", "fastllm fp8+fp4", 2.4, 2.0),
        "decode, batch 1, beside fastllm": ("f32", "fastllm fp8+fp4", 0.8, 1.0),
        "decode, batch 1, beside torch": ("f32", "torch f32", 4.0, 4.0),
    }


def test_the_median_of_a_ratio_is_of_the_rows_that_were_best():
    ours = row(OWN_NAME, "f32", 8, 4000.0, 1.0)
    other = dataclasses.replace(row(OWN_NAME, "bf16", 8, 3000.0, 1.0), prefill_median=2900.0)
    theirs = dataclasses.replace(row("torch", "f32", 8, 1000.0, 1.0), prefill_median=800.0)
    (ratio, _) = ratios([ours, other, theirs])
    assert (ratio.what, ratio.best, ratio.median) == ("prefill, batch 8, f32", 4.0, 2.5)


def test_a_ratio_that_lacks_a_side_is_left_out():
    ours, theirs = row(OWN_NAME, "f32", 8, 1.0, 1.0), row("torch", "bf16", 8, 1.0, 1.0)
    assert ratios([ours]) == ratios([theirs]) == ()
    assert [one.what for one in ratios([ours, theirs])] == ["decode, batch 8"]
    assert {question.batch for question in QUESTIONS} == {1, 8}


@pytest.mark.parametrize(("numerics", "rate"), [("f32", 100e9), ("bf16", 200e9), ("released", 200e9)])
def test_fractions_are_of_the_rate_of_the_compute_dtype(numerics, rate):
    config = ModelConfig.preset("peer-50m")
    rows = [row(OWN_NAME, numerics, 8, 2000.0, 400.0), row("torch", "f32", 8, 2000.0, 400.0)]
    rates = MachineRates(gemm_float32=100e9, gemm_bfloat16=200e9, read=16e9)
    (found,) = fractions(rows, config, rates, prompt=512, steps=64)
    assert (found.numerics, found.batch) == (numerics, 8)
    assert found.gemm == pytest.approx(2000 * prefill_flops_per_token(config, 512) / rate)
    step_bytes = decode_bytes_per_step(config, Numerics.preset(numerics), 8, 544)
    assert found.read == pytest.approx(400 / 8 * step_bytes / 16e9)


def test_the_rates_of_this_machine_are_those_of_a_computer():
    rates = measure_machine(rows=64, width=512, read_bytes=1 << 22)
    assert 1e8 < rates.gemm_float32 < 1e15
    assert 1e8 < rates.gemm_bfloat16 < 1e15
    assert 1e8 < rates.read < 1e14
