"""Messages that leave together: a value, and a gradient that comes the other way.

A collective uses both directions of its rank's network card, a message one. Where they share the card, the
other direction is half idle beside a message, or idle without a collective: what a message takes of one
direction is lost on both, unless another message goes the other way meanwhile. Between the same two places
that is the gradient of an earlier microbatch. So:

    1. A border is an edge whose message crosses ranks, and the edge of the gradient that comes back.
    2. At a border the gradient of microbatch k is paired with the value of microbatch k + ahead, and neither
       leaves before both can (`order.listing`). `ahead` is what 1F1B has in flight there, and a few more.
    3. A search (`whole_step.search`) pairs single messages otherwise, or not at all.

That what travels both ways meets is what 1F1B's steady state does where stages take equally long; that it
pays to wait for it was measured here: on the tensor race of hidden 2048 over pp=2 the search comes to 1.104
of the bound, and to 1.137 without pairs.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stretto.ir.action import Phase
from stretto.ir.plan import Plan
from stretto.schedule.posting import Message
from stretto.simulating.clock import Clock

MORE = (0, 1, 2, 3)
"""Of how many microbatches more than in 1F1B values go ahead of gradients, tried. Measured on the tensor
race of hidden 2048: 3 is best."""


@dataclass(frozen=True, slots=True)
class Border:
    """Step 1, and its pairs. values: by microbatch, that whose value leaves with this one's gradient; None
    for a gradient that leaves alone."""

    value: int
    gradient: int
    values: tuple[int | None, ...]

    def moved(self, draw: random.Random) -> Border:
        """Step 3: one gradient with the next value, or the one before, or alone."""
        at = draw.randrange(len(self.values))
        # One that leaves alone is as far behind as the last that does not.
        known = reversed(list(enumerate(self.values[: at + 1])))
        near = at + next((value - k for k, value in known if value is not None), 0)
        new = draw.choice((None, near - 1, near, near + 1))
        if new is not None and not at < new < len(self.values):
            new = None
        values = [None if other == new else other for other in self.values]
        values[at] = new
        return replace(self, values=tuple(values))


Borders = tuple[Border, ...]


def borders(plan: Plan) -> Borders:
    """Step 1, without pairs; none where collectives do not share cards with messages."""
    if not plan.costs.shared:
        return ()
    gradients: dict[tuple[int, int], list[int]] = defaultdict(list)
    for edge in plan.job.edges:
        if edge.phase is not Phase.F:
            gradients[edge.target, edge.source].append(edge.index)
    found = []
    for edge in plan.job.edges:
        crosses = plan.rank_of(edge.source) != plan.rank_of(edge.target)
        back = gradients[edge.source, edge.target]
        if edge.phase is Phase.F and crosses and back:
            found.append(Border(edge.index, back.pop(0), (None,) * plan.job.microbatches))
    return tuple(found)


def paired(plan: Plan, apart: Borders, more: int) -> Borders:
    """Step 2: `more` values go ahead than in 1F1B."""
    stages = len(plan.job.stages)
    found = []
    for border in apart:
        ahead = stages - 1 - plan.job.edges[border.value].source + more
        count = len(border.values)
        values = tuple(k + ahead if k + ahead < count else None for k in range(count))
        found.append(replace(border, values=values))
    return tuple(found)


def partners(pairs: Borders) -> Mapping[Message, Message]:
    """By message, the one that leaves with it."""
    found: dict[Message, Message] = {}
    for border in pairs:
        for microbatch, value in enumerate(border.values):
            if value is not None:
                one, other = (border.gradient, microbatch), (border.value, value)
                found[one], found[other] = other, one
    return found


class Meetings:
    """Messages of one step that wait for their partners."""

    def __init__(self, pairs: Borders, clock: Clock) -> None:
        self._partners = partners(pairs)
        self._clock = clock
        self._waiting: dict[Message, Callable[[], None]] = {}

    def meet(self, message: Message, go: Callable[[], None]) -> bool:
        """A message can leave. Whether it goes at once; else `go` is called when its partner can, too."""
        partner = self._partners.get(message)
        if partner is None:
            return True
        waiting = self._waiting.pop(partner, None)
        if waiting is None:
            self._waiting[message] = go
            return False
        self._clock.at(self._clock.now_us, waiting)
        return True
