"""Proves in which order parts are made, and put together, over several axes.

Ranks number the parts that they keep of a parameter along `Parameter.kept`, the first axis the slowest. A
gradient is scattered over the first axis first; what is gathered comes over the last axis first. Other orders
give every rank tensors of the right shape with rows in other places, which placements, an axis at a time, do
not see.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stretto.ir.action import ONCE_PHASES
from stretto.ir.collectives import ALL_GATHER, REDUCE_SCATTER
from stretto.ir.flow import PHASES
from stretto.ir.placements import IN_DTYPE, SIDE_BY_SIDE, SPLITS
from stretto.ir.plan import Plan
from stretto.ir.program import GETITEM, GRAD, SHARD, VIEWS, WAIT, Job, Op
from stretto.verifying.fault import Fault

Axes = tuple[str, ...]
"""Over which a value is in parts, the slowest first."""

_SAME = frozenset({WAIT, GETITEM, SIDE_BY_SIDE, IN_DTYPE, *SPLITS, *VIEWS})
"""Ops whose results are in the same parts as what they read."""


def axis_order_faults(plan: Plan) -> Iterator[Fault]:
    """Every gather and every gradient whose axes come in another order than its parameter's."""
    for rank in range(plan.ranks):
        stages = plan.schedule.stages_of(rank)
        yield from _faults(rank, plan.job, (-1, ONCE_PHASES[0]), plan.once(rank))
        for stage in stages:
            for phase in PHASES:
                yield from _faults(rank, plan.job, (stage, phase), plan.job.stages[stage].ops.get(phase, ()))


def _faults(rank: int, job: Job, program: tuple[int, object], ops: Iterable[Op]) -> Iterator[Fault]:
    """Of the ops of one program, or of all that run once a step (stage -1)."""
    kept = {SHARD + p.kept_as: p.kept for p in job.parameters if len(p.kept) > 1}
    gradients = {GRAD + p.name: p.kept for p in job.parameters if len(p.kept) > 1}
    over = {axis for axes in kept.values() for axis in axes}
    if program[0] >= 0:
        ends = {v: p for p in job.parameters if p.scattered for s, f, v in p.grads if (s, f) == program}
        wanted = {value: gradients[GRAD + p.name] for value, p in ends.items() if len(p.kept) > 1}
        made: dict[str, Axes] = {}
    else:
        wanted = gradients
        made = {GRAD + p.name: p.kept if p.scattered else () for p in job.parameters}
    gathered: dict[str, Axes] = dict(kept)
    for op in ops:
        first = op.uses[0] if op.uses else ""
        if op.kind is ALL_GATHER and gathered.get(first):
            *rest, last = gathered[first]
            if op.lane != last:
                what = f"gathers over {op.lane} what is in parts over {', '.join(gathered[first])}"
                yield Fault(rank, op.name, what, f"Gather it over {last} first")
            gathered[op.name] = tuple(rest)
        elif op.kind is REDUCE_SCATTER and op.lane in over:
            made[op.name] = (*made.get(first, ()), op.lane)
        elif op.target in _SAME or op.kind is not None:
            for parts in (gathered, made):
                if first in parts:
                    parts[op.name] = parts[first]
        for name in (op.name, *op.writes):
            axes = made.get(op.name, ())
            if name in wanted and len(axes) == len(wanted[name]) and axes != wanted[name]:
                what = f"is in parts over {', '.join(axes)}, and the parameter over {', '.join(wanted[name])}"
                yield Fault(rank, name, what, f"Scatter it over {wanted[name][0]} first")
            if name in op.writes:
                made[name] = axes
