"""What collectives cost between running ranks: time by bytes alone, and what compute loses meanwhile.

    1. A process group for every group of an axis. All groups work at once, as they do in a step, so links and
       processors that they share are shared here.
    2. Each size several times in a row. The sizes give a `Curve`.
    3. What it takes on the thread that computes, on processors: its wait when it is done, and the first look
       at its result; the wait's part is in step 2's time too, and taken off. Its start, and what else compute
       loses to it (`measure.contention`). All at the least size and at one that stays in flight for a while.
    4. All ranks take the median over groups, so they have equal costs.

On Gloo the start returns at once and a thread of its own does the work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from stretto.backend import collectives, gloo_adapter
from stretto.backend.collectives import gather_all
from stretto.backend.device_time import synchronise
from stretto.backend.gloo_adapter import keeping_core, lanes_first
from stretto.files.say import silent
from stretto.ir.axes import PIPELINE
from stretto.ir.collectives import KINDS
from stretto.ir.costs import BYTES_PER_MB, CollectiveCost
from stretto.ir.curve import Curve
from stretto.ir.mesh import Mesh
from stretto.measure.contention import compute_loss
from stretto.measure.stopwatch import repeats
from stretto.price.calibration import Calls, line_through
from stretto.price.shared import WantedCollective, elements, sharing
from stretto.processor.control_groups import host
from stretto.processor.quota import products_on, quota_share

ROUNDS = 12
"""Counted rounds of a size after two for warmth, when they take long."""

MOST_ROUNDS = 30
"""Of a size whose rounds are short."""

ROUNDS_US = 100_000.0
"""Rounds of a size go on for this long, within the limits above."""

KEPT = 0.9
"""Part of the rounds that count, the faster ones: what is beyond was other work on the machine. Assumed."""

CALL_ROUNDS = 6
"""Counted rounds of the wait for a collective that is done, after two for warmth."""

SURELY_US = 2_000.0
"""A collective is surely done after twice its time alone and this. Assumed."""


def agree_median(value: float) -> float:
    return float(statistics.median(gather_all(value)))


def meet(device: torch.device, value: float = 0.0) -> float:
    """Bring all ranks together; the most of their values."""
    # No barrier, which would pick a device by rank.
    most = torch.tensor([value], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def timed_end(start: Callable[[], Any], result: torch.Tensor, alone_us: float) -> tuple[float, float]:
    """(wait, finish): microseconds on the thread that computes, of the wait for a collective that compute has
    hidden, and with it how much longer its result is read for the first time than for the second. The
    thread's time is counted: what a transport's own threads take is a loss (`measure.contention`)."""
    compute = products_on(result.device)
    copy = torch.empty_like(result)
    rounds: list[tuple[float, float]] = []
    with torch.no_grad(), lanes_first():
        for _ in range(CALL_ROUNDS + 2):
            work = start()
            end_ns = time.perf_counter_ns() + (2.0 * alone_us + SURELY_US) * 1e3
            while time.perf_counter_ns() < end_ns:
                compute()
            at = [time.thread_time_ns()]
            work.wait()
            at.append(time.thread_time_ns())
            for _ in range(2):
                copy.copy_(result)
                at.append(time.thread_time_ns())
            wait, first, second = (1e-3 * (end - begin) / quota_share() for begin, end in pairwise(at))
            rounds.append((wait, first - second))
    wait_us, read_us = (max(0.0, agree_median(statistics.median(of))) for of in zip(*rounds[2:], strict=True))
    return wait_us, wait_us + read_us


def timed(
    start: Callable[[], Any], group: dist.ProcessGroup, device: torch.device
) -> tuple[float, float, float]:
    """(microseconds of one collective from its call on, of that call, spread), equal on all ranks: the median
    of groups. One follows the other: what an idle link lets through at once is not counted on."""
    took: list[tuple[float, float]] = []

    def one() -> float:
        begin = time.perf_counter_ns()
        work = start()
        started = time.perf_counter_ns()
        work.wait()
        synchronise(device)
        took.append(((time.perf_counter_ns() - begin) / 1000.0, (started - begin) / 1000.0))
        return took[-1][0]

    meet(device)
    with lanes_first() if device.type == "cpu" else nullcontext():
        one()
        warm_us = max(gather_all(one()))
        one()
        took.clear()
        for _ in range(repeats(warm_us, ROUNDS_US, ROUNDS, MOST_ROUNDS)):
            one()
    by_group: dict[tuple[int, ...], list[list[tuple[float, float]]]] = {}
    for ranks, rounds in gather_all((dist.get_process_group_ranks(group), took)):
        by_group.setdefault(tuple(ranks), []).append(rounds)
    full_us, start_us, spread = zip(*map(counted, by_group.values()), strict=True)
    return statistics.median(full_us), statistics.median(start_us), max(spread)


def counted(members: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float, float]:
    """(full, start, spread) of one group from its members' (full, start) of each round: the full time is that
    of the member that comes last and has not waited for others, the start a mean; over the fastest rounds."""
    rounds = sorted(
        (min(full for full, _ in each), statistics.fmean(start for _, start in each))
        for each in zip(*members, strict=True)
    )
    full_values, starts = zip(*rounds[: max(1, round(KEPT * len(rounds)))], strict=True)
    full_us = statistics.fmean(full_values)
    return full_us, statistics.fmean(starts), (max(full_values) - min(full_values)) / full_us


BUDGET_US = 4_000_000.0
"""Time for one kind on one axis; when it is gone, no further size is begun (the asked ones come first)."""

CONTENTION_US = 200_000.0
"""The loss of compute is measured at the largest size that takes no longer than this, if one of those that
are of use does."""

OF_USE = 2**18
"""Bytes from which on a size shows what compute loses for each of them: of fewer it loses less than
measurements differ by. Measured with Gloo: 4 to 8 ms for each megabyte, and some tenths of noise."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of collective on one axis. spread: of rounds at the worst size, the range of those that count
    over their mean."""

    cost: CollectiveCost
    calls: Calls
    spread: float


def measure_collectives(
    mesh: Mesh, wanted: Sequence[WantedCollective], device: torch.device, say: Callable[[str], None] = silent
) -> dict[tuple[str, str], Measured]:
    """Measure `wanted` on the axes of `mesh`; all ranks call it with equal arguments, and get equal (axis,
    kind) -> cost. Takes one to two seconds for each, up to about six on slow links. say: takes a line for
    each."""
    result: dict[tuple[str, str], Measured] = {}
    groups: dict[str, dist.ProcessGroup] = {}
    try:
        for item in wanted:
            say(f"measuring {item.kind} on {item.axis}")
            if item.axis not in groups:
                with gloo_adapter.calm_new_loops():
                    groups[item.axis] = _group(mesh, item.axis, device)
            group = groups[item.axis]
            size = mesh.size(item.axis)
            result[item.axis, item.kind] = _measure(item, size, group, device)
    finally:
        for group in groups.values():
            dist.destroy_process_group(group)
    return result


def shared_axes(mesh: Mesh, axes: Iterable[str]) -> tuple[str, ...]:
    """Axes whose collectives use one network card: they leave the host, which is known by its boot and its
    network namespace. All ranks must call it."""
    hosts = gather_all(host())

    def leaves(axis: str) -> bool:
        size = mesh.size(axis)
        return any(len({hosts[r] for r in g}) > 1 for g in mesh.groups((axis,), range(size)))

    leaving = [axis for axis, size in mesh.sizes if size > 1 and leaves(axis)]
    return sharing(axes, leaving, pipelined=mesh.size(PIPELINE) > 1)


def collective_call(
    kind: str, nbytes: int, dtype: str, members: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[int, Callable[[], Any], torch.Tensor]:
    """(bytes of the full tensor, a function that starts the collective and returns its handle, what the
    collective writes)."""
    row = KINDS[kind]
    count = elements(nbytes, dtype, members)
    how = row.reductions[0] if row.reductions else ""
    # Of the full tensor, or of a part of it that becomes the full tensor.
    ways = [(given, row.shape((given,), members, how)) for given in (count, count // members)]
    given, made = next((given, made) for given, made in ways if made and max(given, *made) == count)
    value = torch.zeros(given, dtype=getattr(torch, dtype), device=device)
    result = value if row.in_place else value.new_zeros(made)

    def start() -> Any:
        with keeping_core():  # as the transport does
            return collectives.start(kind, result, value, group, how)

    return max(value.nbytes, result.nbytes), start, result


def _group(mesh: Mesh, axis: str, device: torch.device) -> dist.ProcessGroup:
    """Step 1: this rank's group; all ranks make all groups in one order."""
    backend = gloo_adapter.lane_backend() if device.type == "cpu" else None
    groups = [list(ranks) for ranks in mesh.groups((axis,), range(mesh.size(axis)))]
    mine, _ = dist.new_subgroups_by_enumeration(groups, backend=backend)  # type: ignore[no-untyped-call]
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def _measure(
    item: WantedCollective, members: int, group: dist.ProcessGroup, device: torch.device
) -> Measured:
    samples: list[tuple[int, float]] = []
    starts: list[tuple[int, float]] = []
    spread = 0.0
    begin = time.perf_counter_ns()
    for size in item.sizes:
        nbytes, start, _ = collective_call(item.kind, size, item.dtype, members, group, device)
        us, start_us, range_of = timed(start, group, device)
        samples.append((nbytes, us))
        starts.append((nbytes, start_us))
        spread = max(spread, range_of)
        if max(gather_all((time.perf_counter_ns() - begin) / 1000.0)) > BUDGET_US:
            break
    losses: list[tuple[int, float]] = []
    waits, finishes = [(0, 0.0)], [(0, 0.0)]
    if device.type == "cpu":  # elsewhere the host runs ahead: only its calls count
        starts, waits, finishes = [], [], []
    # What is lost whatever the size is seen at the least bytes; slowdown at the most.
    for nbytes, alone_us in ends_of(samples):
        _, start, result = collective_call(item.kind, nbytes, item.dtype, members, group, device)
        meet(device)
        if device.type == "cpu":
            wait_us, finish_us = timed_end(start, result, alone_us)
            waits.append((nbytes, wait_us))
            finishes.append((nbytes, finish_us))
        loss = compute_loss(start, alone_us, partial(meet, device), device)
        losses.append((nbytes, agree_median(loss.processor_us)))
        if device.type == "cpu":
            starts.append((nbytes, agree_median(loss.start_us)))
    processor_us, processor_us_per_mb = line_through(losses)
    wait_us, wait_us_per_mb = line_through(waits)
    finish_us, finish_us_per_mb = line_through(finishes)
    cost = CollectiveCost(
        Curve.fitted(
            [(size, max(us / 2, us - wait_us - wait_us_per_mb * size / BYTES_PER_MB)) for size, us in samples]
        ),
        processor_us_per_mb,
        agree_median(loss.slowdown),
        f"measured, {members} ranks" + (", all groups at once" if dist.get_world_size() > members else ""),
        processor_us,
    )
    return Measured(cost, Calls(*line_through(starts), finish_us_per_mb, finish_us), spread)


def ends_of(samples: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Step 3: of (bytes, microseconds), the least size, and the one at which what each byte takes is
    measured. On a slow link all sizes of use may take long; the least of them it is then."""
    use = [sample for sample in samples if sample[0] >= OF_USE] or samples
    fits = [sample for sample in use if sample[1] <= CONTENTION_US]
    return sorted({min(samples), max(fits) if fits else min(use)})
