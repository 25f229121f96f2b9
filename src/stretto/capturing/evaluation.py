"""Capture for evaluation: the forward of a model in `eval()` mode, cut where its training is cut.

    1. Trace the model with dropout and the like switched off, and experts' rows without room dropped
       (`RankLayout.evaluating`).
    2. Find the cuts of the training job again (`stretto.capturing.cuts`).
    3. Cut there, and leave the backward out (`stretto.ir.forms`).

So every rank evaluates with the parameters that it trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stretto.batch.dims import marked
from stretto.batch.loss import Loss
from stretto.capturing.cuts import cuts_of
from stretto.capturing.laid_out import laid_out
from stretto.capturing.split import place
from stretto.capturing.stages import cut
from stretto.capturing.torch_state_adapter import ONE_TRACE
from stretto.capturing.trace import PLAIN, trace
from stretto.ir.forms import forward_only
from stretto.ir.program import Job
from stretto.parallelize.layout import RankLayout


def capture_evaluation(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    training: Job,
    *,
    device: torch.device | str | None = None,
    layout: RankLayout = PLAIN,
) -> Job:
    """The forward of `model.eval()` with the stages, microbatches and precision of the job `training`.

    model, batch, loss: as `stretto.capture` takes them; layout: of the training
    (`stretto.parallelize.layout.layout_of`). The mode of each module is left as it was.

    Raises CaptureError when the model reads its parameters in another order than while training.
    """
    layout = layout.evaluating
    with ONE_TRACE, _evaluating(model):  # which ranks that are threads may share
        traced = trace(
            model,
            marked(batch, dict(training.batch_dims)),
            loss,
            microbatches=training.pieces,
            param_dtype=None if training.param_dtype is None else getattr(torch, training.param_dtype),
            device=device,
            layout=layout.traced,
        )
        traced = laid_out(traced, layout, model) if layout.by_passes else traced
    stages = len(training.stages)
    cuts = cuts_of(
        traced,
        training,
        f"cannot evaluate {traced.job.name} with the stages that train it: in eval() mode it reads its "
        "parameters in another order than in train() mode; make both modes call the same modules",
    )
    job = cut(traced, place(traced, stages, cuts), stages, training.microbatches)
    kept = {p.name: (p.kept, p.slot) for p in training.parameters}
    own = ((p, *kept[p.name]) for p in job.parameters)
    parameters = tuple(replace(p, kept=axes, slot=slot) for p, axes, slot in own)
    job = replace(job, axes=training.axes, zero=training.zero, parameters=parameters, mean_over=None)
    return forward_only(job)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in eval() mode; behind it, each module in its own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
