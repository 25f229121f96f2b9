"""The U-Nets of Alpa's benchmark as a task: to be planned, and timed on devices that can keep them.

`examples/unet_large.toml` names this file. The model is `UNet2DConditionModel` of `diffusers` with the sizes
of that benchmark. Alpa's own in JAX (alpa/model/unet_2d.py) has one layer in each block of the decoder;
`diffusers` has one more than in the encoder, so two, and is larger. Batches are drawn at random: speed and
memory do not depend on what images show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stretto.train.task import Task

try:
    from diffusers import UNet2DConditionModel
except ImportError as error:
    raise ImportError(f"{error} (pip install 'stretto[diffusion]')") from error

IMAGE, HEADS, STATES = 32, 8, 16


def task(config: Mapping[str, Any], seed: int) -> Task:
    """config: what `large` takes; a name that it does not know is refused."""
    return large(seed, **config)


def large(seed: int, *, channels: int) -> Task:
    """channels: of the first of four levels."""
    c = channels

    def model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return UNet2DConditionModel(
                sample_size=IMAGE,
                layers_per_block=1,
                block_out_channels=(c, 2 * c, 4 * c, 4 * c),
                cross_attention_dim=4 * c,
                attention_head_dim=HEADS,  # how many heads: diffusers calls it so
            )

    def batch(step: int, rows: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed((seed << 32) + step)
        return {
            "image": torch.randn(rows, 4, IMAGE, IMAGE, generator=draw),
            "noise": torch.randn(rows, 4, IMAGE, IMAGE, generator=draw),
            "time": torch.randint(0, 1000, (rows,), generator=draw),
            "states": torch.randn(rows, STATES, 4 * c, generator=draw),
        }

    return Task(
        model=model,
        loss=loss,
        train=batch,
        held_out=lambda step, rows: batch(1_000_000 + step, rows),
        digest="drawn at random",
        unit="images",
    )


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """(sum, count) of the squared error, over pixels."""
    said = model(batch["image"], batch["time"], encoder_hidden_states=batch["states"]).sample
    return nn.functional.mse_loss(said, batch["noise"], reduction="sum"), batch["noise"].numel()
