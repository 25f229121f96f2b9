"""What settings train, as a job to plan: model, batch and loss, captured without values.

Builds models on "meta", and touches no device and no text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from stretto.batch.loss import Loss
from stretto.capturing import DTYPES
from stretto.capturing.captures import Captures
from stretto.config import TrainSettings
from stretto.models.build import build_model, counted_loss_function
from stretto.price.calibration import Calibration
from stretto.price.cluster import Description
from stretto.price.cluster_file import Hardware
from stretto.train.layout import likely_vocab_size
from stretto.train.task import check_files, own_task


@dataclass(frozen=True, slots=True)
class Trained:
    """model: makes it; batch: of a step, of which shapes and dtypes count; unit, size: in what speed is
    counted, and how many of it a sample has."""

    model: Callable[[], nn.Module]
    batch: Any
    loss: Loss
    unit: str
    size: int


def trained(settings: TrainSettings) -> Trained:
    """What a run of these settings trains. Raises UsageError for a task that cannot be made."""
    check_files(settings)
    seed, rows = settings.training.seed, settings.training.global_batch
    if settings.task is not None:
        task = own_task(settings.task, seed)
        return Trained(task.model, task.train(0, rows), task.loss, task.unit, task.size)
    length = settings.data.sequence_length
    return Trained(
        partial(build_model, settings.model, likely_vocab_size(settings), seed),
        torch.empty(rows, length + 1, dtype=torch.int64, device="meta"),
        counted_loss_function(settings.model),
        "tokens",
        length,
    )


def device_of(description: Description | None) -> str | None:
    """The kind of device that a step is captured for; None for the model's own.

    The catalogue's devices are accelerators: their kernels are captured, with none of them at hand. So are
    those that a calibration was measured on.
    """
    if isinstance(description, Calibration):
        return description.machine.kind
    return "cuda" if isinstance(description, Hardware) else None


def captures_of(settings: TrainSettings, description: Description | None) -> Captures:
    """The captures of what settings train, for a cluster (None for this machine)."""
    of = trained(settings)
    with torch.device("meta"):
        model = of.model()
    return Captures(model, of.batch, of.loss, dtype=DTYPES[settings.precision], device=device_of(description))
