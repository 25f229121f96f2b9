"""All ranks of a step walked at once, each op chosen when its lane is free: orders of windows come out of it.

For steps in which each rank has one window. Where a window ordered by itself must be told when messages
arrive, here they arrive when the other rank has sent them.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.ir.plan import Plan
from stretto.order.listing import Listing
from stretto.order.scope import Whole
from stretto.order.walk import Chosen, walk
from stretto.order.whole_step.pairs import Borders, Meetings
from stretto.order.worlds import StepWorld


def choose(
    plan: Plan,
    wholes: Sequence[Whole],
    urgencies: Sequence[Sequence[float]],
    patience: Sequence[float],
    pairs: Borders = (),
) -> Chosen | None:
    """Walk the step; None when ranks wait for ever.

    wholes, urgencies, patience: by rank, its window, how urgent its nodes are, and step 3 of `order.listing`.
    pairs: messages that leave together.
    """
    world = StepWorld(plan)
    meetings = Meetings(pairs, world.clock)
    each = enumerate(zip(wholes, urgencies, patience, strict=True))
    return walk(world, [Listing(world, rank, *mine, meetings.meet) for rank, mine in each])
