"""Steps by formula: Megatron's count, and how a step's time follows from its layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.analytic import (
    StepTime,
    TrainLayout,
    Transformer,
    backward_of,
    layer_forward,
    megatron_flops,
    step_time,
)

from stretto.errors import UsageError
from stretto.price.devices import device

MODEL = Transformer(24, 2048, 16, 1024, 50304)
LAYOUT = TrainLayout(tp=2, pp=2, dp=2, micro_batch=2, global_batch=32, recompute=True)


def predict(model: Transformer = MODEL, layout: TrainLayout = LAYOUT) -> StepTime:
    a100 = device("a100-80gb")
    return step_time(model, layout, a100.roof(), a100.fabric())


def test_a_layer_does_the_arithmetic_that_megatron_counts() -> None:
    forward = layer_forward(MODEL, 1, 4)
    flops = sum(work.dims.flops for work in forward if work.dims)
    t, h = 4 * MODEL.seq, MODEL.hidden
    assert flops == 24 * t * h * h * (1 + MODEL.seq / (6 * h))
    assert sum(work.dims.flops for work in backward_of(forward) if work.dims) == 2 * flops


def test_megatrons_count_is_the_formula_of_the_paper() -> None:
    s, n, h, v = MODEL.seq, MODEL.layers, MODEL.hidden, MODEL.vocab
    paper = 96 * 7 * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))
    assert megatron_flops(MODEL, 7) == pytest.approx(paper, rel=1e-12)
    without = 72 * 7 * s * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h))
    assert megatron_flops(MODEL, 7, recompute=False) == pytest.approx(without, rel=1e-12)


def test_the_bubble_shrinks_with_microbatches() -> None:
    few, many = (predict(layout=replace(LAYOUT, global_batch=batch)) for batch in (16, 256))
    assert few.bubble_us / few.pipeline_us > 0.1
    assert many.bubble_us / many.pipeline_us < 0.05
    one = predict(layout=replace(LAYOUT, pp=1, global_batch=64))
    assert one.bubble_us == pytest.approx(0.0, abs=1e-6 * one.pipeline_us)


def test_layouts_that_do_not_come_out_even_are_refused() -> None:
    with pytest.raises(UsageError, match="24 layers do not come out even on 5 stages"):
        predict(layout=replace(LAYOUT, pp=5))
    with pytest.raises(UsageError, match="a global batch of 33 is no multiple of 2 pipelines"):
        predict(layout=replace(LAYOUT, global_batch=33))
