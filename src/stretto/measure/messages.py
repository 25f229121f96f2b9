"""What messages cost between running ranks: latency, rate, and the processor time that they take away.

    1. A pair's messages of several sizes, one at a time, timed by round trips that return an empty
       answer; latency and rate are the best straight line through fast ones (least squares,
       weighted by one over the time).
    2. On processors both ends compute while messages stream between them, one each way at a time; what
       compute loses for each megabyte (`cost.contention`) is the processor time of a message.

Uses `torch.distributed` as it is: the transport that will carry the plan's messages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from stretto.backend.gloo_adapter import calm_loops
from stretto.backend.idle_class import keeping_core
from stretto.backend.synchronise import synchronise
from stretto.ir.axes import PIPELINE
from stretto.ir.costs import BYTES_PER_MB, Link
from stretto.ir.mesh import Mesh
from stretto.measure.contention import Compute, compute_loss

SIZES = (4, 65_536, 262_144, 1_048_576)
"""Bytes of the probes: an empty message, and around an activation's size."""

ROUNDS = 5
"""Messages of each size when they take long; the slowest of the fastest quarter counts. What slows others is
not the link, and the very fastest may have been lent by a network that limits rates with a bucket: at
100 Mbit/s one of 16 messages of 64 KiB took 4.0 ms, the others 5.2. Assumed."""

MOST_ROUNDS = 40
"""Messages of each size at most: short ones are repeated until one is undisturbed."""

ROUNDS_US = 60_000.0
"""Messages of a size go on for this long, within the limits above."""

QUARTER = 0.25
"""Of the rounds, those from which the time is taken. Assumed."""

FASTEST = {"cpu": 50_000.0, "cuda": 1_000_000.0}
"""Bytes a microsecond that no link of such devices reaches: a core's copies, an accelerator's links. Assumed;
a fit of disturbed messages may tell any rate."""

SLOW_US = 400_000.0
"""A probe that takes longer is not sent again in bigger sizes: a slow link has told its rate by then."""

STREAMED_BYTES = 262_144
"""Of the messages of step 2: of a stage's activations, rather small ones. Assumed."""


@dataclass(frozen=True, slots=True)
class FoundLink:
    """spread: by which share the middle one of the largest messages' rounds took longer than the one that
    counts."""

    link: Link
    spread: float


class _OneWay(NamedTuple):
    """What step 1 tells."""

    latency_us: float
    bytes_per_us: float
    spread: float


@calm_loops()
def measure_links(
    pairs: Sequence[tuple[int, int]],
    device: torch.device,
    mesh: Mesh | None = None,
    compute: Compute | None = None,
) -> dict[tuple[int, int], FoundLink]:
    """Links of (sender, receiver) pairs of places; every rank must call it with the same pairs.

    mesh: how ranks are laid out, when there are axes beside pp; a pair of places is then measured between
    all pairs of ranks that stand there at once, as a step uses it. compute: what ranks compute meanwhile, as
    `contention.compute_loss` takes it. Returns what this rank found as a sender, by places. Both directions
    of a pair are assumed equal in what they take from the processor.
    """
    rank = dist.get_rank()
    mesh = mesh or Mesh(((PIPELINE, dist.get_world_size()),))
    here = mesh.coordinates(rank)
    found: dict[tuple[int, int], FoundLink] = {}
    stolen: dict[frozenset[int], float] = {}
    for pair in pairs:
        # This rank's own pair: its coordinates on all other axes.
        sender, receiver = (mesh.rank({**here, PIPELINE: place}) for place in pair)
        fit = _one_way(sender, receiver, device)
        both = frozenset(pair)
        if both not in stolen:
            cpu = device.type == "cpu"
            stolen[both] = _processor_loss(sender, receiver, device, fit, compute) if cpu else 0.0
        if rank == sender:
            assert fit is not None
            link = Link(fit.latency_us, fit.bytes_per_us, stolen[both], "measured")
            found[pair] = FoundLink(link, fit.spread)
        dist.barrier()
    return found


def _one_way(sender: int, receiver: int, device: torch.device) -> _OneWay | None:
    """Step 1 on the sender; None on other ranks."""
    rank = dist.get_rank()
    if rank not in (sender, receiver):
        return None
    answer = torch.zeros(1, device=device)
    points: list[tuple[int, float]] = []
    spread = 0.0
    for nbytes in SIZES:
        payload = torch.zeros(max(nbytes // 4, 1), device=device)
        times: list[float] = []
        rounds = torch.zeros(1, device=device)
        while not times or len(times) <= rounds.item():
            if rank == sender:
                start = time.perf_counter_ns()
                dist.send(payload, receiver)
                dist.recv(answer, receiver)
                synchronise(device)
                times.append((time.perf_counter_ns() - start) / 1000.0)
                go_on = torch.tensor([1.0 if times[-1] < SLOW_US else 0.0], device=device)
                if len(times) == 1:  # the first is for warmth, and tells how many others there will be
                    count = max(ROUNDS, min(MOST_ROUNDS, ROUNDS_US / times[0]))
                    rounds = torch.tensor([float(int(count))], device=device)
                    dist.send(rounds, receiver)
            else:
                dist.recv(payload, sender)
                dist.send(answer, sender)
                times.append(0.0)
                if len(times) == 1:
                    dist.recv(rounds, sender)
        if rank == sender:
            fast = int(QUARTER * (len(times) - 1)) if points else 0  # nothing lends to the empty one
            ascending = sorted(times[1:])
            points.append((payload.nbytes, ascending[fast]))
            spread = statistics.median(ascending) / ascending[fast] - 1.0
            dist.send(go_on, receiver)
        else:
            go_on = torch.zeros(1, device=device)
            dist.recv(go_on, sender)
        if not go_on.item() and nbytes != SIZES[0]:
            break
    if rank == receiver:
        return None
    return _OneWay(*_fit(points, FASTEST.get(device.type, FASTEST["cuda"])), spread)


def _fit(points: Sequence[tuple[int, float]], fastest: float = FASTEST["cuda"]) -> tuple[float, float]:
    """(latency_us, bytes_per_us) from (bytes, round trip us); the empty answer is half of the first."""
    half = points[0][1] / 2.0
    one_way = [(nbytes, max(us - half, 0.1)) for nbytes, us in points]
    # Weighted least squares of us = a + b * bytes with weights 1 / us: the rate is that of large messages.
    weights = [1.0 / us for _, us in one_way]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, one_way, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, one_way, strict=True)) / total
    above = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, one_way, strict=True))
    below = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, one_way, strict=True))
    slope = above / below if below else 0.0
    if slope <= 0.0:
        # Noise beyond the link's own time: the largest message tells at least what it took.
        nbytes, us = one_way[-1]
        slope = us / nbytes
    slope = max(slope, 1.0 / fastest)
    # An empty message cannot be much faster than half of its round trip, whatever the line says.
    return max(mean_y - slope * mean_x, half / 2.0), 1.0 / slope


def _processor_loss(
    a: int, b: int, device: torch.device, fit: _OneWay | None, compute: Compute | None
) -> float:
    """Step 2: microseconds of compute lost for each 10**6 bytes, the mean of both ends. fit: what the sender
    has found; None on other ranks."""
    rank = dist.get_rank()
    if rank not in (a, b):
        return 0.0
    peer = b if rank == a else a
    other = torch.zeros(1)
    alone_us = fit.latency_us + STREAMED_BYTES / fit.bytes_per_us if fit is not None else 0.0
    mine = torch.tensor([alone_us])
    _swap(mine, other, a, b)
    out, into = torch.zeros(STREAMED_BYTES // 4), torch.zeros(STREAMED_BYTES // 4)

    def start() -> _Exchange:
        with keeping_core():
            return _Exchange([dist.isend(out, peer), dist.irecv(into, peer)])

    def meet() -> None:
        _swap(torch.zeros(1), torch.zeros(1), a, b)

    found = compute_loss(start, float(max(mine.item(), other.item())), meet, device, compute=compute)
    # Each message costs its sender and its receiver; a rank was both. No op of a plan is the call.
    loss = torch.tensor([(found.processor_us + found.start_us) / (2 * out.nbytes / BYTES_PER_MB)])
    _swap(loss, other, a, b)
    return float(loss + other) / 2


class _Exchange:
    """A message each way."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


@calm_loops()
def measure_both_ways(sender: int, receiver: int, nbytes: int, device: torch.device) -> float | None:
    """Time of a message while one of equal size goes the other way, over its time alone: 1 where directions
    share nothing, 2 where they share all. None on other ranks; the two call it together."""
    rank = dist.get_rank()
    if rank not in (sender, receiver):
        return None
    peer = receiver if rank == sender else sender
    out, into = (torch.zeros(max(1, nbytes // 4), device=device) for _ in range(2))
    mine, theirs = torch.zeros(1, device=device), torch.zeros(1, device=device)
    alone: list[float] = []
    both: list[float] = []
    for _ in range(ROUNDS + 1):
        _swap(mine, theirs, sender, receiver)
        begin = time.perf_counter_ns()
        if rank == sender:
            dist.send(out, peer)
            dist.recv(theirs, peer)  # the answer is empty
        else:
            dist.recv(into, peer)
            dist.send(mine, peer)
        synchronise(device)
        alone.append(float(time.perf_counter_ns() - begin))
        _swap(mine, theirs, sender, receiver)
        begin = time.perf_counter_ns()
        # Sends and receives have one order on both ends, as a device's transport wants it.
        works = [dist.isend(out, peer), dist.irecv(into, peer)]
        for work in works if rank == sender else reversed(works):
            assert work is not None
            work.wait()
        synchronise(device)
        both.append(float(time.perf_counter_ns() - begin))
    return min(both[1:]) / max(min(alone[1:]), 1.0)


def _swap(mine: torch.Tensor, theirs: torch.Tensor, a: int, b: int) -> None:
    """Exchange one number between two ranks; also brings them together in time."""
    rank = dist.get_rank()
    if rank == a:
        dist.send(mine, b)
        dist.recv(theirs, b)
    else:
        dist.recv(theirs, a)
        dist.send(mine, a)
