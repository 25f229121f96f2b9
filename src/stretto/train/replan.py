"""Plans for further shapes of a run's batches, each at the first step that needs it.

The model is built again without values for it, since a run's own is dropped once its Runner has what it
trains. Costs and plans are kept on disk with those of the first shape.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from stretto.capturing import DTYPES
from stretto.capturing.again import captured_again
from stretto.capturing.captures import Captures
from stretto.config import TrainSettings
from stretto.files.kept import Kept
from stretto.files.say import Say, silent
from stretto.ir.plan import Plan
from stretto.planning.make_plan import plan as make_plan
from stretto.runtime.shapes import PlanFor, Shape
from stretto.train.optimizer import state_of
from stretto.train.task import Task


def plans_of(
    settings: TrainSettings, task: Task, first: Plan, kept: Kept | None, device: str, say: Say
) -> PlanFor:
    """Makes a plan for a batch, like `first`; every rank must call it. say: takes a line for each."""
    captures: list[Captures] = []

    def recipe(batch: Any) -> Captures:
        if not captures:
            with torch.device("meta"):
                model = task.model()
            captures.append(Captures(model, batch, task.loss, DTYPES[settings.precision], device))
        return captures[0]

    def plan_for(batch: Any) -> Plan:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* is not sharded over ", UserWarning)  # said of the first
            job = captured_again(recipe(batch), settings.layout, first.job, batch, None, first)
        plan = make_plan(
            job,
            cluster="local",
            order=settings.planning.order,
            steps=settings.training.steps,
            search_s=settings.planning.search_s,
            optimizer=state_of(settings.optimizer),
            kept=None if kept is None else replace(kept, say=silent),
        )
        assert plan.prediction is not None
        step_ms = plan.prediction.step_us / 1000.0
        shape = f"{Shape.of_job(job)} in {job.microbatches} microbatches"
        say(f"planned batches of {shape}: {step_ms:.1f} ms a step")
        return plan

    return plan_for
