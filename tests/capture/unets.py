"""`UNet2DConditionModel` of `diffusers` as it comes: tiny ones to compute with, and a large one to plan.

Tests that use them are skipped where `diffusers` is not installed (`pip install 'stretto[diffusion]'`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


LARGE_IMAGE, LARGE_MICROBATCH, STATES = 32, 64, 16


def large(channels: int) -> nn.Module:
    """With the sizes of Alpa's benchmark, without values. Alpa's own model in JAX (alpa/model/unet_2d.py) has
    one layer in a block of the decoder with attention; `diffusers` has one more than the encoder, two."""
    with torch.device("meta"):
        model = diffusers.UNet2DConditionModel(
            sample_size=LARGE_IMAGE,
            layers_per_block=1,
            block_out_channels=(channels, 2 * channels, 4 * channels, 4 * channels),
            cross_attention_dim=4 * channels,
            attention_head_dim=8,
        )
    assert isinstance(model, nn.Module)
    return model


def large_batch(microbatches: int, channels: int) -> Batch:
    rows, image = microbatches * LARGE_MICROBATCH, (4, LARGE_IMAGE, LARGE_IMAGE)
    return {
        "image": torch.empty(rows, *image, device="meta"),
        "noise": torch.empty(rows, *image, device="meta"),
        "time": torch.empty(rows, dtype=torch.int64, device="meta"),
        "states": torch.empty(rows, STATES, 4 * channels, device="meta"),
    }
