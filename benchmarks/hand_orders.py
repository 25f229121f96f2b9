"""Orders of a step with experts that others wrote by hand, as orders of the same ops at the same prices.

    megatron   a forward of one microbatch with a backward of another, layer by layer (Megatron-Core's
               `TransformerLayerSchedulePlan.run`, `--overlap-moe-expert-parallel-comm` with
               `--delay-wgrad-compute`; MindSpeed's `--moe-fb-overlap` has the same):
                   lane of all-to-alls  combine B    | dispatch F, dispatch B | combine F
                   compute              attention F  | MLP B, MLP dW, MLP F   | attention B
    ampipe     a forward, or a backward, in chunks of the sequence (MindSpeed's `--ampipe-degree`):
               attention of all chunks, each with its dispatch behind it; experts of all chunks, each with its
               combine behind it; the rest. The backward goes the other way.

Where theirs leaves a choice, here is what is better for it: a start is before weight gradients and shared
experts that could as well come later; windows that they do not speak of are searched, and gradient reductions
placed, as Stretto's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from stretto.ir.action import Phase
from stretto.ir.plan import Plan
from stretto.ir.prices import Prices
from stretto.ir.program import Job
from stretto.ir.timeline import SpanKind, Timeline
from stretto.order.depend import Role, WindowGraph, make_graph
from stretto.order.policies import WindowOrders
from stretto.passes.step import Context, Step
from stretto.planning.finish import reductions_within
from stretto.planning.lower import captured_windows
from stretto.planning.schedules import choose_schedule, paired
from stretto.planning.windows import lowered
from stretto.simulating import simulate

Orderer = Callable[[WindowGraph], Sequence[int]]


class Placed:
    """Nodes of a window in the order in which they are asked for, each after all that it needs."""

    def __init__(self, graph: WindowGraph) -> None:
        self.graph = graph
        self.order: list[int] = []
        self._there = [False] * len(graph.nodes)
        waits: list[int] = []
        for before in graph.before:
            needed = max((waits[n] + (graph.nodes[n].role is Role.FINISH) for n in before), default=0)
            waits.append(needed)
        self.waits = waits
        """By node, how many all-to-alls must have been waited for, one after the other."""

    def starts(self, part: int) -> list[int]:
        """Nodes of a part that start an all-to-all, as captured."""
        return [
            index
            for index, node in enumerate(self.graph.nodes)
            if node.role is Role.START and node.item.part == part
        ]

    def put(self, index: int) -> None:
        """A node behind all that it needs and that is not there, in the captured order."""
        needed, stack = {index}, [index]
        while stack:
            for other in self.graph.before[stack.pop()]:
                if not self._there[other] and other not in needed:
                    needed.add(other)
                    stack.append(other)
        self._put(sorted(needed))

    def fill(self, part: int) -> None:
        """All of a part that waits for nothing that has not been waited for."""
        ready: list[int] = []
        for index, node in enumerate(self.graph.nodes):
            if self._there[index] or node.item.part != part or node.role is Role.FINISH:
                continue
            if all(self._there[n] or n in ready for n in self.graph.before[index]):
                ready.append(index)
        self._put(ready)

    def rest(self, parts: Iterable[int]) -> None:
        """All of some parts, one after the other."""
        for part in parts:
            for index, node in enumerate(self.graph.nodes):
                if node.item.part == part and not self._there[index]:
                    self.put(index)

    def _put(self, indexes: Iterable[int]) -> None:
        for index in indexes:
            if not self._there[index]:
                self._there[index] = True
                self.order.append(index)


def megatron(graph: WindowGraph) -> Sequence[int]:
    """Of a window of a forward (part 0) and a backward of another microbatch (part 1)."""
    placed = Placed(graph)
    forward, backward = placed.starts(0), placed.starts(1)
    for at in range(0, max(len(forward), len(backward)), 2):
        dispatch_f, combine_f = forward[at : at + 1], forward[at + 1 : at + 2]
        combine_b, dispatch_b = backward[at : at + 1], backward[at + 1 : at + 2]
        for start in combine_b:  # behind attention B of the layer before, whose weight gradients follow
            placed.put(start)
        if at:
            placed.fill(1)
        for start in (*dispatch_f, *dispatch_b):
            placed.put(start)
        placed.fill(1)
        for start in combine_f:
            placed.put(start)
        placed.fill(0)
    placed.rest((1, 0))
    return placed.order


def ampipe(graph: WindowGraph) -> Sequence[int]:
    """Of a window of a forward, or of a backward."""
    placed = Placed(graph)
    backward = graph.window.parts[0][1] is not Phase.F
    starts = placed.starts(0)
    for waits in sorted({placed.waits[start] for start in starts}):
        for start in (start for start in starts if placed.waits[start] == waits):
            placed.put(start)
            if backward and waits % 2:  # experts of a chunk, with their weight gradients
                placed.fill(0)
        placed.fill(0)
    placed.rest((0,))
    return placed.order


def planned(job: Job, prices: Prices, order: Orderer) -> Plan:
    """The step in that order. `megatron` orders windows of two microbatches, `ampipe` all."""
    chosen = choose_schedule(job)
    context = Context(prices, "improve", lambda step: ())
    step = Step(job, chosen, chosen, "local", None, "local")
    if order is megatron:
        step = paired(step, context, ahead=0)
    costs = context.costs_of(job)
    plain = WindowOrders(job, costs, step.schedule.stage_ranks)
    windows = {}
    for name, window in captured_windows(job, step.schedule).items():
        if order is megatron and len(window.parts) == 1:
            windows[name] = plain.ordered(window)
            continue
        graph = make_graph(job, costs, window, step.schedule.stage_ranks)
        result = order(graph)
        assert sorted(result) == list(range(len(graph.nodes)))
        windows[name] = replace(window, items=tuple(graph.nodes[index].item for index in result))
    return lowered(reductions_within(replace(step, windows=windows), context), context)


def steady_us(timeline: Timeline) -> tuple[float, float]:
    """Of rank 0, while there are forwards as well as backwards: from the first backward's begin until the
    last forward's end."""
    spans = [s for s in timeline.spans if s.rank == 0 and s.kind is SpanKind.COMPUTE]
    backward = min(s.start_us for s in spans if s.phase in (Phase.B, Phase.I))
    return backward, max(s.end_us for s in spans if s.phase is Phase.F)


def hidden(plan: Plan, axis: str) -> tuple[float, float]:
    """The share of an axis' communication that is hidden, in the full step and in its steady state."""
    timeline = simulate(plan)
    within = steady_us(timeline)
    return timeline.hidden[axis], 1.0 - _share(timeline, axis, within)


def _share(timeline: Timeline, axis: str, within: tuple[float, float]) -> float:
    exposed, lane = (
        sum(
            max(0.0, min(s.end_us, within[1]) - max(s.start_us, within[0]))
            for s in timeline.spans
            if s.rank == 0 and s.axis == axis and s.kind is kind
        )
        for kind in (SpanKind.EXPOSED, SpanKind.MESSAGE)
    )
    return exposed / lane
