"""Proves each window once, for any microbatch: its ops complete, every read after what it reads, every
message waited for before its first use and sent after it is made. Then, on the orders, that what a run
reads is there: left by an earlier phase, and not freed since.

A value that an op reads has one of five origins: it is given from outside the step; an op of the same part
makes it; an edge that arrives in one of the part's phases brings it; another part of the window, of the same
stage and microbatch, does either; or an earlier phase of the stage has left it. A value that a stage keeps
is freed after the run of the last phase that reads it. What runs once a step is proved in
`stretto.verifying.over_step`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES, inputs_of, is_external
from stretto.ir.plan import InstructionKind, Item, ItemKind, Plan, Window
from stretto.ir.program import Job
from stretto.verifying.fault import Fault


def window_faults(plan: Plan) -> list[Fault]:
    """Every fault inside the plan's windows. References must be sound."""
    result: list[Fault] = []
    for window in plan.windows.values():
        result += _buffer_faults(plan, window)
        for part in window.actions:
            result += _part_faults(plan, window, part)
    return result


def _buffer_faults(plan: Plan, window: Window) -> Iterator[Fault]:
    """A buffer is updated after the window that computes its new value: two microbatches in one window would
    both begin with the old one, and one update would be lost."""
    for buffer in plan.job.buffers:
        for stage, phase, _ in buffer.updates:
            parts = [
                k for k, (where, made) in enumerate(window.parts) if where == stage and phase in made.programs
            ]
            if len(parts) > 1:
                what = (
                    f"parts {', '.join(map(str, parts))} all update buffer {buffer.name!r} of stage {stage}"
                )
                where = f"window {window.name}"
                yield Fault(plan.rank_of(stage), where, what, "Give each a window of its own")


def earlier_values(job: Job, stage: int, phase: Phase) -> dict[str, Phase]:
    """Values that the stage may have when `phase` (F, I or W) begins: name -> the phase that brought it."""
    result: dict[str, Phase] = {}
    for before in PHASES[: PHASES.index(phase)]:
        for op in job.stages[stage].ops[before]:
            result.setdefault(op.name, before)
        for edge in job.edges:
            if edge.target == stage and edge.user_phase is before:
                result.setdefault(edge.value, before)
    return result


def _part_faults(plan: Plan, window: Window, part: int) -> Iterator[Fault]:
    job = plan.job
    stage, phase = window.parts[part]
    rank = plan.rank_of(stage)
    where = f"window {window.name}"

    def fault(item: Item | str, what: str, fix: str) -> Fault:
        return Fault(rank, f"{where}, {item}", what, fix)

    # 1. Where everything is; the first place counts, a second is a fault.
    ops = {op.name: op for sub in phase.programs for op in job.stages[stage].ops[sub]}
    arriving = {
        edge.index: edge.value
        for edge in job.edges
        if edge.target == stage and edge.user_phase in phase.programs
    }
    leaving = {
        edge.index: edge.value for edge in job.edges if edge.source == stage and edge.phase in phase.programs
    }
    at: dict[ItemKind, dict[str | int, int]] = {kind: {} for kind in ItemKind}
    for position, item in enumerate(window.items):
        if item.part != part:
            continue
        first = at[item.kind].setdefault(item.ref, position)
        if first != position:
            yield fault(item, f"is there twice, at items {first} and {position}", "Remove one of them")
        elif item.kind is ItemKind.WAIT and item.ref not in arriving:
            yield fault(item, f"the edge brings nothing to stage {stage} in phase {phase}", "Remove it")
        elif item.kind is ItemKind.SEND and item.ref not in leaving:
            yield fault(item, f"the edge takes nothing from stage {stage} in phase {phase}", "Remove it")

    # 2. Complete.
    for needed in ops:
        if needed not in at[ItemKind.OP]:
            yield fault(needed, f"the op is missing, and {stage}{phase} needs it", "Add it")
    for edge, value in leaving.items():
        if edge not in at[ItemKind.SEND]:
            yield fault(f"send e{edge}", f"missing: {value} never leaves", f"Add it after {value}")
        elif at[ItemKind.SEND][edge] < at[ItemKind.OP].get(value, -1):
            yield fault(f"send e{edge}", f"is before {value} is made", f"Move it after {value}")

    # 3. F before the backward of its microbatch, as where each is a window of its own.
    forwards = set() if phase is Phase.F else {m for m in window.mates(part) if window.parts[m][1] is Phase.F}
    before = [k for k, i in enumerate(window.items) if i.part in forwards and i.kind is ItemKind.OP]
    last = max(before, default=-1)
    first = min(at[ItemKind.OP].values(), default=last)
    if first < last:
        what = f"is before {window.items[last]} of {stage}F of the same microbatch, item {last}"
        yield fault(window.items[first], what, "Move it behind all of that forward")

    # 4. Every read after what it reads.
    earlier = earlier_values(job, stage, phase.programs[0])
    comes: dict[str, int] = {}
    for position, item in enumerate(window.items):
        if item.kind is not ItemKind.SEND and item.part in (part, *window.mates(part)):
            value = str(item.ref) if item.kind is ItemKind.OP else job.edges[int(item.ref)].value
            if item.part == part or value in earlier:
                comes.setdefault(value, position)
    for name, position in at[ItemKind.OP].items():
        for value in ops[str(name)].uses:
            if (made := comes.get(value, -1)) > position:
                what = f"reads {value}, which is made later, at item {made}"
                yield fault(str(name), what, f"Move it after item {made}")
            elif value in arriving.values() and value not in comes:
                what = f"reads {value}, which an edge brings, but the window never waits for it"
                yield fault(str(name), what, "Add the edge's wait before it")
            elif not (is_external(value) or value in comes or value in ops or value in earlier):
                what = f"reads {value}, which no op before it makes and no edge brings to stage {stage}"
                yield fault(str(name), what, "Add an edge from the stage that makes it")


def lifetime_faults(plan: Plan) -> list[Fault]:
    """Reads of values that are not there yet or no longer. References must be sound."""
    reads = {(s.index, phase): _kept_reads(plan, s.index, phase) for s in plan.job.stages for phase in PHASES}
    result: list[Fault] = []
    for rank in range(plan.ranks):
        result += _kept(plan, rank, reads)
    return result


def _kept_reads(plan: Plan, stage: int, phase: Phase) -> list[tuple[str, Phase, Phase]]:
    """(value, phase that brings it, phase after which it is freed) for what the program reads of earlier
    phases; one value for each pair of phases, which is enough to prove or refuse a run."""
    result: dict[tuple[Phase, Phase], str] = {}
    program = plan.job.stages[stage]
    origin = earlier_values(plan.job, stage, phase)
    readers = {sub: {name for op in program.ops[sub] for name in op.uses} for sub in PHASES}
    for name in inputs_of(program, phase):
        if not is_external(name) and name in origin:
            last = max((sub for sub in PHASES if name in readers[sub]), key=PHASES.index)
            result.setdefault((origin[name], last), name)
    return [(name, made, last) for (made, last), name in result.items()]


def _kept(
    plan: Plan, rank: int, reads: dict[tuple[int, Phase], list[tuple[str, Phase, Phase]]]
) -> Iterator[Fault]:
    done: dict[tuple[int, int], set[Phase]] = defaultdict(set)
    for instruction in plan.orders[rank]:
        if instruction.kind is not InstructionKind.RUN:
            continue
        window = plan.windows[str(instruction.ref)]
        if (bound := window.bound(instruction.microbatches)) != window.shares:
            given, ordered = (list(shares) or "all apart" for shares in (bound, window.shares))
            what = f"binds parts to microbatches as {given}, but the window's order is for {ordered}"
            yield Fault(rank, str(instruction), what, "Order a window for these microbatches")
            return
        for (stage, phase), m in zip(window.parts, instruction.microbatches, strict=True):
            before = done[stage, m]
            for sub in phase.programs:
                for value, made, last in reads.get((stage, sub), ()):
                    if made not in before:
                        first = f"{stage}{made}{m}"
                        what = f"reads {value} of microbatch {m}, which {first} has not made yet"
                        yield Fault(rank, str(instruction), what, f"Run {first} before it")
                    elif last in before:
                        end = f"{stage}{last}{m}"
                        what = f"reads {value} of microbatch {m}, which is freed: {end}, its last reader, has"
                        yield Fault(
                            rank, str(instruction), f"{what} run", f"Run it once, and before {end} ends"
                        )
                before.add(sub)
