"""A task of your own for tests: a model with a skip over the border of its stages, on made-up vectors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stretto.files.say import Say
from stretto.train.task import Task


class Skipping(nn.Module):
    """The input's own features are joined again to what the middle makes of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(4, width), nn.Linear(width, width)
        self.last = nn.Linear(2 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.first(x)
        found: Tensor = self.last(torch.cat([self.middle(features.tanh()), features], 1))
        return found


def task(config: Mapping[str, Any], seed: int) -> Task:
    def model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Skipping(config["width"])

    def batch(step: int, rows: int) -> dict[str, Tensor]:
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(step))
        return {"x": x, "y": x.sum(1, keepdim=True)}

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])

    def report(model: nn.Module, folder: Path, say: Say) -> Mapping[str, Any]:
        one = float(model(torch.ones(1, 4)))
        say(f"four ones make {one:.2f}")
        return {"four_ones": one}

    return Task(
        model=model,
        loss=loss,
        train=batch,
        held_out=lambda step, rows: batch(1_000_000 + step, rows),
        digest=f"width {config['width']}",
        report=report,
        unit="vectors",
    )
