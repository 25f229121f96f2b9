"""Proves an order of actions: complete, each action where it belongs, dependencies before dependents.

Knows actions only. The dependencies between stages are those of a chain: F needs F of the stage before; I
and B need the own F, and I or B of the stage after; W needs the own I. Overlapped actions count as one after
the other, in the order in which they are written: what their ops really wait for is proved on the lowered
plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice

from stretto.errors import SHOWN, listed
from stretto.ir.action import Action, Phase, Schedule
from stretto.verifying.fault import Fault

Position = tuple[int, int]
"""(rank, index among the rank's actions)."""


def schedule_faults(schedule: Schedule) -> list[Fault]:
    """Every fault of the schedule; an empty list proves that it runs to its end on a chain."""
    result = action_faults(schedule)
    return result + _deadlocks(schedule) if _shape_fault(schedule) is None else result


def action_faults(schedule: Schedule, *, trains: bool = True) -> list[Fault]:
    """The faults that can be seen without the dependencies between stages.

    trains: whether every forward needs a backward; False for a job that has no backward at all.
    """
    shape = _shape_fault(schedule)
    if shape is not None:
        return [shape]
    result: list[Fault] = []
    places: dict[Action, Position] = {}
    for rank in range(schedule.ranks):
        for at, action in enumerate(schedule.actions(rank)):
            wrong = _misplaced(schedule, rank, action)
            if wrong is None and action in places:
                what = f"runs twice, at positions {places[action][1]} and {at}"
                wrong = what, "Remove one of them"
            if wrong is None:
                places[action] = (rank, at)
            else:
                result.append(Fault(rank, str(action), *wrong))
    result += _incomplete(schedule, places, trains)
    result += _wrong_order(places)
    return result


def _shape_fault(schedule: Schedule) -> Fault | None:
    if schedule.stages < 1 or schedule.microbatches < 1:
        what = f"{schedule.stages} stages and {schedule.microbatches} microbatches"
        return Fault(None, "schedule", what, "A schedule needs at least one of each")
    if len(schedule.stage_ranks) != schedule.stages:
        what = f"{schedule.stages} stages, but ranks for {len(schedule.stage_ranks)}"
        return Fault(None, "schedule", what, "Give every stage one rank")
    for stage, rank in enumerate(schedule.stage_ranks):
        if not 0 <= rank < schedule.ranks:
            what = f"placed on rank {rank}, but there are {schedule.ranks} ranks"
            return Fault(None, f"stage {stage}", what, f"Ranks count from 0 to {schedule.ranks - 1}")
    return None


def _misplaced(schedule: Schedule, rank: int, action: Action) -> tuple[str, str] | None:
    """What is wrong with an action by itself, and what to do."""
    stage, microbatch = action.stage, action.microbatch
    if not 0 <= stage < schedule.stages:
        return f"there is no stage {stage}", f"Stages count from 0 to {schedule.stages - 1}"
    if not 0 <= microbatch < schedule.microbatches:
        fix = f"Microbatches count from 0 to {schedule.microbatches - 1}"
        return f"there is no microbatch {microbatch}", fix
    owner = schedule.stage_ranks[stage]
    return None if owner == rank else (f"stage {stage} is on rank {owner}", f"Move it to rank {owner}")


def _incomplete(schedule: Schedule, places: dict[Action, Position], trains: bool) -> Iterator[Fault]:
    """Every stage needs F and, if it trains, either B or both I and W, for every microbatch."""
    have: dict[tuple[int, Phase], set[int]] = defaultdict(set)
    for action in places:
        have[action.stage, action.phase].add(action.microbatch)
    for stage, rank in enumerate(schedule.stage_ranks):
        forward, both, into, weight = (have[stage, phase] for phase in (Phase.F, Phase.B, Phase.I, Phase.W))
        either = f"{stage}B, or {stage}I and {stage}W,"
        for what, token, there, cure in (
            ("forward", "F", forward, f"{stage}F"),
            ("backward", "B", both | into | weight, either),
        ):
            # there may be any number of microbatches, and only a few are named
            few = islice((m for m in range(schedule.microbatches) if m not in there), SHOWN + 1)
            absent = list(few) if trains or what == "forward" else []
            if absent:
                lacks = f"missing: no {what} of microbatches {listed(absent)}"
                yield Fault(rank, f"{stage}{token}{absent[0]}", lacks, f"Add {cure} for each")
        for m in sorted(both & (into | weight)):
            other = "I" if m in into else "W"
            what = f"runs as well as {stage}{other}{m}, and would count a gradient twice"
            yield Fault(rank, f"{stage}B{m}", what, "Keep B, or keep I and W")
        for has, lacks, where, those in (
            ("I", "W", "after", into - weight),
            ("W", "I", "before", weight - into),
        ):
            for m in sorted(those - both):
                fix = f"Add {stage}{lacks}{m} {where} it, or use {stage}B{m}"
                yield Fault(rank, f"{stage}{has}{m}", f"{stage}{lacks}{m} is missing", fix)


def _wrong_order(places: dict[Action, Position]) -> Iterator[Fault]:
    """Dependencies inside a stage: F before I, W and B; I before W."""
    for action, (rank, at) in places.items():
        for phase, what in (
            (Phase.F, "backward before forward"),
            (Phase.I, "weight gradient before input gradient"),
        ):
            before = Action(action.stage, phase, action.microbatch)
            position = places.get(before, (rank, -1))[1]
            needs = action.phase is Phase.W or (action.phase is not Phase.F and phase is Phase.F)
            if needs and position > at:
                comes = f"{before} comes later at position {position}"
                what = f"{what} of microbatch {action.microbatch} ({comes})"
                yield Fault(rank, str(action), what, f"Put {before} before it")


def _needs(schedule: Schedule, action: Action, places: dict[Action, Position]) -> list[Action]:
    """What the action needs of other stages, as far as the schedule has it."""
    stage, m = action.stage, action.microbatch
    if action.phase is Phase.F:
        candidates = [Action(stage - 1, Phase.F, m)]
    elif action.phase is Phase.W:
        candidates = []
    else:
        candidates = [Action(stage + 1, Phase.I, m), Action(stage + 1, Phase.B, m)]
    return [candidate for candidate in candidates if candidate in places]


def walk(heads: list[int], step: Callable[[int], bool]) -> None:
    """Let ranks go on until none can. heads: how far each has come; step: the next of a rank, which is at its
    end or must wait where that gives False."""
    moved = True
    while moved:
        moved = False
        for rank in range(len(heads)):
            while step(rank):
                heads[rank] += 1
                moved = True


def _deadlocks(schedule: Schedule) -> list[Fault]:
    """Walk all ranks at once; a fault for each that does not reach its end."""
    orders = [list(dict.fromkeys(schedule.actions(rank))) for rank in range(schedule.ranks)]
    places = {action: (rank, at) for rank, order in enumerate(orders) for at, action in enumerate(order)}
    heads = [0] * len(orders)

    def blocker(rank: int) -> Action | None:
        """The first thing that the rank's next action needs and that has not run."""
        needs = _needs(schedule, orders[rank][heads[rank]], places)
        return next((need for need in needs if places[need][1] >= heads[places[need][0]]), None)

    walk(heads, lambda rank: heads[rank] < len(orders[rank]) and blocker(rank) is None)
    result: list[Fault] = []
    for rank, order in enumerate(orders):
        if heads[rank] < len(order):
            need = blocker(rank)
            assert need is not None
            other, _ = places[need]
            what = f"deadlock: waits for {need}, which rank {other} runs after {orders[other][heads[other]]}"
            result.append(
                Fault(rank, str(order[heads[rank]]), what, "Move one of the awaited actions forward")
            )
    return result
