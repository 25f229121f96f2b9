"""Proves an order of actions: complete, each action where it belongs, dependencies before dependents.

Knows actions only. The dependencies between stages are those of a chain: F needs F of the stage before; I
and B need the own F, and I or B of the stage after; W needs the own I. Overlapped actions count as one after
the other, in the order in which they are written: what their ops really wait for is proved on the lowered
plan. May touch `stretto.ir`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from stretto.ir.action import Action, Phase, Schedule
from stretto.verify.fault import Fault, listed

Position = tuple[int, int]
"""(rank, index among the rank's actions)."""

Blocker = Callable[[int], Action | None]
"""rank -> the action that the rank's next action waits for."""


def schedule_faults(schedule: Schedule) -> list[Fault]:
    """Every fault of the schedule; an empty list proves that it runs to its end on a chain."""
    found = action_faults(schedule)
    return found + _deadlocks(schedule) if _shape_fault(schedule) is None else found


def action_faults(schedule: Schedule, *, trains: bool = True) -> list[Fault]:
    """The faults that can be seen without the dependencies between stages.

    trains: whether every forward needs a backward; False for a job that has no backward at all.
    """
    shape = _shape_fault(schedule)
    if shape is not None:
        return [shape]
    found: list[Fault] = []
    places: dict[Action, Position] = {}
    for rank in range(schedule.ranks):
        for at, action in enumerate(schedule.actions(rank)):
            fault = _misplaced(schedule, rank, action) or _twice(places, rank, at, action)
            if fault is None:
                places[action] = (rank, at)
            else:
                found.append(fault)
    found += _incomplete(schedule, places, trains)
    found += _wrong_order(places)
    return found


def _shape_fault(schedule: Schedule) -> Fault | None:
    if schedule.stages < 1 or schedule.microbatches < 1:
        return Fault(
            None,
            "schedule",
            f"{schedule.stages} stages and {schedule.microbatches} microbatches",
            "A schedule needs at least one of each",
        )
    if len(schedule.stage_ranks) != schedule.stages:
        return Fault(
            None,
            "schedule",
            f"{schedule.stages} stages, but ranks for {len(schedule.stage_ranks)}",
            "Give every stage one rank",
        )
    for stage, rank in enumerate(schedule.stage_ranks):
        if not 0 <= rank < schedule.ranks:
            return Fault(
                None,
                f"stage {stage}",
                f"placed on rank {rank}, but there are {schedule.ranks} ranks",
                f"Ranks count from 0 to {schedule.ranks - 1}",
            )
    return None


def _misplaced(schedule: Schedule, rank: int, action: Action) -> Fault | None:
    if not 0 <= action.stage < schedule.stages:
        return Fault(
            rank,
            str(action),
            f"there is no stage {action.stage}",
            f"Stages count from 0 to {schedule.stages - 1}",
        )
    if not 0 <= action.microbatch < schedule.microbatches:
        return Fault(
            rank,
            str(action),
            f"there is no microbatch {action.microbatch}",
            f"Microbatches count from 0 to {schedule.microbatches - 1}",
        )
    owner = schedule.stage_ranks[action.stage]
    if owner != rank:
        return Fault(
            rank, str(action), f"stage {action.stage} is on rank {owner}", f"Move it to rank {owner}"
        )
    return None


def _twice(places: dict[Action, Position], rank: int, at: int, action: Action) -> Fault | None:
    if action not in places:
        return None
    return Fault(
        rank, str(action), f"runs twice, at positions {places[action][1]} and {at}", "Remove one of them"
    )


def _incomplete(schedule: Schedule, places: dict[Action, Position], trains: bool) -> Iterator[Fault]:
    """Every stage needs F and, if it trains, either B or both I and W, for every microbatch."""
    have: dict[tuple[int, Phase], set[int]] = defaultdict(set)
    for action in places:
        have[action.stage, action.phase].add(action.microbatch)
    for stage, rank in enumerate(schedule.stage_ranks):
        forward, both, into, weight = (have[stage, phase] for phase in (Phase.F, Phase.B, Phase.I, Phase.W))

        def absent(*sets: set[int]) -> Iterator[int]:
            return (m for m in range(schedule.microbatches) if not any(m in held for held in sets))

        for what, sets, token, cure in (
            ("forward", (forward,), f"{stage}F", f"Add {stage}F for each"),
            (
                "backward",
                (both, into, weight),
                f"{stage}B",
                f"Add {stage}B, or {stage}I and {stage}W, for each",
            ),
        ):
            first = next(absent(*sets), None)
            if first is not None and (trains or what == "forward"):
                missing = listed(absent(*sets))
                yield Fault(rank, f"{token}{first}", f"missing: no {what} of microbatches {missing}", cure)
        for m in sorted(both & (into | weight)):
            other = "I" if m in into else "W"
            yield Fault(
                rank,
                f"{stage}B{m}",
                f"runs as well as {stage}{other}{m}, and would count a gradient twice",
                "Keep B, or keep I and W",
            )
        for m in sorted(into - weight - both):
            yield Fault(
                rank,
                f"{stage}I{m}",
                f"{stage}W{m} is missing",
                f"Add {stage}W{m} after it, or use {stage}B{m}",
            )
        for m in sorted(weight - into - both):
            yield Fault(
                rank,
                f"{stage}W{m}",
                f"{stage}I{m} is missing",
                f"Add {stage}I{m} before it, or use {stage}B{m}",
            )


def _wrong_order(places: dict[Action, Position]) -> Iterator[Fault]:
    """Dependencies inside a stage: F before I, W and B; I before W."""
    for action, (rank, at) in places.items():
        if action.phase is Phase.F:
            continue
        needed = [Action(action.stage, Phase.F, action.microbatch)]
        if action.phase is Phase.W:
            needed.append(Action(action.stage, Phase.I, action.microbatch))
        for before in needed:
            position = places.get(before, (rank, -1))[1]
            if position > at:
                what = (
                    "backward before forward"
                    if before.phase is Phase.F
                    else "weight gradient before input gradient"
                )
                yield Fault(
                    rank,
                    str(action),
                    f"{what} of microbatch {action.microbatch} ({before} comes later at position {position})",
                    f"Put {before} before it",
                )


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


def _deadlocks(schedule: Schedule) -> list[Fault]:
    """Walk all ranks at once; where none can go on, follow who waits for whom until it closes a cycle."""
    orders = [list(dict.fromkeys(schedule.actions(rank))) for rank in range(schedule.ranks)]
    places = {action: (rank, at) for rank, order in enumerate(orders) for at, action in enumerate(order)}
    heads = [0] * len(orders)

    def blocker(rank: int) -> Action | None:
        """The first thing that the rank's next action needs and that has not run."""
        action = orders[rank][heads[rank]]
        for need in _needs(schedule, action, places):
            owner, at = places[need]
            if at >= heads[owner]:
                return need
        return None

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while heads[rank] < len(order) and blocker(rank) is None:
                heads[rank] += 1
                moved = True

    found: list[Fault] = []
    explained: set[int] = set()
    for start in range(len(orders)):
        path: list[int] = []
        rank = start
        while heads[rank] < len(orders[rank]) and rank not in explained and rank not in path:
            path.append(rank)
            need = blocker(rank)
            assert need is not None
            rank = places[need][0]
        if rank in path:
            found.append(_cycle(path[path.index(rank) :], orders, heads, blocker))
        explained.update(path)
    return found


def _cycle(ranks: list[int], orders: list[list[Action]], heads: list[int], blocker: Blocker) -> Fault:
    steps = []
    for at, rank in enumerate(ranks):
        need = blocker(rank)
        other = ranks[(at + 1) % len(ranks)]
        head = orders[other][heads[other]]
        steps.append(f"{orders[rank][heads[rank]]} waits for {need}, which rank {other} runs after {head}")
    first = ranks[0]
    action = orders[first][heads[first]]
    return Fault(
        first, str(action), "deadlock: " + "; ".join(steps), "Move one of the awaited actions forward"
    )
