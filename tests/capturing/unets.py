"""`UNet2DConditionModel` of `diffusers` as it comes: tiny ones to compute with.

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
