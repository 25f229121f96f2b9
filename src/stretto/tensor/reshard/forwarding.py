"""A tensor that several meshes need, one after another: whoever has received it may send it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.tensor.layout import Layout
from stretto.tensor.reshard.hosts import Hosts
from stretto.tensor.reshard.modes import Mode
from stretto.tensor.reshard.plan import PIECE_BYTES, ReshardPlan, plan_reshard


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
