"""Capture for evaluation: the forward of a model in `eval()` mode, cut where its training is cut.

    1. Trace the model with dropout and the like switched off, and experts' rows without room dropped
       (`RankLayout.evaluating`).
    2. Find the cuts of the training job again. Their places are known by what reads parameters: both
       forwards read the same parameters in the same order, and the first such op of a stage begins it.
    3. Cut there, and leave the backward out (`stretto.ir.forms`).

So every rank evaluates with the parameters that it trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stretto.batch.loss import Loss
from stretto.capturing.graph import Traced
from stretto.capturing.laid_out import laid_out
from stretto.capturing.split import place
from stretto.capturing.stages import cut
from stretto.capturing.trace import PLAIN, trace
from stretto.errors import CaptureError
from stretto.ir.action import Phase
from stretto.ir.forms import forward_only
from stretto.ir.program import Job, Op
from stretto.parallelize.layout import RankLayout
from stretto.passes.rows import read_of

Reading = tuple[str, str]
"""(module, parameter) of an op that reads a parameter."""


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
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        traced = trace(
            model,
            batch,
            loss,
            microbatches=training.pieces,
            param_dtype=None if training.param_dtype is None else getattr(torch, training.param_dtype),
            device=device,
            layout=layout.traced,
        )
        traced = laid_out(traced, layout, model) if layout.by_passes else traced
    finally:
        for module, mode in modes:
            module.training = mode
    stages = len(training.stages)
    job = cut(traced, place(traced, stages, _cuts(traced, training)), stages, training.microbatches)
    kept = {p.name: (p.kept, p.slot) for p in training.parameters}
    own = ((p, *kept[p.name]) for p in job.parameters)
    parameters = tuple(replace(p, kept=axes, slot=slot) for p, axes, slot in own)
    job = replace(job, axes=training.axes, zero=training.zero, parameters=parameters, mean_over=None)
    return forward_only(job)


def _cuts(traced: Traced, training: Job) -> list[int]:
    """Step 2: the segments that begin stages 1, 2, ..."""
    begun: list[tuple[int, Reading]] = [
        (stage.index, reading)
        for stage in training.stages
        for op in stage.ops[Phase.F]
        for reading in _readings(op)
    ]
    result: list[tuple[int, Reading]] = [
        (origin.segment, reading)
        for op, origin in traced.program.ops
        if not origin.backward and origin.segment is not None
        for reading in _readings(op)
    ]
    if [reading for _, reading in begun] != [reading for _, reading in result]:
        raise CaptureError(
            f"cannot evaluate {traced.job.name} with the stages that train it: in eval() mode it reads its "
            "parameters in another order than in train() mode; make both modes call the same modules"
        )
    # A stage that reads no parameter begins where the next one does, and has nothing to evaluate.
    return [
        min(
            (segment for (stage, _), (segment, _) in zip(begun, result, strict=True) if stage >= begins),
            default=len(traced.segments),
        )
        for begins in range(1, len(training.stages))
    ]


def _readings(op: Op) -> Sequence[Reading]:
    return [(op.module, name) for name in map(read_of, op.uses) if name is not None]
