"""What a stage's programs take by themselves and joined, with the collectives that then stay exposed.

Within one program little hides a collective, as the next op mostly needs its result; the ops of another
microbatch hide more. How much is told by the windows that a plan orders, of a stage in the middle, with ops
in the order of a list. Touches no clock of steps: one window at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.ir.action import Action, Overlap, Phase, Slot
from stretto.ir.costs import Costs
from stretto.ir.program import Job
from stretto.order.depend import make_graph
from stretto.order.walk import replay
from stretto.order.window import list_order
from stretto.order.windows import waits_at_once
from stretto.schedule.windows import make_window


@dataclass(frozen=True, slots=True)
class Alone:
    """Times what a stage's ops take: of its F, I and W each alone, of I and W as one program, and of a
    forward that is joined with a backward of another microbatch, both; None where none may be."""

    phases: tuple[float, float, float] = (1.0, 1.0, 1.0)
    backward: float = 1.0
    joined: float | None = None


HIDDEN = Alone()
"""Of a stage that exposes nothing."""


def alone_of(job: Job, costs: Costs, stage_ranks: Sequence[int]) -> Alone:
    """Of a job's stage in the middle, as far as the job may overlap. stage_ranks: places of its stages,
    between which messages go."""
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
    return Alone(
        (times(forward), times(into), times(weight)),
        times(backward),
        times(both) if job.overlap == "window" else None,
    )
