"""Proves what all ranks do together: communicators and their members, the loss, tied gradients.

Every rank creates the communicators in the order of the plan's one list, so creation cannot differ between
ranks; what can be wrong is a name, a member, or a communicator that is used and not there. May touch
`stretto.ir`.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.ir.action import Phase
from stretto.ir.plan import InstructionKind, Plan
from stretto.verify.fault import Fault
from stretto.verify.trace import ends_of

LOSS = "loss"


def collective_faults(plan: Plan) -> list[Fault]:
    """Every fault of communicators, loss and tied gradients. References must be sound."""
    groups = tied_ranks(plan)
    found = list(_communicators(plan, groups))
    found += _loss(plan)
    for rank in range(plan.ranks):
        found += _reductions(plan, rank, groups)
    found += _one_order(plan, groups)
    return found


def tied_ranks(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Tied names whose copies live on more than one rank, with those ranks, ascending."""
    found = {}
    for name, stages in plan.job.tied_groups().items():
        ranks = tuple(sorted({plan.rank_of(stage) for stage in stages}))
        if len(ranks) > 1:
            found[name] = ranks
    return found


def _communicators(plan: Plan, groups: dict[str, tuple[int, ...]]) -> Iterator[Fault]:
    needed: dict[str, tuple[int, ...]] = {}
    for edge in plan.job.edges:
        ends = ends_of(plan, edge.index)
        if ends[0] != ends[1]:
            needed[plan.lane_of(edge.index)] = ends
    if plan.ranks > 1:
        needed[LOSS] = tuple(range(plan.ranks))
    needed |= {f"tied {name}": ranks for name, ranks in groups.items()}

    seen: set[str] = set()
    for communicator in plan.communicators:
        where = f"communicator {communicator.name}"
        members = needed.get(communicator.name, communicator.ranks)
        if communicator.name in seen:
            yield Fault(None, where, "is there twice", "Remove one of them")
        seen.add(communicator.name)
        if communicator.ranks != members:
            yield Fault(
                None,
                where,
                f"joins ranks {list(communicator.ranks)}, but its work is between ranks {list(members)}",
                f"Give it the ranks {list(members)}",
            )
        elif len(set(communicator.ranks)) < len(communicator.ranks):
            yield Fault(None, where, f"has a rank twice: {list(communicator.ranks)}", "Name each rank once")
    for name, ranks in needed.items():
        if name not in seen:
            yield Fault(
                None,
                f"communicator {name}",
                f"missing, and ranks {list(ranks)} need it",
                "Add it to the list of communicators",
            )


def _pair(
    plan: Plan, rank: int, start: InstructionKind, finish: InstructionKind, ref: str, used: bool
) -> tuple[list[Fault], int | None]:
    """Whether the rank starts and finishes a collective once each, in order (`used`), or never (not `used`).
    Also gives the index of its start."""
    order = plan.orders[rank]
    found: list[Fault] = []
    places: dict[InstructionKind, int] = {}
    for kind in (start, finish):
        at = [i for i, instruction in enumerate(order) if instruction.kind is kind and instruction.ref == ref]
        name = f"{kind} {ref}".strip()
        if used and not at:
            found.append(Fault(rank, name, "missing; the other ranks would wait for this one", "Add it"))
        elif not used and at:
            found.append(Fault(rank, name, "this rank has no part in it", "Remove it"))
        elif len(at) > 1:
            found.append(Fault(rank, name, f"stands {len(at)} times in the order", "Keep one"))
        if at:
            places[kind] = at[0]
    if start in places and finish in places and places[finish] < places[start]:
        found.append(
            Fault(
                rank,
                f"{finish} {ref}".strip(),
                f"waits for `{f'{start} {ref}'.strip()}`, which comes later",
                "Swap them",
            )
        )
    return found, places.get(start)


def _loss(plan: Plan) -> Iterator[Fault]:
    for rank in range(plan.ranks):
        found, told = _pair(plan, rank, InstructionKind.LOSS, InstructionKind.HEARD, "", plan.ranks > 1)
        yield from found
        last = _last_run(plan, rank, {(plan.job.loss[0], Phase.F)})
        if told is not None and last is not None and told < last:
            yield Fault(
                rank,
                "loss",
                f"told before `{plan.orders[rank][last]}` has added its microbatch's loss",
                f"Move it after instruction {last}",
            )


def _reductions(plan: Plan, rank: int, groups: dict[str, tuple[int, ...]]) -> Iterator[Fault]:
    for name in sorted(plan.job.tied_groups() | dict.fromkeys(_reduced_names(plan, rank))):
        used = rank in groups.get(name, ())
        found, started = _pair(plan, rank, InstructionKind.REDUCE, InstructionKind.REDUCED, name, used)
        yield from found
        adding = {
            (stage, phase)
            for parameter in plan.job.parameters
            if parameter.tied_to == name
            for stage, phase, _ in parameter.grads
        }
        last = _last_run(plan, rank, adding)
        if started is not None and last is not None and started < last:
            yield Fault(
                rank,
                f"reduce {name}",
                f"starts before `{plan.orders[rank][last]}` has added its part of the gradient",
                f"Move it after instruction {last}",
            )


def _reduced_names(plan: Plan, rank: int) -> list[str]:
    kinds = (InstructionKind.REDUCE, InstructionKind.REDUCED)
    return [str(instruction.ref) for instruction in plan.orders[rank] if instruction.kind in kinds]


def _last_run(plan: Plan, rank: int, programs: set[tuple[int, Phase]]) -> int | None:
    """The index of the rank's last run of any of these programs."""
    found = None
    windows = {
        name
        for name, window in plan.windows.items()
        if any((stage, sub) in programs for stage, phase in window.parts for sub in phase.parts)
    }
    for at, instruction in enumerate(plan.orders[rank]):
        if instruction.kind is InstructionKind.RUN and instruction.ref in windows:
            found = at
    return found


def _one_order(plan: Plan, groups: dict[str, tuple[int, ...]]) -> Iterator[Fault]:
    """Ranks that share several tied gradients start them in one order: where collectives of different
    communicators cannot all be resident at once, as on a GPU, different orders can block each other."""
    starts = [
        {str(i.ref): at for at, i in enumerate(order) if i.kind is InstructionKind.REDUCE}
        for order in plan.orders
    ]
    for first in range(plan.ranks):
        for second in range(first + 1, plan.ranks):
            shared = [n for n, ranks in groups.items() if first in ranks and second in ranks]
            shared = [n for n in shared if n in starts[first] and n in starts[second]]
            here, there = (sorted(shared, key=starts[rank].__getitem__) for rank in (first, second))
            if here != there:
                a, b = next((a, b) for a, b in zip(here, there, strict=True) if a != b)
                yield Fault(
                    second,
                    f"reduce {b}",
                    f"starts before `reduce {a}`, but rank {first} starts `reduce {a}` first",
                    "Start tied gradients in the same order on all ranks",
                )
