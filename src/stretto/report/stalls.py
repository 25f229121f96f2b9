"""Who waits for whom: ranks that compute longer than others with which they communicate, and how long those
stand.

Reads what a measured timeline says of all ranks of a run. Touches `stretto.ir` only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from stretto.ir.axes import EP
from stretto.ir.metrics import ROWS, Observed
from stretto.ir.plan import Plan
from stretto.ir.timeline import Timeline
from stretto.report.findings import LEAST_SHARE
from stretto.report.grid import Grid
from stretto.report.words import format_share, format_us

MOST_RANKS = 16
"""Rows of the table; of more ranks, those for which others wait longest."""


def stalls_grid(timeline: Timeline, plan: Plan | None, observed: Sequence[Observed] = ()) -> Grid | None:
    """A row a rank of the run; None for a timeline that does not say, and for one rank."""
    ranks = len(timeline.busy_us)
    if ranks < 2:
        return None
    by_rank, for_rank = [0.0] * ranks, [0.0] * ranks
    pairs: dict[int, dict[tuple[str, int], float]] = defaultdict(dict)
    for stall in timeline.stalls:
        by_rank[stall.rank] += stall.us
        for_rank[stall.on] += stall.us
        pairs[stall.rank][stall.axis, stall.on] = stall.us
    shares = _rows_of_ranks(plan, observed) if plan is not None else {}
    shown = sorted(sorted(range(ranks), key=lambda rank: -for_rank[rank])[:MOST_RANKS])
    rows = []
    for rank in shown:
        longest = max(pairs[rank].items(), key=lambda item: item[1], default=None)
        row = [f"rank {rank}", _with_share(timeline.busy_us[rank], timeline.step_us)]
        if shares:
            row.append(format_share(shares[rank]) if rank in shares else "-")
        row += [
            _with_share(by_rank[rank], timeline.step_us),
            "-" if longest is None else f"rank {longest[0][1]} ({longest[0][0]})",
            _with_share(for_rank[rank], timeline.step_us),
        ]
        rows.append(tuple(row))
    head = ("", "computes", *(["experts' rows"] if shares else []), "waits", "most for", "waited for")
    caption = (
        "waits: for other ranks, until they begin their part of a communication. waited for: how long all "
        "others stand for it."
    )
    if shares:
        caption += " experts' rows: what goes to its experts, of what goes to those of all ranks."
    return Grid("Who waits for whom", head, rows, (0,), caption)


def stalls_findings(timeline: Timeline) -> list[str]:
    """The worst of it, in a sentence; nothing where it is not worth one."""
    if not timeline.stalls or not timeline.step_us:
        return []
    worst = max(timeline.stalls, key=lambda stall: stall.us)
    if worst.us < LEAST_SHARE * timeline.step_us:
        return []
    busy = timeline.busy_us
    longer = ""
    if busy[worst.on] > busy[worst.rank]:
        longer = f", which computes for {format_us(busy[worst.on])} and it for {format_us(busy[worst.rank])}"
    return [
        f"Rank {worst.rank} waits {format_us(worst.us)} ({format_share(worst.us / timeline.step_us)} of the "
        f"step) on {worst.axis} for rank {worst.on}{longer}."
    ]


def _rows_of_ranks(plan: Plan, observed: Sequence[Observed]) -> Mapping[int, float]:
    """Rank -> share of the rows of its layers that goes to its experts, where ranks share experts;
    consecutive ones are of one rank."""
    size = plan.job.size(EP.name)
    stages = {(metric.module, metric.name): metric.stage for metric in plan.job.metrics}
    found: dict[int, float] = {}
    for rank in range(plan.world if size > 1 else 0):
        at = plan.mesh.coordinates(rank)[EP.name]
        layers = [
            one.mean
            for one in observed
            if one.name == ROWS
            and len(one.mean) % size == 0
            and plan.rank_of(stages[one.module, one.name]) == plan.mesh.place(rank)
        ]
        total = sum(map(sum, layers))
        if total:
            here = (len(mean) // size for mean in layers)
            found[rank] = (
                sum(sum(mean[at * n : (at + 1) * n]) for mean, n in zip(layers, here, strict=True)) / total
            )
    return found


def _with_share(us: float, step_us: float) -> str:
    return f"{format_us(us)} ({format_share(us / step_us)})" if step_us else format_us(us)
