"""Lower bounds: how fast no order of a job's actions on these ranks can be.

May touch `stretto.ir` and `schedule.reach`, `schedule.transfers`. The contract:

1. Every op has a *head*, before which it cannot start, and a *tail*, which must pass after it has ended; so
   has every message. Both follow from one microbatch alone (`schedule.reach`).
2. A machine does one thing at a time: a rank's compute lane, a rank's network card in each direction. For
   any set S of the work on a machine, a step lasts at least the least head in S, plus the time of S for all
   microbatches, plus the least tail in S. The sets tried are all {head >= a and tail >= b}. This is
   the preemptive one-machine bound of Jackson's rule (Carlier, "The one-machine sequencing problem", 1982).
3. A transport that needs processor time takes it from the compute lane, or from its idle time. Of a rank's
   transport time, what cannot fit before the head and after the tail is added to the work.
4. One microbatch alone takes its longest chain: the largest head + time + tail.
5. The largest of these binds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stretto.ir.action import Phase, Schedule
from stretto.ir.plan import Costs
from stretto.ir.program import Job
from stretto.schedule.reach import Reach, find_reach
from stretto.schedule.transfers import occupancy_us, processor_us

Array = NDArray[np.float64]

THRESHOLDS = 256
"""Heads and tails tried on each machine. With more distinct ones, some are rounded down, which keeps the
bound true. Chosen so that 64 ranks take about a second."""

ROUNDING = 1e-12
"""Relative difference below which two bounds are equal: a few roundings of double precision."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound on the step, in microseconds.

    binds: which bound binds, in words. parts: every bound by name (`rank 1 compute`, `rank 0 sends`,
    `rank 1 receives`, `critical path`), in microseconds.
    """

    us: float
    binds: str
    parts: dict[str, float] = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Machine:
    """Step 2's result for one machine: us = head + m * each + extra + tail."""

    us: float
    head_us: float
    each_us: float
    tail_us: float
    extra_us: float = 0.0


def lower_bound(job: Job, where: Schedule | Sequence[int], costs: Costs) -> Bound:
    """The time below which no order of the job's actions can come, with these costs.

    where: a schedule, of which only the placement counts, or the rank of each stage. Op times must be known
    for every op that is no view. Raises PlanError for a missing time, and for edges that form a circle.
    """
    stage_ranks = tuple(where.stage_ranks if isinstance(where, Schedule) else where)
    forwards = _forwards_a_run(where) if isinstance(where, Schedule) else 1
    reach = find_reach(job, stage_ranks, costs)
    m = job.microbatches
    # 4. One microbatch alone.
    parts = {"critical path": reach.critical_us}
    words = {"critical path": f"the critical path of one microbatch ({format_us(reach.critical_us)})"}
    for rank in sorted(set(stage_ranks)):
        for name, machine, what in (
            (f"rank {rank} compute", _compute(job, stage_ranks, costs, reach, rank, forwards), "compute"),
            (f"rank {rank} sends", _card(job, stage_ranks, costs, reach, rank, True), "outgoing messages"),
            (
                f"rank {rank} receives",
                _card(job, stage_ranks, costs, reach, rank, False),
                "incoming messages",
            ),
        ):
            if machine is not None:
                parts[name] = machine.us
                words[name] = _in_words(f"rank {rank}'s {what}", m, machine)
    # 5. The largest binds; of equal ones the first named.
    largest = max(parts.values())
    binding = next(name for name, us in parts.items() if us >= largest * (1 - ROUNDING))
    return Bound(largest, words[binding], parts)


def format_us(us: float) -> str:
    """A time for people: `226 ms`, `1.38 s`, `12.5 us`."""
    for limit, unit, scale in ((1e3, "us", 1.0), (1e6, "ms", 1e3), (float("inf"), "s", 1e6)):
        if us < limit * 0.9995:
            value = us / scale
            return f"{value:.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"
    raise AssertionError("unreachable")


def _in_words(machine_name: str, m: int, machine: _Machine) -> str:
    text = f"{machine_name} ({m} x {format_us(machine.each_us)}"
    text += f" and {format_us(machine.extra_us)} for its messages)" if machine.extra_us > 0 else ")"
    if machine.head_us > 0:
        text += f" after a head of {format_us(machine.head_us)}"
    if machine.tail_us > 0:
        text += f"{' and' if machine.head_us > 0 else ''} before a tail of {format_us(machine.tail_us)}"
    return text


def _forwards_a_run(schedule: Schedule) -> int:
    """The most forwards that one run holds: with k of them, `action_us` is paid once for every k."""
    slots = (slot for order in schedule.orders for slot in order)
    return max((sum(a.phase is Phase.F for a in slot.actions) for slot in slots), default=1) or 1


def _compute(
    job: Job, stage_ranks: Sequence[int], costs: Costs, reach: Reach, rank: int, forwards: int
) -> _Machine | None:
    """Steps 2 and 3 for a rank's compute lane."""
    heads: list[float] = []
    tails: list[float] = []
    times: list[float] = []
    for stage, owner in enumerate(stage_ranks):
        if owner != rank:
            continue
        ops = reach.stages[stage]
        heads += ops.head_us.tolist()
        tails += ops.tail_us.tolist()
        times += ops.time_us.tolist()
        if costs.action_us and ops.forward.any():
            # Each run of a forward pays `action_us` before its ops; count it with one of them.
            on_path = int(np.argmax(np.where(ops.forward, ops.head_us + ops.tail_us, -1.0)))
            heads.append(float(ops.head_us[on_path]))
            tails.append(float(ops.tail_us[on_path]))
            times.append(costs.action_us / forwards)
    transport_us, share = _transport(job, stage_ranks, costs, rank)
    # The first run of a rank may pay `action_us` before the head.
    return _one_machine(
        np.array(heads),
        np.array(tails),
        np.array(times),
        job.microbatches,
        transport_us,
        share,
        costs.action_us,
    )


def _transport(job: Job, stage_ranks: Sequence[int], costs: Costs, rank: int) -> tuple[float, float]:
    """Step 3: (processor time that the rank's messages take for certain, the largest share at one time)."""
    total = {"in": 0.0, "out": 0.0}
    share = {"in": 0.0, "out": 0.0}
    for edge in job.edges:
        a, b = stage_ranks[edge.source], stage_ranks[edge.target]
        if a == b or rank not in (a, b):
            continue
        link = costs.link(a, b)
        busy_us = occupancy_us(link, edge.spec.nbytes)
        way = "out" if rank == a else "in"
        lost_us = processor_us(link, edge.spec.nbytes)
        total[way] += lost_us * job.microbatches
        share[way] = max(share[way], lost_us / busy_us if busy_us else 0.0)
    if share["in"] + share["out"] <= 1.0:
        return total["in"] + total["out"], share["in"] + share["out"]
    # Both directions at once may ask for more than the whole processor; only one of them counts for certain.
    return max(total.values()), 1.0


def _card(
    job: Job, stage_ranks: Sequence[int], costs: Costs, reach: Reach, rank: int, outgoing: bool
) -> _Machine | None:
    """Step 2 for one direction of a rank's network card."""
    rows: dict[int, tuple[float, float, float]] = defaultdict(lambda: (0.0, 0.0, 0.0))
    for edge in job.edges:
        a, b = stage_ranks[edge.source], stage_ranks[edge.target]
        if a == b or rank != (a if outgoing else b):
            continue
        link = costs.link(a, b)
        leave_us = reach.leaves_us[edge.index]
        follows_us = link.latency_us + reach.follows_us[edge.index]
        rows[edge.index] = (leave_us, follows_us, occupancy_us(link, edge.spec.nbytes))
    if not rows:
        return None
    table = np.array(list(rows.values()))
    return _one_machine(table[:, 0], table[:, 1], table[:, 2], job.microbatches)


def _one_machine(
    heads: Array,
    tails: Array,
    times: Array,
    m: int,
    transport_us: float = 0.0,
    share: float = 0.0,
    before_head_us: float = 0.0,
) -> _Machine | None:
    """Step 2: the best of all sets {head >= a and tail >= b}."""
    if not len(times):
        return None
    firsts, at_head = _thresholds(heads)
    lasts, at_tail = _thresholds(tails)
    grid = np.zeros((len(firsts), len(lasts)))
    count = np.zeros_like(grid)
    np.add.at(grid, (at_head, at_tail), times)
    np.add.at(count, (at_head, at_tail), 1)
    work = grid[::-1, ::-1].cumsum(0).cumsum(1)[::-1, ::-1]
    filled = count[::-1, ::-1].cumsum(0).cumsum(1)[::-1, ::-1] > 0
    around = firsts[:, None] + lasts[None, :]
    # 3. Transport that cannot fall before the head or after the tail.
    extra = np.maximum(0.0, transport_us - share * around)
    early = np.where(firsts[:, None] > 0, before_head_us, 0.0)
    total = np.where(filled, around + m * work + extra - early, -np.inf)
    # Of equal sets the first, which is the largest, says best what binds.
    best = int(np.argmax(total >= total.max() * (1 - ROUNDING)))
    row, column = np.unravel_index(best, total.shape)
    return _Machine(
        float(total[row, column]),
        float(firsts[row]),
        float(work[row, column]),
        float(lasts[column]),
        float(extra[row, column]),
    )


def _thresholds(values: Array) -> tuple[Array, NDArray[np.intp]]:
    """Values to try, ascending, and for each value the largest of them that is not above it."""
    distinct = np.unique(values)
    if len(distinct) > THRESHOLDS:
        distinct = distinct[np.linspace(0, len(distinct) - 1, THRESHOLDS).astype(int)]
    return distinct, np.searchsorted(distinct, values, side="right") - 1
