"""A tensor that several meshes need: whoever has received it may send it on.

plan_forwarding   meshes that need it one after another: a plan for each
plan_together     meshes that need it at one time, and other tensors with it: one plan for all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stretto.tensor.layout import Layout
from stretto.tensor.reshard.hosts import Hosts
from stretto.tensor.reshard.modes import Mode
from stretto.tensor.reshard.plan import (
    PARTS_MUST_SAVE,
    PIECE_BYTES,
    ReshardPlan,
    plan_reshard,
    plan_reshards,
)
from stretto.tensor.reshard.tasks import Tensor


def plan_forwarding(
    shape: Sequence[int],
    itemsize_bytes: int,
    source: Layout,
    targets: Sequence[Layout],
    hosts: Hosts,
    mode: Mode = "broadcast",
    search_s: float = 0.0,
    *,
    piece_bytes: int = PIECE_BYTES,
) -> tuple[ReshardPlan, ...]:
    """Plan a tensor that is needed on several meshes, one after another; one plan for each target.

    Ranks that have received it hold it too. Each target is served from the source, from one of the earlier
    targets, or from all of these together: of those that send no rank what it holds from any of them (all
    together never do), the one that ends first, then has fewest bytes between hosts, then fewest transfers.
    `Transfer.holding` is 0 for the source and i for the i-th target, counted from 1.
    Targets with a Partial axis hold terms, not the value, and serve no one.
    """
    held: list[tuple[int, Layout]] = [(0, source)]
    plans = []
    for number, target in enumerate(targets, start=1):
        choices = [[one] for one in held] + ([held] if len(held) > 1 else [])
        best: tuple[tuple[int, float, int, int], ReshardPlan] | None = None
        for chosen in choices:
            layouts = [layout for _, layout in chosen]
            plan = plan_reshard(
                shape, itemsize_bytes, layouts, target, hosts, mode, search_s, piece_bytes=piece_bytes
            )
            worth = (plan.needed_bytes, plan.makespan_us, plan.link_bytes, len(plan.transfers))
            if best is None or worth < best[0]:
                best = worth, _held_in(plan, [index for index, _ in chosen])
        assert best is not None
        plans.append(best[1])
        if not target.partial_axes:
            held.append((number, target))
    return tuple(plans)


def _held_in(plan: ReshardPlan, numbers: Sequence[int]) -> ReshardPlan:
    """The plan with its source layouts numbered so."""
    transfers = tuple(replace(one, holding=numbers[one.holding]) for one in plan.transfers)
    copies = tuple(replace(one, holding=numbers[one.holding]) for one in plan.copies)
    return replace(plan, transfers=transfers, copies=copies)


@dataclass(frozen=True, slots=True)
class Together:
    """One plan for tensors of which each may go to several targets.

    parts: for each tensor that the plan speaks of, which of the given ones it is, and to which of its targets
    it goes: all those, for which a rank receives a box once and hands it on, or one by itself.
    """

    plan: ReshardPlan
    parts: tuple[tuple[int, tuple[int, ...]], ...]


def plan_together(
    tensors: Sequence[Tensor],
    hosts: Hosts,
    mode: Mode = "broadcast",
    search_s: float = 0.0,
    *,
    piece_bytes: int = PIECE_BYTES,
) -> Together:
    """Plan all that moves at one time; ranks of one target serve those of another where that is better.

    First every target is served for itself, from the source. Then, tensor by tensor, its targets are joined:
    a box goes once to all ranks that need it for any of them, so that a chain runs through the hosts of all,
    and a host that gets it for one target has it for the others. It stays so if that ends earlier, or at the
    same time with fewer bytes between hosts. Targets with a Partial axis hold terms, not the value, and stay
    apart.

    See `plan_reshards` for the rest.
    """
    joined: frozenset[int] = frozenset()
    found = _planned(tensors, joined, hosts, mode, search_s, piece_bytes)
    for index, tensor in enumerate(tensors):
        if sum(not target.partial_axes for target in tensor.targets) > 1:
            other = _planned(tensors, joined | {index}, hosts, mode, search_s, piece_bytes)
            if _is_better(other.plan, found.plan):
                joined, found = joined | {index}, other
    return found


def _planned(
    tensors: Sequence[Tensor],
    joined: frozenset[int],
    hosts: Hosts,
    mode: Mode,
    search_s: float,
    piece_bytes: int,
) -> Together:
    parts: list[tuple[int, tuple[int, ...]]] = []
    for index, tensor in enumerate(tensors):
        apart = list(range(len(tensor.targets)))
        if index in joined:
            apart = [at for at in apart if tensor.targets[at].partial_axes]
            parts.append((index, tuple(at for at in range(len(tensor.targets)) if at not in apart)))
        parts += [(index, (at,)) for at in apart]
    split = [
        replace(tensors[index], target=[tensors[index].targets[at] for at in targets])
        for index, targets in parts
    ]
    return Together(plan_reshards(split, hosts, mode, search_s, piece_bytes=piece_bytes), tuple(parts))


def _is_better(plan: ReshardPlan, than: ReshardPlan) -> bool:
    """Whether joined targets are worth their smaller boxes."""
    if plan.makespan_us < than.makespan_us * (1 - PARTS_MUST_SAVE):
        return True
    return plan.makespan_us <= than.makespan_us * (1 + 1e-9) and plan.link_bytes < than.link_bytes
