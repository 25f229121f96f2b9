"""The held-out loss, measured by the ranks that train: a plan of forwards walked with the same parameters.

1. Capture the model in eval() mode, cut where the training is cut, without its backward.
2. Measure its ops, each rank those of its own stage; links cost what they cost the training.
3. Plan, prove, and give each rank a Runner on the training's lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stretto.capture.evaluation import capture_evaluation
from stretto.cost.profile import profile
from stretto.planning import make_plan
from stretto.runtime import Runner
from stretto.train.dataset import TokenDataset


class HeldOut:
    """Measures the held-out loss with a Runner's parameters. All ranks make and use it together."""

    def __init__(
        self,
        runner: Runner,
        model: nn.Module,
        batch: Any,
        loss: Callable[[nn.Module, Any], torch.Tensor],
        tokens: TokenDataset,
        batches: int,
    ) -> None:
        """model: the one whose parameters `runner` holds. batches: global batches in a measurement."""
        job = capture_evaluation(model, batch, loss, runner.plan.job, device=runner.device)
        mine = profile(job, runner.device, runner.plan.schedule.stages_of(runner.rank))
        op_us: dict[tuple[int, str], float] = {}
        for found in runner.transport.all_gather(dict(mine.op_us)):
            op_us |= found
        plan = make_plan(job, replace(runner.plan.costs, op_us=op_us), schedule=runner.plan.schedule)
        self._runner = Runner(plan, model, transport=runner.transport)
        self._tokens = tokens
        self._batches = batches
        self._global_batch = int(batch.shape[0])

    def loss(self) -> float:
        """The mean loss in nats a token, the same on every rank; no parameter or buffer changes.

        Raises LostRankError when a rank does not take part.
        """
        total = 0.0
        for number in range(self._batches):
            total += float(self._runner.step(self._tokens.batch(number, self._global_batch)))
        return total / self._batches
