"""The most bytes that ranks need, before ops have an order: by this a limit of memory is kept.

The ops of windows are as captured, since an order of ops keeps their limit, and pairs that need more are
refused. What a rank keeps follows from its order alone, but for one thing: a send's buffer is kept until the
send is waited for, and when that is a simulation says. It changes little as more or fewer ops are repeated,
and a simulation takes longer than all else. So:

    exact      the step is simulated;
    about      sends are waited for where they were in the exact step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.ir.plan import Plan
from stretto.ir.prices import Prices
from stretto.order.policies import CAPTURED
from stretto.passes.step import Context, Step
from stretto.planning.choose import ways
from stretto.planning.finish import sends_waited
from stretto.planning.lower import lower
from stretto.planning.windows import job_with_once, lowered
from stretto.verifying.memory import peak_bytes


class Peaks:
    """Of steps of one plan."""

    def __init__(self, prices: Prices) -> None:
        self._context = Context(prices, CAPTURED, self)
        self._exact: Step | None = None
        """The last that was simulated."""

    def __call__(self, step: Step, about: bool = False) -> Sequence[int]:
        """The most bytes of each rank. Raises PlanError where ranks wait for each other forever."""
        step = replace(step, asked="off" if step.asked == "off" else "local")
        for apply in ways(step)[-1]:
            step = apply(step, self._context)
        plan = (self._about(step) if about else None) or self._simulated(step)
        return [peak_bytes(plan, rank) for rank in range(plan.ranks)]

    def _simulated(self, step: Step) -> Plan:
        self._exact = sends_waited(step, self._context)
        return lowered(self._exact, self._context)

    def _about(self, step: Step) -> Plan | None:
        """None where nothing alike was simulated."""
        exact = self._exact
        if exact is None or exact.schedule is not step.schedule or exact.job.edges != step.job.edges:
            return None
        return lower(
            *(
                job_with_once(step, self._context),
                step.schedule,
                self._context.costs_of(exact.job),
            ),  # lowering asks no price
            overlap=step.overlap,
            windows=step.windows,
            sent_before=exact.sent_before,
        )
