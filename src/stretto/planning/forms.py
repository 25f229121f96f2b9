"""A step that may be had in several forms, in other numbers of chunks or of stages: the fastest plan of them.

1. The first is planned. Each other is priced, and bounded: where no order of its ops comes to less than
   the fastest plan so far takes, it is not planned.
2. The fastest comes out, and describes what it was compared with. An interrupt that ends a search
   (`stretto.passes.step`) ends this one too, with what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stretto.errors import PlanError
from stretto.ir.forms import differing, form, number
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.passes.step import Watch
from stretto.planning.choose import Variants


@dataclass(frozen=True, slots=True)
class _Other:
    """One that was compared. least: whether `us` is its bound, and it was not planned."""

    job: Job
    us: float
    least: bool

    def described(self, differ: Sequence[str]) -> str:
        name = number(self.job, differ)
        return f"{name} {'takes' if name == '1' else 'take'} {_ms(self.us, self.least)}"


def _ms(us: float, least: bool = False) -> str:
    return f"{'at least ' if least else ''}{us / 1000:.1f} ms"


def fastest(
    begun: Sequence[Callable[[], Variants]],
    make: Callable[[Variants], Plan],
    watch: Watch,
    *,
    anywhere: bool = False,
) -> Plan:
    """The fastest plan. begun: the variants of each, made when their turn comes, the simplest first.
    anywhere: whether `make` may have stages on other ranks than the variants do.

    Raises PlanError, the first one's, when all are refused.
    """
    made: list[Plan] = []
    others: list[_Other] = []
    refused: list[tuple[Job, PlanError]] = []
    try:
        for begin in begun:
            if made and watch.stopped:
                break
            variants = begin()
            try:
                if made:
                    best_us, bound_us = min(map(_step_us, made)), variants.bound_us(anywhere)
                    if bound_us >= best_us:
                        others.append(_Other(variants.first.job, bound_us, True))
                        continue
                made.append(make(variants))
            except PlanError as error:  # another form may keep less
                refused.append((variants.first.job, error))
    except KeyboardInterrupt as error:
        if not made:
            raise
        watch.stop(error)
    if not made:
        raise refused[0][1]
    best = min(made, key=_step_us)
    if len(made) + len(others) + len(refused) == 1:
        return best
    others += [_Other(one.job, _step_us(one), False) for one in made if one is not best]
    others.sort(key=lambda one: (len(one.job.stages), one.job.chunks))
    differ = differing([best.job, *(one.job for one in others), *(job for job, _ in refused)])
    compared = [
        *(one.described(differ) for one in others),
        *(f"{number(job, differ)} cannot be ({error.faults[0]})" for job, error in refused),
    ]
    why = f"{form(best.job, differ)}, {_ms(_step_us(best))}, as {', '.join(compared)}"
    if "stages" in differ:
        return replace(best, schedule_why=f"{best.schedule_why}; {why}")
    return replace(best, overlap_why="; ".join(text for text in (best.overlap_why, why) if text))


def _step_us(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_us
