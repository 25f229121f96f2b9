"""Proves what runs once a step: that it reads what it is to read, whatever the order, and that ranks start
what joins them in one order. What comes of it is proved in `stretto.verifying.reduced`.

1. Every op of these programs runs once, on the rank whose program it is in.
2. What lives over the step has a history: what was added, and which ops have written it. By itself one
   program runs before all actions and the other behind them, and each op reads some history, ops of actions
   too. In the plan's order each must read the same one: so no reduction begins before the last addition, and
   nothing is read that is not there yet, or no longer. Memory in which a collective works is left alone until
   its wait.
3. Pipeline ranks start the collectives that join them in one order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from stretto.ir.action import AFTER, BEFORE, ONCE, ONCE_PHASES
from stretto.ir.flow import OVER_STEP, PHASES, made_parameters
from stretto.ir.plan import ItemKind, Plan
from stretto.ir.program import (
    FREE,
    GETITEM,
    GRAD,
    PARAM,
    SHARD,
    STEP_LOSS,
    WAIT,
    Op,
)
from stretto.verifying.fault import Fault
from stretto.verifying.reduced import made_of_faults, norm_faults
from stretto.verifying.trace import EventKind, trace_of


def over_step_faults(plan: Plan) -> list[Fault]:
    """Every fault of what runs once a step, but those along axes. References must be sound."""
    result: list[Fault] = []
    for rank in range(plan.ranks):
        result += _in_place(plan, rank)
        result += _History(plan, rank).faults()
        result += made_of_faults(plan, rank)
    result += norm_faults(plan)
    result += _one_order(plan)
    return result


def _in_place(plan: Plan, rank: int) -> Iterator[Fault]:
    """What runs of these programs name: ops alone, of this rank, once a step."""
    own = min(plan.schedule.stages_of(rank), default=-1)
    for stage in plan.schedule.stages_of(rank):
        if stage != own and any(plan.job.stages[stage].ops.get(phase) for phase in ONCE_PHASES):
            what = f"stage {stage} is not the first of its rank"
            yield Fault(rank, f"what stage {stage} does once a step", what, "Put it into the first stage")
    for instruction in plan.orders[rank]:
        window = plan.windows.get(str(instruction.ref))
        for part_at, (stage, phase) in enumerate(window.parts if window is not None else ()):
            if phase not in ONCE_PHASES or window is None:
                continue
            if plan.rank_of(stage) != rank:
                what = f"runs what rank {plan.rank_of(stage)} does once a step"
                yield Fault(rank, str(instruction), what, "Run its own")
            elif instruction.microbatches[part_at] != ONCE:
                what = "binds what runs once a step to a microbatch"
                yield Fault(rank, str(instruction), what, f"Bind it to {ONCE}")
            elif any(item.part == part_at and item.kind is not ItemKind.OP for item in window.items):
                yield Fault(rank, str(instruction), f"has messages in {phase}", "Move them to an action")


Position = tuple[int, int]
"""(instruction of the rank's order, item of its window)."""


@dataclass(slots=True)
class _Contents:
    """By name, what has happened to it. Of additions only the last counts: ops read what is complete."""

    of: dict[str, int] = field(default_factory=dict)
    freed: set[str] = field(default_factory=set)

    def complete(self, name: str) -> None:
        self.of[name] = hash((name, self.of.get(name), name in self.freed))

    def run(self, op: Op) -> None:
        made = hash((op.name, *(self.of.get(name) for name in op.uses)))
        self.of[op.name] = made
        for name in op.writes:
            self.of[name] = made
            if op.target == FREE:
                del self.of[name]
                self.freed.add(name)


@dataclass(slots=True)
class _Memory:
    """Where values lie, and which collectives are under way there."""

    lies_in: dict[str, str] = field(default_factory=dict)
    under_way: dict[str, Op] = field(default_factory=dict)
    """Memory -> the start."""

    def run(self, op: Op) -> Iterator[tuple[str, str]]:
        """Why the op may not run now."""
        # What lies side by side is apart.
        root = self._root(op.uses[0]) if op.alias is not None and op.target != GETITEM else op.name
        in_place = op.kind is not None and op.alias is not None
        if op.target == WAIT:
            self.under_way = {at: start for at, start in self.under_way.items() if start.name not in op.uses}
        for name in op.uses:
            start = self.under_way.get(self._root(name))
            if start is not None and (in_place or start.alias is not None or name in op.writes):
                yield f"reads {name} while {start.name} is under way in its memory", "Move it after its wait"
        if op.kind is not None:
            self.under_way[self._root(op.uses[0])] = op
        self.lies_in[op.name] = root
        self.lies_in.update((name, root) for name, _ in op.written)

    def _root(self, name: str) -> str:
        return self.lies_in.get(name, name)


class _History:
    """Step 2 of one rank."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.last = _last_adds(plan, rank)
        self.program = plan.once(rank)
        self.expected: dict[str, dict[str, int | None]] = {}
        contents = _Contents()
        self._run(plan.once(rank, BEFORE), contents)
        changed = {name for op in self.program for name in op.writes if name.startswith((PARAM, SHARD))}
        self.lacking = made_parameters(plan.job) - contents.of.keys()
        self.made = {name: contents.of.get(name) for name in made_parameters(plan.job) | changed}
        for name in self.last:
            contents.complete(name)
        self._run(plan.once(rank, AFTER), contents)
        self.ends = contents.of

    def _run(self, program: Sequence[Op], contents: _Contents) -> None:
        for op in program:
            self.expected[op.name] = {name: contents.of.get(name) for name in op.uses}
            contents.run(op)

    def _steps(self) -> list[tuple[Position, str | Op | _Reads]]:
        """In the plan's order: what is complete then, ops, and the first and last reads of parameters."""
        result: list[tuple[Position, str | Op | _Reads]] = [(at, name) for name, at in self.last.items()]
        result += _ends_of_reads(self.plan, self.rank, self.made)
        ops = {op.name: op for op in self.program}
        for at, instruction in enumerate(self.plan.orders[self.rank]):
            window = self.plan.windows.get(str(instruction.ref))
            if window is not None and len(window.actions) < len(window.parts):
                result += [
                    ((at, k), ops[str(item.ref)])
                    for k, item in enumerate(window.items)
                    if item.part not in window.actions and item.ref in ops
                ]
        return sorted(result, key=lambda step: step[0])

    def faults(self) -> Iterator[Fault]:
        contents, memory = _Contents(), _Memory()
        done: set[str] = set()
        sound = True
        for at, op in self._steps():
            if isinstance(op, str):
                contents.complete(op)
                continue
            if isinstance(op, _Reads):
                if op.name in self.lacking or contents.of.get(op.name) != self.made[op.name]:
                    yield self._fault(at, op.op, *self._wrong(op.name, at, done))
                continue
            if op.name in done:
                yield self._fault(at, op.name, "is there a second time", "Keep one")
                sound = False
                continue
            done.add(op.name)
            for name, content in self.expected[op.name].items():
                if contents.of.get(name) != content:
                    yield self._fault(at, op.name, *self._wrong(name, at, done))
                    sound = False
                    if content is not None:
                        contents.of[name] = content
            for wrong in memory.run(op):
                yield self._fault(at, op.name, *wrong)
            contents.run(op)
        for op in self.program:
            if op.name not in done:
                yield Fault(self.rank, op.name, "never runs", "Add it to a window")
                sound = False
        for name in sorted({name for op in self.program for name in op.writes if sound}):
            if contents.of.get(name) != self.ends.get(name):
                what = "is something else at the end than what its program makes of it"
                yield Fault(self.rank, name, what, "Write it in the order of the program")

    def _wrong(self, name: str, at: Position, done: set[str]) -> tuple[str, str]:
        """Why an op reads something else than it should."""
        if not name.startswith((*OVER_STEP, PARAM, SHARD)):
            return f"reads {name}, which is not there yet", f"Move it after {name}"
        last = self.last.get(name, at)
        if last > at:
            does = f"`{self.plan.orders[self.rank][last[0]]}` has added its part of {name}"
            return f"reads {name} before {does}", "Move it after that"
        before = [op.name for op in self.program if name in op.writes]
        late = next((one for one in before if one not in done), None)
        if late is not None:
            return f"reads {name} before {late} has written it", f"Move it after {late}"
        if not before and name.startswith((PARAM, SHARD)):
            return f"reads {name}, which no op makes", "Add one that does"
        return f"reads {name} after {before[-1] if before else 'it'} has changed it", "Move it before that"

    def _fault(self, at: Position, op: str, what: str, fix: str) -> Fault:
        window = self.plan.windows[str(self.plan.orders[self.rank][at[0]].ref)]
        return Fault(self.rank, f"window {window.name}, {op}", what, fix)


@dataclass(frozen=True, slots=True)
class _Reads:
    """An op of an action reads a parameter that is made."""

    op: str
    name: str


def _ends_of_reads(plan: Plan, rank: int, made: Collection[str]) -> Iterator[tuple[Position, _Reads]]:
    """Of each parameter, where the rank reads it first and last, by views of it too."""
    if not made:
        return
    ops = [(s.index, op) for s in plan.job.stages for phase in PHASES for op in s.ops[phase]]
    views = {op.name: op.alias for _, op in ops if op.alias is not None and op.alias in made}
    reads = {
        (stage, op.name): names
        for stage, op in ops
        if (names := dict.fromkeys(n for use in op.uses if (n := views.get(use, use)) in made))
    }
    inside = {
        window.name: [
            (k, str(item.ref), name)
            for k, item in enumerate(window.items)
            if item.kind is ItemKind.OP
            for name in reads.get((window.parts[item.part][0], str(item.ref)), ())
        ]
        for window in plan.windows.values()
    }
    first: dict[str, tuple[Position, _Reads]] = {}
    last: dict[str, tuple[Position, _Reads]] = {}
    for at, run, _ in plan.runs(rank):
        for k, op, name in inside[str(run.ref)]:
            last[name] = (at, k), _Reads(op, name)
            first.setdefault(name, last[name])
    yield from (*first.values(), *last.values())


def _last_adds(plan: Plan, rank: int) -> dict[str, Position]:
    """What lives over the step -> where the rank adds to it last."""
    adds: dict[tuple[int, str | int], list[str]] = defaultdict(list)
    adds[plan.job.loss].append(STEP_LOSS)
    for parameter in plan.job.parameters:
        for stage, _, value in parameter.grads:
            adds[stage, value].append(GRAD + parameter.name)
    inside = {
        window.name: {
            name: at
            for at, item in enumerate(window.items)
            if item.kind is ItemKind.OP
            for name in adds.get((window.parts[item.part][0], item.ref), ())
        }
        for window in plan.windows.values()
    }
    result: dict[str, Position] = {}
    for at, run, _ in plan.runs(rank):
        result.update({name: (at, item) for name, item in inside[str(run.ref)].items()})
    return result


def _one_order(plan: Plan) -> Iterator[Fault]:
    """Ranks start what joins them in one order: sums of ties, and that of the loss."""
    joined = {result.name: result.ranks for result in plan.communicators if result.joins_pp_ranks}
    starts = [_first_starts(plan, rank) for rank in range(plan.ranks)]
    for first in range(plan.ranks):
        for second in range(first + 1, plan.ranks):
            both = starts[first].keys() & starts[second].keys() & joined.keys()
            shared = {lane for lane in both if {first, second} <= {*joined[lane]}}
            here, there = ([lane for lane in starts[rank] if lane in shared] for rank in (first, second))
            if here != there:
                a, b = next((a, b) for a, b in zip(here, there, strict=True) if a != b)
                yield Fault(
                    second,
                    f"window {starts[second][b]}, start on {b}",
                    f"starts before that on {a}, but rank {first}, window {starts[first][a]}, starts {a} "
                    f"first: the order here is {', '.join(there)}, that of rank {first} is "
                    f"{', '.join(here)}",
                    "Start sums of tied gradients, and of the loss, in the same order on all ranks",
                )


def _first_starts(plan: Plan, rank: int) -> dict[str, str]:
    """Communicator -> the window in which the rank starts the first collective of a program that runs once
    a step on it, in this order."""
    result: dict[str, str] = {}
    for event in trace_of(plan, rank):
        if event.kind is EventKind.START and event.op is not None:
            result.setdefault(event.op.lane, str(event.instruction.ref))
    return result
