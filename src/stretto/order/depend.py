"""The graph of a window that policies order: what an order must respect, and what each item costs.

1. A node for each item of the window: an op for its time on the compute lane; a collective's start also
   for its time on the lane of its axis; a wait for a collective; a message's wait and its send; the start
   of a gradient reduction, which nothing in the window waits for.
2. An edge from what makes a value to what reads it, a wait included: it reads what its start gives. A
   value may be of an earlier part of the same stage and microbatch. Where that is F, all of it comes
   before the backward's first op: lower bounds count on actions of a microbatch in this order.
3. An edge between two ops that add to one parameter's gradient, as captured: sums of floats depend on
   their order, and an order of ops must not change numbers. Nothing else is written in place before
   the window's end, and draws of random ops do not depend on when they happen. And one from each op that
   adds to a gradient to the start of its reduction.
4. The memory that nodes make and read, so that a policy can keep a limit.
5. For a backward and a forward that may not begin before it is done with what its own forward saved
   (`frees`), an edge from what the one ends with to what the other begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from stretto.ir.action import Phase
from stretto.ir.costs import Costs
from stretto.ir.flow import ops_of_stage
from stretto.ir.plan import Item, ItemKind, Window
from stretto.ir.program import WAIT, Job, Op
from stretto.ir.transfers import axis_time, message_us, time_of
from stretto.order.storages import WindowStorage, find_storages
from stretto.schedule.windows import adding_items


class Role(StrEnum):
    """What a node is for the scheduler."""

    COMPUTE = "compute"
    START = "start"
    FINISH = "finish"
    RECEIVE = "receive"
    SEND = "send"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class Node:
    """One item. work_us: on the compute lane.

    lane, time_us, load: of the collective that a START or a SUM starts: its axis, its time when it does not
        share its lane, the share of the compute lane's speed that it takes. For a SEND `time_us` is the
        message's time; for a FINISH whose start is in an earlier window, when its collective ends, counted
        from the window's begin.
    start: for a FINISH, the node that starts what it waits for; -1 when an earlier window does.
    lazy: costs nothing and allocates nothing (waits, views), so it may come directly before its first user.
    """

    item: Item
    role: Role
    work_us: float = 0.0
    lane: str = ""
    time_us: float = 0.0
    load: float = 0.0
    start: int = -1
    lazy: bool = False


@dataclass(frozen=True, slots=True)
class WindowGraph:
    """A window's nodes in the captured order (its parts one after the other), and what must precede what.

    before[n], after[n]: the nodes that n needs, and those that need n; both ascending. A legal order names
    every node once, each after all of `before`. skew: `Costs.skew`.
    """

    window: Window
    nodes: tuple[Node, ...] = field(repr=False)
    before: tuple[tuple[int, ...], ...] = field(repr=False)
    after: tuple[tuple[int, ...], ...] = field(repr=False)
    storages: tuple[WindowStorage, ...] = field(repr=False)
    skew: float = 0.0

    def key(self) -> tuple[object, ...]:
        """Equal for windows that differ in names alone: the same order serves them."""
        nodes = tuple(
            (n.item.part, n.role.value, n.work_us, n.lane, n.time_us, n.load, n.start, n.lazy)
            for n in self.nodes
        )
        storages = tuple((s.nbytes, s.maker, s.users, s.kept) for s in self.storages)
        return nodes, self.before, storages, self.skew

    @property
    def work_us(self) -> float:
        """All work on the compute lane."""
        return sum(node.work_us for node in self.nodes)

    @property
    def communicates(self) -> bool:
        """Whether any collective is started or waited for: without one there is nothing to order for."""
        return any(node.role in (Role.START, Role.FINISH) for node in self.nodes)


def make_graph(
    job: Job,
    costs: Costs,
    window: Window,
    stage_ranks: Sequence[int],
    microbatches: Sequence[int] = (),
    frees: Sequence[tuple[int, int]] = (),
) -> WindowGraph:
    """The graph of a window, of which nothing is known on other ranks. microbatches: of its parts, where it
    runs once; without them messages that stay on the rank are taken to be for the same. frees: (part of a
    backward, part of a later forward that begins when it is done).

    Raises PlanError for a collective without a cost.
    """
    return _GraphMaker(job, costs, window, stage_ranks, microbatches, frees).make()


class _GraphMaker:
    def __init__(
        self,
        job: Job,
        costs: Costs,
        window: Window,
        stage_ranks: Sequence[int],
        microbatches: Sequence[int],
        frees: Sequence[tuple[int, int]],
    ) -> None:
        self.frees = frees
        self.microbatches = microbatches or (0,) * len(window.parts)
        self.job = job
        self.costs = costs
        self.window = window
        self.stage_ranks = stage_ranks
        stages = {stage for stage, _ in window.parts}
        self.ops: list[dict[str, Op]] = [
            {name: op for name, (op, _) in ops_of_stage(job.stages[stage], phase).items()}
            for stage, phase in window.parts
        ]
        self.bytes_in = {
            (edge.target, edge.value): edge.spec.nbytes for edge in job.edges if edge.target in stages
        }
        # By part: those before it of its stage and microbatch, the last first.
        self.earlier = [
            [k for k in reversed(window.mates(part)) if k < part] for part in range(len(window.parts))
        ]
        self.made: dict[tuple[int, str], int] = {}
        """(part, value) -> the node that makes it."""

    def make(self) -> WindowGraph:
        nodes: list[Node] = []
        needs: list[set[int]] = []
        sent: dict[tuple[int, int], int] = {}
        last_add: dict[int, int] = {}
        adds = self._adds()
        adding = adding_items(self.job, self.window)
        for at, item in enumerate(self.window.items):
            need: set[int] = set()
            if item.kind is ItemKind.OP:
                op = self.ops[item.part][str(item.ref)]
                # 2. What it reads.
                need |= {made for u in op.uses if (made := self._maker(item.part, u)) >= 0}
                # 3. One order of additions, and all before their sum.
                need |= {added for group in op.sums for added in adding.get(group, ())}
                for parameter in adds.get((item.part, op.name), ()):
                    if parameter in last_add:
                        need.add(last_add[parameter])
                    last_add[parameter] = at
                self.made[item.part, op.name] = at
                nodes.append(self._op(item, op))
            else:
                edge = self.job.edges[int(item.ref)]
                message = edge.index, self.microbatches[item.part]
                if item.kind is ItemKind.SEND:
                    if (item.part, edge.value) in self.made:
                        need.add(self.made[item.part, edge.value])
                    sent[message] = at
                    ends = self.stage_ranks[edge.source], self.stage_ranks[edge.target]
                    us = message_us(self.costs.link(*ends), edge.spec.nbytes) if ends[0] != ends[1] else 0.0
                    nodes.append(Node(item, Role.SEND, time_us=us))
                else:
                    if message in sent:
                        need.add(sent[message])  # from a part of the same rank
                    self.made[item.part, edge.value] = at
                    nodes.append(Node(item, Role.RECEIVE, lazy=True))
            needs.append(need)
        self._forward_first(needs)
        if self.frees:
            self._freed(nodes, needs)
        after: list[list[int]] = [[] for _ in nodes]
        for at, need in enumerate(needs):
            for other in sorted(need):
                after[other].append(at)
        return WindowGraph(
            self.window,
            tuple(nodes),
            tuple(tuple(sorted(need)) for need in needs),
            tuple(map(tuple, after)),
            find_storages(self.job, self.window, self.ops, self.bytes_in, self.made),
            self.costs.skew,
        )

    def _forward_first(self, needs: list[set[int]]) -> None:
        """Step 2: what F ends with comes before what the backward of its microbatch begins with."""
        parts = self.window.parts
        ops: dict[int, list[int]] = {}
        for at, item in enumerate(self.window.items if self.window.shares else ()):
            if item.kind is ItemKind.OP:
                ops.setdefault(item.part, []).append(at)
        for part, own in ops.items():
            for mate in self.earlier[part]:
                if parts[mate][1] is Phase.F is not parts[part][1]:
                    of_forward = ops.get(mate, [])
                    read = {n for at in of_forward for n in needs[at]}
                    ends = {at for at in of_forward if at not in read}
                    for at in own:
                        if needs[at].isdisjoint(own):
                            needs[at] |= ends

    def _freed(self, nodes: Sequence[Node], needs: list[set[int]]) -> None:
        """Step 5."""
        begins: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        leads: set[int] = set()
        for at in reversed(range(len(nodes))):
            part = nodes[at].item.part
            own = [n for n in needs[at] if nodes[n].item.part == part]
            ops = (nodes[n].item.kind is ItemKind.OP for n in own)
            if nodes[at].item.kind is ItemKind.OP and not any(ops):
                begins.setdefault(part, []).append(at)
            # What only starts, waits and sends follow is the last that reads what F has saved.
            if at in leads or nodes[at].role is Role.COMPUTE:
                if at not in leads:
                    ends.setdefault(part, []).append(at)
                leads.update(own)
        for backward, forward in self.frees:
            # A stage may be empty, and its forwards begin with no op.
            for at in begins.get(forward, ()):
                needs[at].update(ends.get(backward, ()))

    def _maker(self, part: int, value: str) -> int:
        """The node that makes a value, in the part or before it; -1 for what an earlier window makes."""
        for earlier in (part, *self.earlier[part]):
            if (earlier, value) in self.made:
                return self.made[earlier, value]
        return -1

    def _op(self, item: Item, op: Op) -> Node:
        """Step 1 for an op."""
        stage, _ = self.window.parts[item.part]
        work_us = time_of(self.costs, stage, op)
        asked = op.collective
        if asked is not None:
            time = axis_time(self.costs, asked.axis, asked.kind, asked.nbytes)
            role = Role.SUM if op.sums else Role.START
            return Node(item, role, work_us, asked.axis, time.us, time.load)
        if op.target == WAIT:
            start = self._maker(item.part, op.uses[0])
            us = 0.0
            begun = self.ops[item.part].get(op.uses[0])
            if start < 0 and begun is not None and begun.collective is not None:
                # It may have started just before the window: its wait comes as late as can be.
                asked = begun.collective
                us = axis_time(self.costs, asked.axis, asked.kind, asked.nbytes).us
            return Node(item, Role.FINISH, work_us, time_us=us, start=start, lazy=True)
        view = op.alias is not None and not work_us
        return Node(item, Role.COMPUTE, work_us, lazy=view)

    def _adds(self) -> dict[tuple[int, str], list[int]]:
        """(part, value) -> the parameters to whose gradients it is added, by index."""
        adds: dict[tuple[int, str], list[int]] = {}
        for index, parameter in enumerate(self.job.parameters):
            for stage, phase, value in parameter.grads:
                for part, (at, runs) in enumerate(self.window.parts):
                    if at == stage and phase in runs.parts:
                        adds.setdefault((part, value), []).append(index)
        return adds
