"""What one microbatch takes on the devices of one layout: the model captured and priced once.

A layout's trace (`stretto.capturing.captures`) serves all layouts that shard layers in the same way over
microbatches of the same size. What is read off it is true for any number of pipeline ranks: sums over the
model, of which each pipeline rank has a share.

Within one program little hides a collective, as the next op mostly needs its result; the ops of another
microbatch hide more. How much is seen in windows of a stage in the middle, with ops in the order of a list.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import get_args

from stretto.capturing.captures import Captures
from stretto.config import ParallelSettings
from stretto.errors import PlanError, UsageError
from stretto.ir.action import Action, Overlap, Phase, Slot
from stretto.ir.costs import Costs
from stretto.ir.flow import PHASES
from stretto.ir.parameters import Zero, scatters
from stretto.ir.prices import Prices
from stretto.ir.program import Job
from stretto.order.depend import make_graph
from stretto.order.policies import list_order, waits_at_once
from stretto.order.walk import replay
from stretto.passes.recompute_choice import recompute
from stretto.passes.sharded_state import in_programs
from stretto.price.cluster import Description, described
from stretto.schedule.families import PLAIN_OF_SEVERAL, make_schedule
from stretto.schedule.windows import make_window
from stretto.tune.choices import COPIES, Dealt, LayoutChoice
from stretto.tune.resident import NOTHING, Extra, Fixed, Shares, extra_of, fixed_of, parts_of, saved_of

LAYERS = 4
"""Layers of a stage at least, of which the middle one is looked at: what they share at their borders shows
there, and larger ones take longer. Assumed."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """Times what a stage's ops take: of its F, I and W each by itself, of I and W as one program, and of a
    forward that is joined with a backward of another microbatch, both; None where none may be."""

    phases: tuple[float, float, float] = (1.0, 1.0, 1.0)
    backward: float = 1.0
    joined: float | None = None


@dataclass(frozen=True, slots=True)
class BlockWork:
    """One microbatch through the model, on one of the ranks that share it.

    phases_us: F, I and W on the compute lane. saved_bytes: what the forward keeps for the backward, with
    that of the model's head, head_bytes. exposure: what of the collectives stays exposed. extra: what a rank
    has for a while besides.
    """

    phases_us: tuple[float, float, float]
    saved_bytes: float
    exposure: Exposure = Exposure()
    extra: Extra = NOTHING
    head_bytes: float = 0.0

    @property
    def compute_us(self) -> float:
        return sum(self.phases_us)

    @property
    def steady_us(self) -> float:
        """In the middle of a step, where forwards may be joined with backwards."""
        forward_us, *backward_us = self.phases_us
        apart_us = forward_us * self.exposure.phases[0] + sum(backward_us) * self.exposure.backward
        if self.exposure.joined is None:
            return apart_us
        return min(apart_us, self.compute_us * self.exposure.joined)

    def scaled(self, by: float) -> BlockWork:
        """For so many times the rows, as if everything went by rows: a guess."""
        forward_us, into_us, weight_us = (us * by for us in self.phases_us)
        return replace(
            self,
            phases_us=(forward_us, into_us, weight_us),
            saved_bytes=self.saved_bytes * by,
            head_bytes=self.head_bytes * by,
            extra=self.extra.scaled(by),
        )


@dataclass(frozen=True, slots=True)
class TuneBlock:
    """rows: of a microbatch. flops: of one microbatch on one rank. again: by what the backward computes
    again, what that makes of the microbatch's work. fixed: by `zero`, what ranks have throughout.
    gradient_bytes: what data-parallel copies reduce. message_bytes: what crosses a border, one way. shares:
    by numbers of stages, what each stage has of all; about equal where it is not known. read_bytes: of
    parameters, as ops read them; first_bytes: of the first of them.
    """

    rows: float
    flops: float
    again: Mapping[str | int, BlockWork]
    fixed: Mapping[Zero, Fixed]
    gradient_bytes: float
    message_bytes: float
    shares: Mapping[int, Shares] = field(default_factory=dict)
    read_bytes: float = 0.0
    first_bytes: float = 0.0

    def fixed_bytes(self, layout: LayoutChoice, dealt: Dealt) -> float:
        """Of all stages of the model, what a rank of the layout has throughout."""
        return self.fixed[dealt.zero].bytes_over((dealt.dp_shard or layout.dp) * layout.cp)

    def scaled(self, rows: float) -> TuneBlock:
        """A guess of the block with other rows."""
        by = rows / self.rows
        again = {word: work.scaled(by) for word, work in self.again.items()}
        return replace(
            self, rows=rows, flops=self.flops * by, again=again, message_bytes=self.message_bytes * by
        )


def block_of(
    captures: Captures,
    parallel: ParallelSettings,
    cluster: Description,
    words: tuple[str | int, ...],
    rows: float,
    layers: int | None = None,
) -> TuneBlock:
    """The block of a layout, with what the backward may compute again. rows: of a microbatch; layers: equal
    blocks of the model.

    Raises CaptureError and UsageError for what cannot be captured so.
    """
    job = _cut(captures, parallel, layers)
    ranks = job.pp or 1
    schedule = make_schedule(PLAIN_OF_SEVERAL, ranks, ranks, virtual_stages=len(job.stages) // ranks)
    costs, pricer = described(job, schedule, cluster)
    prices = Prices(job, costs, pricer, keep=False)
    again: dict[str | int, BlockWork] = {}
    for word in words:
        made = job
        if isinstance(word, str) and word != "none":
            try:
                made = recompute(replace(job, recompute=word), word, costs, schedule, lambda *_: ())
            except PlanError:
                continue
        made = in_programs(made)
        work = work_of(made, prices.costs_of(made), schedule.stage_ranks)
        again[word] = replace(work, extra=extra_of(made, job, prices, schedule, parallel.ep))
    parameters = {p.tied_to: p for p in job.parameters}.values()
    first = {p.tied_to: p for p in job.parameters if p.grads}.values()
    sizes = [edge.spec.nbytes for edge in job.edges if edge.target > edge.source]
    return TuneBlock(
        rows,
        sum(op.flops for stage in job.stages for ops in stage.ops.values() for op in ops),
        again,
        {zero: fixed_of(job, parallel.ep, zero) for zero in get_args(Zero)},
        sum(parameter.grad_nbytes for parameter in first),
        max(sizes, default=0),
        read_bytes=sum(parameter.spec.nbytes for parameter in parameters),
        first_bytes=next((parameter.spec.nbytes for parameter in parameters), 0),
    )


def shares_of(
    captures: Captures, parallel: ParallelSettings, cluster: Description, counts: Collection[int]
) -> dict[int, Shares]:
    """By each of these numbers of stages that the model can be cut in, what each stage has of all. They are
    about the same in all layouts, so that those of one serve."""
    shares: dict[int, Shares] = {}
    for count in counts:
        with suppress(UsageError):
            job = captures.job(
                parallel.model_copy(update={**_few(parallel), "pp": 1, "virtual_stages": count})
            )
            costs, _ = described(job, make_schedule(PLAIN_OF_SEVERAL, 1, 1, virtual_stages=count), cluster)
            work_us = [
                sum(
                    costs.op_us.get((stage.index, op.name), 0.0)
                    for phase in PHASES
                    for op in stage.ops[phase]
                )
                for stage in job.stages
            ]
            if sum(work_us):
                fixed = [fixed_of(job, parallel.ep, 0, (at,)).full for at in range(count)]
                shares[count] = Shares(*map(parts_of, (work_us, fixed, saved_of(job).body)))
    return shares


def _few(parallel: ParallelSettings) -> dict[str, object]:
    """Changes to a layout that leave as few devices as show what layers communicate: the schedule and the
    copies come later, but where microbatches communicate with them."""
    dp, zero = parallel.ep, COPIES.zero
    if scatters(parallel.zero):
        dp, zero = parallel.dp_shard or parallel.dp, parallel.zero
    return {
        "dp": dp,
        "dp_shard": None,
        "zero": zero,
        "microbatches": parallel.microbatches * parallel.dp // dp,
        "schedule": PLAIN_OF_SEVERAL,
        "split": "auto",
        "microbatch_group": None,
    }


def _cut(captures: Captures, parallel: ParallelSettings, layers: int | None) -> Job:
    """In stages of some layers on two ranks, between which a border shows, or in one where a model has no
    second."""
    changed = _few(parallel)
    if parallel.pp > 1:
        for each in dict.fromkeys((max(1, (layers or 2 * LAYERS) // (2 * LAYERS)), 1)):
            with suppress(UsageError):
                return captures.job(parallel.model_copy(update={**changed, "pp": 2, "virtual_stages": each}))
    return captures.job(parallel.model_copy(update={**changed, "pp": 1, "virtual_stages": 1}))


def work_of(job: Job, costs: Costs, stage_ranks: Sequence[int]) -> BlockWork:
    """The sums over all stages of a job, and what its middle one exposes."""
    times: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
    for stage in job.stages:
        for phase in PHASES:
            times[phase] += math.fsum(costs.op_us.get((stage.index, op.name), 0.0) for op in stage.ops[phase])
    phases_us = times[Phase.F], times[Phase.I], times[Phase.W]
    saved, exposure = saved_of(job), exposure_of(job, costs, stage_ranks)
    return BlockWork(phases_us, sum(saved.by_stage), exposure, head_bytes=saved.head)


def exposure_of(job: Job, costs: Costs, stage_ranks: Sequence[int]) -> Exposure:
    """Of a job's stage in the middle, as far as the job may overlap. stage_ranks: pipeline ranks of its
    stages, between which messages go."""
    middle = len(job.stages) // 2

    def times(slot: Slot) -> float:
        window = make_window(job, slot)
        if job.overlap == "off":
            window = waits_at_once(job, window)
        graph = make_graph(job, costs, window, stage_ranks)
        if not graph.communicates or not graph.work_us:
            return 1.0
        order = range(len(graph.nodes)) if job.overlap == "off" else list_order(graph)
        return max(1.0, replay(graph, order).end_us / graph.work_us)

    forward, into, weight, backward = (
        Action(middle, phase, 0) for phase in (Phase.F, Phase.I, Phase.W, Phase.B)
    )
    both = Overlap((Action(middle, Phase.F, 1), backward))
    return Exposure(
        (times(forward), times(into), times(weight)),
        times(backward),
        times(both) if job.overlap == "window" else None,
    )
