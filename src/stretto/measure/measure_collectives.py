"""What collectives cost between running ranks: time by bytes alone, and what compute loses meanwhile.

    1. A process group for every group of an axis. All groups work at once, as they do in a step, so links and
       processors that they share are shared here.
    2. Each size several times in a row (`measure.time_collectives`). The sizes give a `Curve`.
    3. What it takes on the thread that computes, on processors: its wait when it is done, and the first look
       at its result; the wait's part is in step 2's time too, and taken off. Its start, and what else compute
       loses to it (`measure.contention`). All at the least size and at one that stays in flight for a while.
    4. All ranks take the median over groups, so they hold equal costs.

`torch.distributed` is used as it is: the transport that will carry the plan's collectives. On Gloo the start
returns at once and a thread of its own does the work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stretto.backend import collectives, gloo_adapter
from stretto.backend.idle_class import keeping_core
from stretto.errors import UsageError
from stretto.files.say import unheard
from stretto.ir.axes import PIPELINE
from stretto.ir.collectives import KINDS, PRICED
from stretto.ir.costs import BYTES_PER_MB, CollectiveCost
from stretto.ir.curve import Curve
from stretto.ir.mesh import Mesh
from stretto.measure.contention import compute_loss
from stretto.measure.time_collectives import agree_median, meet, tell, timed, timed_end
from stretto.price.calls import Calls, line_through
from stretto.price.sharing import sharing
from stretto.price.wanted import WantedCollective, elements

BUDGET_US = 4_000_000.0
"""Time for one kind on one axis; when it is gone, no further size is begun (the asked ones come first)."""

CONTENTION_US = 200_000.0
"""The loss of compute is measured at the largest size that takes no longer than this, if one of those that
are of use does."""

OF_USE = 2**18
"""Bytes from which on a size tells what compute loses for each of them: of fewer it loses less than
measurements differ by. Measured with Gloo: 4 to 8 ms for each megabyte, and some tenths of noise."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of collective on one axis.

    spread: of rounds at the worst size, the range of those that count over their mean.
    """

    cost: CollectiveCost
    calls: Calls
    spread: float


def measure_collectives(
    mesh: Mesh, wanted: Sequence[WantedCollective], device: torch.device, say: Callable[[str], None] = unheard
) -> dict[tuple[str, str], Measured]:
    """Measure `wanted` on the axes of `mesh`; all ranks of the mesh call it with equal arguments.

    Returns (axis, kind) -> cost, equal on all ranks. Takes one to two seconds for each, up to about six on
    slow links. say: takes a line for each.
    """
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
    """Axes whose collectives use one network card (`cost.sharing`); all ranks must call it.

    They leave the host: a host is told by its boot and its network namespace, so that processes of one
    machine share none, and hosts emulated on it are told apart.
    """
    hosts = tell(host())

    def leaves(axis: str) -> bool:
        size = mesh.size(axis)
        return any(len({hosts[r] for r in g}) > 1 for g in mesh.groups((axis,), range(size)))

    leaving = [axis for axis, size in mesh.sizes if size > 1 and leaves(axis)]
    return sharing(axes, leaving, pipelined=mesh.size(PIPELINE) > 1)


def collective_call(
    kind: str, nbytes: int, dtype: str, members: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[int, Callable[[], Any], torch.Tensor]:
    """(bytes of the whole tensor, a function that starts the collective and returns its handle, what the
    collective writes).

    Raises UsageError for a kind that cannot be measured.
    """
    if kind not in PRICED:
        raise UsageError(f"cannot measure a collective {kind!r}: {', '.join(PRICED)}")
    row = KINDS[kind]
    count = elements(nbytes, dtype, members)
    how = row.reductions[0] if row.reductions else ""
    # Of the whole tensor, or of a part of it that becomes the whole.
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
        if max(tell((time.perf_counter_ns() - begin) / 1000.0)) > BUDGET_US:
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
        loss = compute_loss(start, alone_us, lambda: meet(device), lambda mine: max(tell(mine)), device)
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
    """Step 3: the least size, and the one at which what each byte takes is measured. samples: (bytes,
    microseconds).

    On a slow link all sizes of use may take long; the least of them it is then.
    """
    use = [sample for sample in samples if sample[0] >= OF_USE] or samples
    fits = [sample for sample in use if sample[1] <= CONTENTION_US]
    return sorted({min(samples), max(fits) if fits else min(use)})


def host() -> tuple[str, str]:
    """Names the host of this process: the machine since it booted, and its network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/net")
    except OSError:
        return (os.uname().nodename, "")
    return (boot, space)
