"""A step that may be had in several numbers of chunks of its sequence: the fastest plan of them.

    1. The first is planned. Each other is priced, and bounded: where no order of its ops comes to less than
       the fastest plan so far takes, it is not planned.
    2. The fastest comes out, and says what it was compared with. An interrupt that ends a search
       (`stretto.passes.watch`) ends this one too, with what there is.

May touch `stretto.ir`, `stretto.passes.watch` and `planning.tries`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stretto.errors import PlanError
from stretto.ir.plan import Plan
from stretto.passes.watch import Watch
from stretto.planning.tries import Tries


@dataclass(frozen=True, slots=True)
class _Other:
    """One that was compared. least: whether `us` is its bound, and it was not planned."""

    chunks: int
    us: float
    least: bool

    def __str__(self) -> str:
        return f"{self.chunks} {'takes' if self.chunks == 1 else 'take'} {_ms(self.us, self.least)}"


def _ms(us: float, least: bool = False) -> str:
    return f"{'at least ' if least else ''}{us / 1000:.1f} ms"


def fastest(begun: Sequence[Callable[[], Tries]], make: Callable[[Tries], Plan], watch: Watch) -> Plan:
    """The fastest plan. begun: the variants of each, made when their turn comes, fewest chunks first.

    Raises PlanError, the first one's, when all are refused.
    """
    made: list[Plan] = []
    others: list[_Other] = []
    refused: list[tuple[int, PlanError]] = []
    try:
        for begin in begun:
            if made and watch.stopped:
                break
            tries = begin()
            try:
                if made:
                    best_us, bound_us = min(map(_step_us, made)), tries.bound_us()
                    if bound_us >= best_us:
                        others.append(_Other(tries.chunks, bound_us, True))
                        continue
                made.append(make(tries))
            except PlanError as error:  # another number of chunks may hold less
                refused.append((tries.chunks, error))
    except KeyboardInterrupt as error:
        if not made:
            raise
        watch.stop(error)
    if not made:
        raise refused[0][1]
    if len(begun) == 1:
        return made[0]
    best = min(made, key=_step_us)
    others += [_Other(one.job.chunks, _step_us(one), False) for one in made if one is not best]
    others.sort(key=lambda one: one.chunks)
    count = best.job.chunks
    compared = [*map(str, others), *(f"{chunks} cannot be ({error.faults[0]})" for chunks, error in refused)]
    told = f"{count} chunk{'s' if count > 1 else ''} of the sequence, {_ms(_step_us(best))}, as " + ", ".join(
        compared
    )
    return replace(best, overlap_why="; ".join(text for text in (best.overlap_why, told) if text))


def _step_us(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_us
