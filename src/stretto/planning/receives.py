"""The pass that says how many microbatches ahead receives are posted, where several messages make one's.

Lowering posts a receive a few messages before it is needed. Of one message a microbatch that is a few
microbatches; of a stage whose skips cross as well it is a part of one, and the next microbatch's messages
cannot begin before the work of this one ends. Posted earlier, they travel under that work, and their buffers
are held for longer. So:

    1. Lower the step, or the one of fewer microbatches by which steps are compared, with receives posted 0,
       1, ... `MOST` microbatches ahead. Where that changes nothing, as of one message a microbatch, the step
       stays as it is (and with one edge between any two ranks, none of it is done).
    2. The most buffers make the fastest step. Of those that take about as long (`WORTH`), the one with the
       fewest is taken; simulations tell.
    3. Where it holds more than the step may, so do those with more buffers; step 2 is done for the others.

A receive that is posted earlier never makes a rank wait: what could pass still can, whether or not sends are
buffered. Messages keep their order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from stretto.ir.plan import Plan
from stretto.passes.step import Context, Step
from stretto.planning.sends import sends_waited
from stretto.planning.windows import as_short, lowered
from stretto.simulating import simulate
from stretto.verifying.memory import memory_faults

MOST = 3
"""As many microbatches as lowering posts ahead where each has one message (`planning.lower.LOOKAHEAD`)."""

WORTH = 0.995
"""Of a step's time, what it takes at most with more buffers. Assumed: less is within what costs can tell, and
whoever needs the memory for a larger model or batch gains more by it."""


def receives_ahead(step: Step, context: Context) -> Step:
    """The step with the number of microbatches that receives are posted ahead. Raises PlanError for one whose
    ranks wait for each other for ever."""
    ranks = step.schedule.stage_ranks
    pairs = Counter((ranks[edge.source], ranks[edge.target]) for edge in step.job.edges)
    if step.overlap == "off" or max(pairs.values(), default=0) < 2:
        return step
    tried: list[tuple[Step, Plan]] = []
    for ahead in range(MOST + 1):
        one = replace(step, ahead=ahead)
        draft = lowered(as_short(one, context), context)
        if not tried or draft.orders != tried[-1][1].orders:
            tried.append((one, draft))
    if len(tried) == 1:
        return step
    known: dict[int, float] = {}

    def step_us(at: int) -> float:
        if at not in known:
            known[at] = simulate(tried[at][1]).step_us
        return known[at]

    most = len(tried) - 1
    while most:
        chosen = next(at for at in range(most + 1) if step_us(at) <= step_us(most) / WORTH)
        if not chosen or _fits(tried[chosen][0], context):
            return tried[chosen][0]
        most = chosen - 1
    return step


def _fits(step: Step, context: Context) -> bool:
    """Step 3, with waits for sends where they will be."""
    if step.max_bytes is None:
        return True
    return not memory_faults(lowered(sends_waited(step, context), context), step.max_bytes)
