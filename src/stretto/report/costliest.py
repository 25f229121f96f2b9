"""The costliest ops of a step: equal calls on equal shapes taken together, by what they cost in all."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from stretto.ir.plan import Plan
from stretto.ir.transfers import time_of
from stretto.report.detail import op_category, shapes_in, shapes_out, specs_of


@dataclass(slots=True)
class OpGroup:
    """Equal calls on equal shapes, over all stages and microbatches. source: how their times are known."""

    target: str
    shapes: str
    made: str
    phases: str = ""
    calls: int = 0
    total_us: float = 0.0
    flops: int = 0
    nbytes: int = 0
    share: float = 0.0
    source: str = ""


def costliest_ops(plan: Plan, most: int = 12, *, by_inputs: bool = True) -> list[OpGroup]:
    """The `most` groups of ops that cost most, the costliest first; times are microseconds of the whole step,
    over all stages and microbatches, `share` is of all ops' time.

    by_inputs: False takes calls together that make equal shapes, whatever they read.
    """
    specs = specs_of(plan.job)
    times_a_step = plan.job.microbatches
    groups: dict[tuple[str, str, str], OpGroup] = {}
    phases: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    sources: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
    everything_us = 0.0
    for stage in plan.job.stages:
        for phase, ops in stage.ops.items():
            for op in ops:
                us = time_of(plan.costs, stage.index, op)
                if not us:
                    continue
                everything_us += us * times_a_step
                key = (op.target, shapes_in(op, specs) if by_inputs else "", shapes_out(op))
                group = groups.setdefault(key, OpGroup(*key))
                phases[key].add(op_category(op, phase))
                sources[key][plan.costs.how(stage.index, op.name)] = None
                group.calls += times_a_step
                group.total_us += us * times_a_step
                group.flops += op.flops * times_a_step
                group.nbytes += op.nbytes * times_a_step
    for key, group in groups.items():
        group.share = group.total_us / everything_us
        group.source = ", ".join(sources[key])
        group.phases = "".join(sorted(phases[key], key="FIWR".index))
    return sorted(groups.values(), key=lambda d: (-d.total_us, d.target, d.shapes))[:most]
