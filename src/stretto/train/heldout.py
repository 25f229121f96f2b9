"""The held-out loss, measured by the ranks that train: a plan of forwards walked with the same parameters.

1. Capture the model in eval() mode, cut where the training is cut, without its backward.
2. Measure its ops, each rank those of its own stage; links and collectives cost what they cost the training.
3. One rank plans and proves; each gets a Runner on the training's lanes, with the parts that the training
   changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from stretto.batch.loss import Loss, loss_alone
from stretto.capturing.evaluation import capture_evaluation
from stretto.config import ParallelSettings, TrainingSettings
from stretto.errors import UsageError
from stretto.files.kept import Kept
from stretto.files.say import Say, silent
from stretto.files.typed_file import to_line
from stretto.ir.costs import CollectiveCost, Costs
from stretto.ir.metrics import Observed
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.ir.serialize import CODEC, job_text
from stretto.measure.measured import merged
from stretto.measure.profile import profile
from stretto.measure.running import costs_again, running
from stretto.order.policies import BUILT_IN, DEFAULT
from stretto.parallelize.layout import layout_of
from stretto.planning.here import plan_on_first
from stretto.planning.make_plan import make_plan
from stretto.runtime import Runner
from stretto.runtime.full_state import take_first_copys_buffers


class Evaluation:
    """The loss of batches that are not trained on, with a Runner's parameters as they are when it is called.
    All ranks make and use it together."""

    def __init__(
        self,
        runner: Runner,
        model: nn.Module,
        batch: Any,
        loss: Loss,
        *,
        parallel: ParallelSettings,
        tp_plan: Mapping[str, Any] | None = None,
        order: str = DEFAULT,
        steps: int | None = None,
        search_s: float | None = None,
        kept: Kept | None = None,
        say: Say = silent,
    ) -> None:
        """model: the one that the runner was made with. batch, loss, parallel, tp_plan: as the training was
        captured with. order, steps, search_s, kept: as in `stretto.plan`, for its forwards. say: takes lines
        of what is being done.

        Raises CaptureError when the model reads its parameters in another order in eval() mode than while
        training, UsageError for a model that does not fit.
        """
        trained = runner.plan.job
        degree = trained.chunks if parallel.ampipe_degree == "auto" else None
        layout = layout_of(model, parallel, tp_plan, degree)
        say("capturing its forward")
        job = capture_evaluation(model, batch, loss, trained, device=runner.device, layout=layout)
        schedule = runner.plan.schedule
        ranks = running(runner.plan.world, runner.device)
        if ranks.size != runner.plan.world:
            kept = None  # ranks that are threads of one process each look for themselves, and one might find
        # Costs of the training's ops are none of these, which may lack some of them.
        rest = replace(runner.plan.costs, op_us={}, op_how={})
        rest = replace(rest, collectives=_collectives(job, rest))

        def measured() -> Costs:
            say("measuring its ops")
            mine = profile(job, runner.device, schedule.stages_of(runner.state.pp_rank))
            return replace(rest, op_us=merged(runner.transport.all_gather(dict(mine.op_us))))

        def planned() -> Plan:
            say("planning")
            return make_plan(job, costs, schedule=schedule, order=order, steps=steps, search_s=search_s)

        of = {"job": job_text(job), "schedule": to_line(schedule, CODEC)}
        costs = costs_again(ranks, runner.device, lambda: (*of.values(), to_line(rest)), measured, kept)
        of |= {"costs": to_line(costs), "order": order, "search": f"{steps} {search_s}"}
        plan = plan_on_first(ranks, of, planned, kept if order in BUILT_IN else None)
        self._trained = runner
        self._runner = Runner(plan, model, transport=runner.transport, shares=runner)

    def observed(self) -> tuple[Observed, ...]:
        """What the model lets see of the batches since this was last called; every rank must call it."""
        return self._runner.observed()

    def loss(self, batches: Iterable[Any]) -> float:
        """The mean of the batches' losses (of text in nats a token), the same on every rank; no parameter or
        buffer changes. Of buffers that each data-parallel copy keeps for itself, as those of a batch norm,
        the first copy's are read, which `runner.state_dict()` gives. batches: full ones, of the captured
        shape, the same on every rank.

        Raises UsageError for a batch that does not fit, and where there is none; LostRankError when a rank
        does not take part.
        """
        take_first_copys_buffers(self._runner.tensors, self._trained.tensors, self._trained.transport)
        losses = [float(loss_alone(self._runner.step(batch))) for batch in batches]
        if not losses:
            raise UsageError("an evaluation is of one batch or more: none was given")
        return sum(losses) / len(losses)


def held_out_steps(training: TrainingSettings) -> int:
    """How many forwards of held-out text a run has."""
    times = -(-training.steps // training.eval_every) if training.eval_every else 1
    return times * training.eval_batches


def _collectives(job: Job, costs: Costs) -> dict[tuple[str, str], CollectiveCost]:
    """The costs of collectives. Without dropout, attention may have another kernel than in training, and its
    ranks send otherwise: what training does not send counts as the slowest that it does on that axis."""
    result = dict(costs.collectives)
    for sent in (op.collective for stage in job.stages for ops in stage.ops.values() for op in ops):
        if sent is not None:
            known = [one for (axis, _), one in costs.collectives.items() if axis == sent.axis]
            if known:
                slowest = max(known, key=lambda one: one.curve.us(sent.nbytes))
                result.setdefault((sent.axis, sent.kind), slowest)
    return result
