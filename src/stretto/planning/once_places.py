"""Where what runs once a step starts and is waited for, on every rank (step 5 of `planning.lower`).

Gathers of parameters: all that need no other start in the first run; each is waited for in the run that reads
first what it makes. Reductions that need no other start in the run that completes their gradients, or where
they join pipeline ranks, in a window behind it. What needs another of these starts in a run that has such
ops already, behind the other's or in the last. All else is in a window at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from stretto.ir.action import AFTER, BEFORE, ONCE, Phase, Schedule, Slot
from stretto.ir.plan import LOSS, Communicator, Instruction, InstructionKind, Item, ItemKind, Window
from stretto.ir.program import FREE, GRAD, PARAM, STEP_LOSS, Job, Op
from stretto.schedule.once import around_starts
from stretto.schedule.windows import Guests


@dataclass
class OncePlaces:
    """Where what a rank does once a step starts and is waited for.

    stage: whose programs these are. program: that of reductions. leads: start -> the ops that end with it.
    tails: start -> those that begin with its wait. first: ops of a window before all. before: run -> ops of a
    window of its own before it. guests: run -> ops in it. after: run -> ops of a window of its own that
    follows (-1: before all others). end: of the window at the step's end. windows: those of nothing else that
    were made.
    """

    stage: int
    program: tuple[Op, ...]
    leads: dict[str, list[Op]]
    tails: dict[str, list[Op]]
    first: list[Op] = field(default_factory=list)
    before: dict[int, list[Op]] = field(default_factory=lambda: defaultdict(list))
    guests: dict[int, Guests] = field(default_factory=lambda: defaultdict(Guests))
    after: dict[int, list[Op]] = field(default_factory=lambda: defaultdict(list))
    end: list[Op] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)

    def run(self, ops: Sequence[Op], phase: Phase = AFTER) -> Instruction:
        """A window of these ops only, and its run."""
        number = sum(window.parts == ((self.stage, phase),) for window in self.windows)
        name = f"{self.stage}{phase}" + (f" {number}" if number else "")
        items = tuple(Item(ItemKind.OP, 0, op.name) for op in ops)
        self.windows.append(Window(name, ((self.stage, phase),), items))
        return Instruction(InstructionKind.RUN, name, (ONCE,))


def once_places(
    job: Job, schedule: Schedule, communicators: Sequence[Communicator], overlap: bool
) -> list[OncePlaces]:
    """Step 5, of every rank. The order in which all start what they share is by the latest last run, then as
    in the programs."""
    joins = {one.name for one in communicators if one.joins_pp_ranks}
    adds: dict[str, set[tuple[int, Phase]]] = defaultdict(set)
    adds[STEP_LOSS].add((job.loss[0], Phase.F))
    for parameter in job.parameters:
        adds[GRAD + parameter.name].update((stage, phase) for stage, phase, _ in parameter.grads)
    result: list[OncePlaces] = []
    early: dict[str, dict[int, int]] = defaultdict(dict)
    behind: list[dict[str, set[str]]] = []
    for rank, order in enumerate(schedule.orders):
        stage = min(schedule.stages_of(rank), default=-1)
        programs = job.stages[stage].ops if stage >= 0 else {}
        of_rank = OncePlaces(stage, programs.get(AFTER, ()), *around_starts(programs.get(AFTER, ())))
        result.append(of_rank)
        _gathers(of_rank, job, order, programs.get(BEFORE, ()), overlap)
        # By stage and phase, the last.
        runs = {
            (action.stage, phase): at
            for at, slot in enumerate(order)
            for action in slot.actions
            for phase in action.phase.programs
        }
        changed: dict[str, str] = {}
        behind.append({})
        for start, lead in of_rank.leads.items():
            reads = {name for op in lead for name in op.uses if name in adds}
            tail = of_rank.tails.get(start, ())
            made = [(name, op.target != FREE) for op in tail for name in op.writes if name in adds]
            needed = {changed[name] for name in reads if name in changed}
            # What reduces nothing that is added up comes at the end. So does the norm, behind which gradients
            # are freed: updates in its tail may need other starts than itself.
            if not made or not (needed or any(reduced for _, reduced in made)):
                continue
            behind[rank][start] = needed
            if not needed:
                ends = (runs[added] for name in reads for added in adds[name] if added in runs)
                early[start][rank] = max(ends, default=-1)
            changed.update((name, start) for name, _ in made)
    losses = {op.name for of_rank in result for op in of_rank.program if op.lane == LOSS}
    in_turn = sorted(early, key=lambda name: (name not in losses, max(0, *early[name].values())))
    for rank, of_rank in enumerate(result):
        here = [name for name in in_turn if rank in early[name]]
        lanes = {name: lead[-1].lane for name, lead in of_rank.leads.items()}
        inside: dict[str, int] = {}
        earliest = 0
        for name in here:
            last, lead, tail = max(0, early[name][rank]), of_rank.leads[name], of_rank.tails[name]
            if name in losses:
                if early[name][rank] < 0:
                    # One run before the end, so that the loss travels under that run; but before any sum of
                    # ties, as where the loss is.
                    ties = (max(0, early[n][rank]) for n in here if n != name and lanes[n] in joins)
                    last = min([len(schedule.orders[rank]) - 1, *ties]) - 1
                earliest = max(0, last)
                of_rank.after[last] += lead
            elif lanes[name] in joins:
                # One order on all ranks, so a sum never starts before those that come before it. A rank that
                # has a copy and adds nothing to it could start at once, but for the loss.
                earliest = max(earliest, last)
                of_rank.after[earliest] += lead
            elif overlap:
                inside[name] = last
                of_rank.guests[last].leads.append(lead)
            else:
                of_rank.after[last] += [*lead, *tail]
                continue
            of_rank.end += tail
        others = {n: needs for n, needs in behind[rank].items() if n not in here and lanes[n] not in joins}
        _chained(of_rank, others, inside, len(schedule.orders[rank]) - 1)
        there = {op.name for ops in (of_rank.end, *of_rank.after.values()) for op in ops}
        there |= {op.name for guests in of_rank.guests.values() for op in guests.all_ops}
        of_rank.end = _behind(of_rank.end, [op for op in of_rank.program if op.name not in there])
    return result


def _chained(
    once: OncePlaces, behind: Mapping[str, Collection[str]], inside: dict[str, int], final: int
) -> None:
    """Reductions that need others start in a run after those in which these have started, if there is one, or
    in the final one. behind: start -> those that it needs; inside: start -> its run; grows."""
    hosts = sorted({*inside.values(), final})
    awaited_in: dict[str, int] = {}
    for name, needed in behind.items():
        if not inside.keys() >= set(needed):
            continue
        least = max(max(inside[other] + 1, awaited_in.get(other, 0)) for other in needed)
        inside[name] = next((at for at in hosts if at >= least), final)
        awaited_in.update((other, inside[name]) for other in needed if other not in awaited_in)
        ends = {op.name for op in once.end}
        awaited = [op for other in inside if other in needed for op in once.tails[other] if op.name in ends]
        left = {op.name for op in awaited}
        once.end = [op for op in once.end if op.name not in left] + once.tails[name]
        once.guests[inside[name]].ends.append([*awaited, *once.leads[name]])


def _behind(end: Sequence[Op], rest: Sequence[Op]) -> list[Op]:
    """What comes at the end, and the rest: each op directly behind what it needs, so that the lane works
    before it waits for others; starts, which have one order on all ranks, and what needs them, behind all."""
    places = dict[str, int]()
    for at, op in enumerate(end):
        places.update(dict.fromkeys((op.name, *op.uses, *op.writes), at))
    keyed = [(at, op) for at, op in enumerate(end)]
    for op in rest:
        at = max((places[name] for name in (*op.uses, *op.writes) if name in places), default=0)
        at = len(end) if op.kind is not None else at
        places.update(dict.fromkeys((op.name, *op.uses, *op.writes), at))
        keyed.append((at, op))
    return [op for _, op in sorted(keyed, key=lambda one: one[0])]


def _gathers(once: OncePlaces, job: Job, order: Sequence[Slot], program: Sequence[Op], overlap: bool) -> None:
    """What runs before all others. Starts go first, and are waited for in the run that reads them first. What
    leads to none runs before that run, where a rank that waits for a message has the time."""
    leads, tails = around_starts(program)
    first: dict[str, int] = {}
    for at, slot in reversed([*enumerate(order)]):
        for action in slot.actions:
            ops = (op for phase in action.phase.programs for op in job.stages[action.stage].ops[phase])
            first.update((name, at) for op in ops for name in op.uses if name.startswith(PARAM))
    readers = {
        start: min((first[n] for op in tails.get(start, ()) for n in op.writes if n in first), default=None)
        for start in leads
    }
    needed: dict[str, int] = defaultdict(lambda: len(order), first)
    begin = min(first.values(), default=0)
    for op in reversed(leads.pop("", [])):
        at = min(needed[name] for name in (op.name, *op.writes))
        needed.update((name, min(at, needed[name])) for name in op.uses)
        (once.before[at] if begin < at < len(order) else once.first).insert(0, op)
    hosts = sorted({0, *(at for at in readers.values() if at is not None)})
    for start, lead in leads.items():
        reader = readers[start]
        if not overlap or reader is None:
            once.first += [*lead, *tails.get(start, ())]
            continue
        once.guests[0].begins.append(lead)
        # A start that needs another is in a run before the reader's, if there is one.
        place = hosts.index(reader) - sum(op.kind is not None for op in tails[start])
        pieces: dict[int, list[Op]] = defaultdict(list)
        for op in tails[start]:
            pieces[hosts[max(0, place)]].append(op)
            place += op.kind is not None
        for at, piece in pieces.items():
            once.guests[at].tails.append(piece)
