"""The order of a B's ops that holds least: weight gradients as soon as they can be made.

As captured, a B is all of I, then all of W: whatever W reads, of every layer, is held until the last layer's
input gradient is there. Where memory is asked for (`recompute`), W's ops stand between those of I instead,
as automatic differentiation has them. A gradient's parts are added up in the same order, so the bits are the
same. Touches `stretto.ir` only.
"""

from __future__ import annotations

from collections import deque

from stretto.ir.action import Phase
from stretto.ir.program import Job, Op


def holds_least(job: Job) -> bool:
    """Whether the job asks for memory before anything else."""
    return job.recompute not in ("none", "selective", "gathers")


def memory_order(job: Job, stage: int, phase: Phase) -> list[Op]:
    """The ops of an action; of a B, each op of W after the last op of I that it needs.

    W keeps its own order. What a tied parameter's gradient gets from W waits for what it gets from I.
    """
    programs = job.stages[stage].ops
    if phase is not Phase.B:
        return list(programs[phase])
    into = {op.name for op in programs[Phase.I]}
    missing = {op.name: into.intersection(op.uses) for op in programs[Phase.W]}
    groups: dict[str, list[str]] = {}
    for parameter in job.parameters:
        groups.setdefault(parameter.tied_to, []).extend(v for at, _, v in parameter.grads if at == stage)
    for values in groups.values():
        first = into.intersection(values)
        for value in values:
            if value in missing:
                missing[value] |= first
    waiting = deque(programs[Phase.W])
    done: set[str] = set()
    found: list[Op] = []
    for op in programs[Phase.I]:
        found.append(op)
        done.add(op.name)
        while waiting and missing[waiting[0].name] <= done:
            found.append(waiting.popleft())
    return [*found, *waiting]
