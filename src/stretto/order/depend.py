"""The graph of a window that policies order: what an order must respect, and what each item costs.

1. A node for each item of the window: an op for its time on the compute lane; a collective's start also
   for its time on the lane of its axis; a wait for a collective; a message's wait and its send. What a
   window starts may be waited for later, as gradient reductions are (`leaving`).
2. An edge from what makes a value to what reads it, a wait included: it reads what its start gives. A
   value may be of an earlier part of the same stage and microbatch. Where that is F, all of it comes
   before the backward's first op: lower bounds count on actions of a microbatch in this order.
3. Edges from what changes a thing that lives over the step to what reads or changes it next, and from what
   reads it to what changes it next, as captured: two ops that add to one parameter's gradient (sums of floats
   depend on their order, and an order of ops must not change numbers), and what reads it for its reduction.
   Nothing else is written in place before the window's end, and draws of random ops do not depend on when
   they happen.
4. The memory that nodes make and read, so that a policy can keep a limit. A value is in the memory of what
   it is a view of (`ir.storage`); a wait's result is in its start's, and what is gathered or scattered is
   read until the wait. What one part makes and another of its stage and microbatch reads is one memory. What
   a later window reads, or what leaves, is kept when the window ends.
5. For a backward and a forward that may not begin before it is done with what its own forward saved
   (`frees`), an edge from what the one ends with to what the other begins with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from stretto.ir.action import ONCE_PHASES, Phase
from stretto.ir.costs import Costs
from stretto.ir.flow import PHASES, is_external, ops_of_stage
from stretto.ir.plan import Item, ItemKind, Window
from stretto.ir.program import PARAM, SHARD, WAIT, Job, Op
from stretto.ir.storage import in_flight, maker_of, makes, owner, reads
from stretto.ir.transfers import axis_time, message_us, time_of
from stretto.schedule.windows import adding_items


class Role(StrEnum):
    """What a node is for the scheduler."""

    COMPUTE = "compute"
    START = "start"
    FINISH = "finish"
    RECEIVE = "receive"
    SEND = "send"


@dataclass(frozen=True, slots=True)
class Node:
    """One item. work_us: on the compute lane.

    lane, time_us, load: of the collective that a START starts: its axis, its time when it does not
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
class WindowStorage:
    """Memory that a node allocates (`maker`; -1: it was there before). users: nodes that read it; when the
    last of them is done it is free, unless it is `kept` for later windows."""

    nbytes: int
    maker: int
    users: tuple[int, ...]
    kept: bool


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
    def leaving(self) -> frozenset[int]:
        """The starts that nothing in the window waits for: the window ends, and they are under way."""
        starts = (index for index, node in enumerate(self.nodes) if node.role is Role.START)
        return frozenset(starts).difference(node.start for node in self.nodes)

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
    return _GraphMaker(job, costs, window, stage_ranks).make(microbatches or (0,) * len(window.parts), frees)


class _GraphMaker:
    """The arguments of `make_graph`, and what is known of the window's parts."""

    def __init__(self, job: Job, costs: Costs, window: Window, stage_ranks: Sequence[int]) -> None:
        self.job = job
        self.costs = costs
        self.window = window
        self.stage_ranks = stage_ranks
        self.ops: list[dict[str, Op]] = [
            {name: op for name, (op, _) in ops_of_stage(job.stages[stage], phase).items()}
            for stage, phase in window.parts
        ]
        # By part: those before it of its stage and microbatch, the last first.
        self.earlier = [
            [k for k in reversed(window.mates(part)) if k < part] for part in range(len(window.parts))
        ]
        self.made: dict[tuple[int, str], int] = {}
        """(part, value) -> the node that makes it."""

    def make(self, microbatches: Sequence[int], frees: Sequence[tuple[int, int]]) -> WindowGraph:
        nodes: list[Node] = []
        needs: list[set[int]] = []
        sent: dict[tuple[int, int], int] = {}
        before = self._in_turn()
        for at, item in enumerate(self.window.items):
            need: set[int] = set()
            if item.kind is ItemKind.OP:
                op = self.ops[item.part][str(item.ref)]
                need |= {made for u in op.uses if (made := self._maker(item.part, u)) >= 0} | before[at]
                self.made[item.part, op.name] = at
                nodes.append(self._op(item, op))
            else:
                edge = self.job.edges[int(item.ref)]
                message = edge.index, microbatches[item.part]
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
        if frees:
            _add_freed(nodes, needs, frees)
        after: list[list[int]] = [[] for _ in nodes]
        for at, need in enumerate(needs):
            for other in sorted(need):
                after[other].append(at)
        return WindowGraph(
            self.window,
            tuple(nodes),
            tuple(tuple(sorted(need)) for need in needs),
            tuple(map(tuple, after)),
            self._storages(),
            self.costs.skew,
        )

    def _in_turn(self) -> dict[int, set[int]]:
        """Step 3: node -> those that come before it because of what they read and change."""
        changes: dict[int, list[str]] = defaultdict(list)
        for name, items in adding_items(self.job, self.window).items():
            for at in items:
                changes[at].append(name)
        ops = [self.ops[i.part][str(i.ref)] if i.kind is ItemKind.OP else None for i in self.window.items]
        for at, op in enumerate(ops):
            if op is not None and op.writes:
                changes[at] += op.writes
        changed = {name for names in changes.values() for name in names}
        needs: dict[int, set[int]] = defaultdict(set)
        last: dict[str, int] = {}
        readers: dict[str, set[int]] = defaultdict(set)
        for at, op in enumerate(ops):
            for name in changed.intersection(self._read(at, op)) if op is not None else ():
                readers[name].add(at)
                needs[at].update([last[name]] if name in last else [])
            for name in changes.get(at, ()):
                needs[at].update(readers.pop(name, ()), [last[name]] if name in last else [])
                last[name] = at
            needs[at].discard(at)
        return needs

    def _read(self, at: int, op: Op) -> Iterator[str]:
        """What an item's op reads; in place of a view of a parameter, the parameter."""
        known = self.ops[self.window.items[at].part]
        for name in op.uses:
            root = known[name].alias if name in known else None
            yield root if root is not None and root.startswith((PARAM, SHARD)) else name

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
            return Node(item, Role.START, work_us, asked.axis, time.us, time.load)
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

    def _storages(self) -> tuple[WindowStorage, ...]:
        """Step 4: all memory that the window's items touch."""
        bytes_in = {(edge.target, edge.value): edge.spec.nbytes for edge in self.job.edges}
        users: dict[tuple[int, str], list[int]] = {}
        for at, item in enumerate(self.window.items):
            if item.kind is not ItemKind.OP:
                names: tuple[str, ...] = (self.job.edges[int(item.ref)].value,)
            else:
                op = self.ops[item.part][str(item.ref)]
                names = (*(name for name, _ in makes(op)), *reads(op))
                if op.target == WAIT:
                    start = self.ops[item.part].get(op.uses[0])
                    names = (*names, *(in_flight(start) if start is not None else ()))
            for name in names:
                key = self._root(item.part, name)
                if not is_external(key[1]):
                    users.setdefault(key, []).append(at)
        kept = self._kept()
        storages: list[WindowStorage] = []
        for (part, root), readers in users.items():
            stage, _ = self.window.parts[part]
            made_by = maker_of(root)
            op_of = self.ops[part].get(made_by)
            nbytes = dict(makes(op_of)).get(root, 0) if op_of is not None else bytes_in.get((stage, root), 0)
            if nbytes:
                # What arrives was allocated when its receive was posted.
                maker = self.made.get((part, made_by), -1) if op_of is not None else -1
                storages.append(
                    WindowStorage(nbytes, maker, tuple(dict.fromkeys(readers)), (part, root) in kept)
                )
        return tuple(storages)

    def _root(self, part: int, name: str) -> tuple[int, str]:
        """Step 4: (part, value) in whose memory a part's value lies; the first part that has it."""
        if is_external(name):
            return part, name
        op = self.ops[part].get(name)
        while op is not None and owner(op) != op.name:
            name = owner(op)
            op = self.ops[part].get(name)
        made_by = maker_of(name)
        if (part, made_by) in self.made:
            return part, name
        mates = self.window.mates(part)
        makers = [k for k in mates if k < part and (k, made_by) in self.made]
        # What an earlier window has left is one memory for all that read it.
        return (makers[-1] if makers else min((part, *mates))), name

    def _kept(self) -> set[tuple[int, str]]:
        """What is kept when the window ends."""
        kept: set[tuple[int, str]] = set()
        here_too = {item.ref for item in self.window.items}
        for part, (stage, phase) in enumerate(self.window.parts):
            if phase in ONCE_PHASES:
                others = (op for op in self.job.stages[stage].ops[phase] if op.name not in here_too)
                kept.update(self._root(part, name) for op in others for name in reads(op))
                continue
            here = {sub for k in (part, *self.window.mates(part)) for sub in self.window.parts[k][1].programs}
            for sub in PHASES[PHASES.index(phase.programs[-1]) + 1 :]:
                if sub not in here:
                    kept.update(
                        self._root(part, name) for op in self.job.stages[stage].ops[sub] for name in reads(op)
                    )
            leaves = (e.value for e in self.job.edges if e.source == stage and e.phase in phase.programs)
            kept.update(self._root(part, value) for value in leaves)
        return kept


def _add_freed(nodes: Sequence[Node], needs: list[set[int]], frees: Sequence[tuple[int, int]]) -> None:
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
    for backward, forward in frees:
        # A stage may be empty, and its forwards begin with no op.
        for at in begins.get(forward, ()):
            needs[at].update(ends.get(backward, ()))
