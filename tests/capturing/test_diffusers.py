"""The U-Net of `diffusers` as it comes, over stages that its skips cross: loss and all gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing.graph import Traced
from stretto.capturing.trace import trace
from tests.capturing.test_huggingface import without_noise
from tests.families import ONE_STAGE
from tests.runtime.equality import (
    Result,
    assert_equal,
    assert_same_bits,
    job_of,
    lowered,
    plain,
    plan_of,
    run,
)

diffusers: Any = pytest.importorskip("diffusers", reason="needs diffusers: pip install 'stretto[diffusion]'")

Batch = dict[str, Tensor]


def tiny(dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """Four levels with one layer each, attention to given states on three of them, as the large ones. The
    image must be 16 or more: at the lowest level of 8 there is one place, whose attention has no gradient."""
    config: dict[str, Any] = {
        "sample_size": 16,
        "in_channels": 3,
        "out_channels": 3,
        "layers_per_block": 1,
        "block_out_channels": (8, 16, 32, 32),
        "cross_attention_dim": 12,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
        **changes,
    }
    torch.manual_seed(7)
    model = diffusers.UNet2DConditionModel(**config).to(dtype)
    assert isinstance(model, nn.Module)
    return model


LEVELS = {
    "block_out_channels": (8, 16),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
"""Of the smallest such model: two instead of four, attention on the first."""


def batch_of(rows: int, dtype: torch.dtype = torch.float64) -> Batch:
    """Noisy images with their time steps (integers), what was added to them, and states to attend to."""
    draw = torch.Generator().manual_seed(5)
    return {
        "image": torch.randn(rows, 3, 16, 16, dtype=dtype, generator=draw),
        "noise": torch.randn(rows, 3, 16, 16, dtype=dtype, generator=draw),
        "time": torch.randint(0, 1000, (rows,), generator=draw),
        "states": torch.randn(rows, 5, 12, dtype=dtype, generator=draw),
    }


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean square of what the model says was added, as diffusion models are trained (Ho et al. 2020)."""
    states = batch["states"].expand(len(batch["image"]), -1, -1)
    said = model(batch["image"], batch["time"], encoder_hidden_states=states).sample
    return nn.functional.mse_loss(said, batch["noise"])


IN_THE_DECODER = ["up_blocks.1.resnets.1"]
"""Where two stages are cut: three of the eight skips are used up before it, and five cross."""


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(tiny(), batch_of(1), loss, microbatches=1)


@pytest.fixture(scope="module")
def expected() -> Result:
    return plain(tiny(), batch_of(4), loss)


def test_a_small_one_equals_the_plain_model() -> None:
    """Of two levels, cut in the decoder, where three of four skips cross."""
    model = tiny(**LEVELS)
    expected = plain(model, batch_of(2), loss)
    job = job_of(trace(model, batch_of(1), loss, microbatches=1), 2, 2, ["up_blocks.0.resnets.1"])
    found = {family: run(lowered(job, family), model, batch_of(2)) for family in ("gpipe", "zb-h2")}
    assert_equal(found["gpipe"], expected, 1e-10)
    assert_same_bits(found["zb-h2"], found["gpipe"])


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_every_family_equals_the_plain_model(traced: Traced, expected: Result, stages: int) -> None:
    job = job_of(traced, stages, 4, IN_THE_DECODER if stages == 2 else "auto")
    found = {family: run(lowered(job, family), tiny(), batch_of(4)) for family in ONE_STAGE}
    for result in found.values():
        assert_equal(result, expected, 1e-10)
        assert_same_bits(result, found["gpipe"])


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_captured_planned_and_proved_as_users_do(expected: Result, recompute: Any) -> None:
    parallel = stretto.Parallel(
        pp=2, microbatches=4, schedule="eager-1f1b", recompute=recompute, split=IN_THE_DECODER
    )
    job = stretto.capture(tiny(), batch_of(4), loss, parallel)
    skips = [edge.spec.shape[1:] for edge in job.edges if edge.source == 0 and len(edge.spec.shape) == 4]
    # The fifth skip is joined to the hidden state by the module that the cut is in front of.
    assert sorted(skips) == sorted([(8, 16, 16), (8, 16, 16), (8, 8, 8), (16, 8, 8), (32 + 16, 4, 4)])
    plan = plan_of(job, "eager-1f1b")
    stretto.verify(plan)
    assert_equal(run(plan, tiny(), batch_of(4)), expected, 1e-10)


@pytest.mark.slow
def test_states_that_all_images_share() -> None:
    """What is attended to may be one constant: every microbatch is given it in full."""
    batch = {**batch_of(4), "states": batch_of(1)["states"]}
    marked = {**batch, "states": stretto.replicated(batch["states"])}
    job = job_of(trace(tiny(), marked, loss, microbatches=2), 2, 2)
    assert_equal(run(plan_of(job, "zb-h2"), tiny(), marked), plain(tiny(), batch, loss), 1e-10)


OTHER_KINDS: dict[str, dict[str, Any]] = {
    "attention to itself": {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    },
    "time as a scale": {"resnet_time_scale_shift": "scale_shift", "use_linear_projection": True},
    "uneven levels": {"layers_per_block": (1, 2, 1, 1), "transformer_layers_per_block": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_of_blocks(kind: str) -> None:
    model = tiny(**OTHER_KINDS[kind])
    job = job_of(trace(model, batch_of(4), loss, microbatches=2), 2, 2)
    expected = plain(model, batch_of(4), loss)
    found = without_noise(run(plan_of(job, "zb-h1"), model, batch_of(4)), expected)
    expected = without_noise(expected, expected)
    assert_equal(found, expected, 1e-10)
    assert len(expected.grads) >= len(list(model.parameters())) - 6, "biases of keys, which a softmax drops"
