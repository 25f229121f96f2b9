"""What messages cost between running ranks: latency, rate, and the processor time that they take away.

    1. A pair's messages of several sizes, one at a time, timed by round trips that return an empty
       answer; latency and rate are the best straight line through fast ones (least squares,
       weighted by one over the time).
    2. Empty messages one behind another, without waiting: what each adds to one alone is how long it keeps
       the link, and no part of the latency.
    3. On processors both ends compute while messages stream between them, one each way at a time; what
       compute loses (`measure.contention`) to few bytes and to many is the processor time of a message and
       of each megabyte.

Uses `torch.distributed` as it is: the transport that will carry the plan's messages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from stretto.backend.collectives import Exchange
from stretto.backend.device_time import synchronise
from stretto.backend.gloo_adapter import calm_loops, keeping_core
from stretto.ir.axes import PIPELINE
from stretto.ir.costs import Link
from stretto.ir.mesh import Mesh
from stretto.measure.contention import compute_loss
from stretto.measure.stopwatch import repeats
from stretto.price.calibration import line_through

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
a fit of disturbed messages may show any rate."""

SLOW_US = 400_000.0
"""A probe that takes longer is not sent again in bigger sizes: a slow link has shown its rate by then."""

BURST = 16
"""Messages of step 2 that are under way at once. Assumed: enough that what each adds is visible."""

BURSTS = 10
"""How often they are; the fastest counts, as nothing lends to empty messages."""

STREAMED_BYTES = (1024, 262_144)
"""Of the messages of step 3: few, and of a stage's activations, rather small ones. Assumed."""


@dataclass(frozen=True, slots=True)
class ProbedLink:
    """spread: by which share the middle one of the largest messages' rounds took longer than the one that
    counts."""

    link: Link
    spread: float


@calm_loops()
def measure_links(
    pairs: Sequence[tuple[int, int]], device: torch.device, mesh: Mesh | None = None
) -> dict[tuple[int, int], ProbedLink]:
    """Links of (sender, receiver) pairs of pipeline ranks; every rank must call it with the same pairs. mesh:
    how ranks are laid out, when there are axes other than pp; a pair is then measured between all its ranks
    at once. Returns what this rank measured as a sender. Both directions take the same from the processor."""
    rank = dist.get_rank()
    mesh = mesh or Mesh(((PIPELINE, dist.get_world_size()),))
    here = mesh.coordinates(rank)
    result: dict[tuple[int, int], ProbedLink] = {}
    taken: dict[frozenset[int], tuple[float, float]] = {}
    for pair in pairs:
        # This rank's own pair: its coordinates on all other axes.
        sender, receiver = (mesh.rank({**here, PIPELINE: pp_rank}) for pp_rank in pair)
        if rank in (sender, receiver):
            peer = receiver if rank == sender else sender
            one_way = _probe(peer, rank == sender, device)
            both = frozenset(pair)
            if both not in taken:
                taken[both] = _processor_loss(peer, device, one_way)
            if one_way is not None:
                latency_us, bytes_per_us, start_us, spread = one_way
                processor_us, per_mb = taken[both]
                link = Link(latency_us, bytes_per_us, per_mb, "measured", start_us, processor_us)
                result[pair] = ProbedLink(link, spread)
        dist.barrier()
    return result


OneWay = tuple[float, float, float, float]
"""What steps 1 and 2 find: latency in microseconds, bytes a microsecond, what each message keeps the link for
in microseconds, spread."""


def _probe(peer: int, sends: bool, device: torch.device) -> OneWay | None:
    """Steps 1 and 2, on both ends; what the sender finds, None on the receiver."""
    empty = torch.zeros(1, device=device)

    def trip(messages: Sequence[torch.Tensor]) -> float:
        """Microseconds of messages that are under way at once, and of an empty answer to them."""
        synchronise(device)
        start = time.perf_counter_ns()
        Exchange([(dist.isend if sends else dist.irecv)(one, peer) for one in messages]).wait()
        (dist.recv if sends else dist.send)(empty, peer)
        synchronise(device)
        return (time.perf_counter_ns() - start) / 1000.0

    points: list[tuple[int, float]] = []
    for size in SIZES:
        payload = [torch.zeros(size // 4, device=device)]
        first = torch.tensor(trip(payload), device=device)  # for warmth
        (dist.send if sends else dist.recv)(first, peer)  # so that both repeat equally often
        count = repeats(float(first), ROUNDS_US, ROUNDS, MOST_ROUNDS)
        ascending = sorted(trip(payload) for _ in range(count))
        fast = int(QUARTER * count) if points else 0  # nothing lends to the empty one
        points.append((size, ascending[fast]))
        if float(first) >= SLOW_US and len(points) > 1:
            break
    many = [torch.zeros(1, device=device) for _ in range(BURST)]
    burst_us = min(trip(many) for _ in range(BURSTS))
    if not sends:
        return None
    spread = statistics.median(ascending) / ascending[fast] - 1.0
    latency_us, bytes_per_us = _fit(points, FASTEST.get(device.type, FASTEST["cuda"]))
    # What each adds to one alone; no more than one alone takes.
    start_us = min(latency_us, max(0.0, burst_us - points[0][1]) / (BURST - 1))
    return latency_us - start_us, bytes_per_us, start_us, spread


def _fit(points: Sequence[tuple[int, float]], fastest: float = FASTEST["cuda"]) -> tuple[float, float]:
    """(latency_us, bytes_per_us) from (bytes, round trip us); the empty answer is half of the first."""
    half = points[0][1] / 2.0
    one_way = [(nbytes, max(us - half, 0.1)) for nbytes, us in points]
    # Weights of squares are 1 / us: the rate is that of large messages.
    sizes, times = np.array(one_way).T
    slope, least_us = np.polyfit(sizes, times, 1, w=times**-0.5)
    if slope <= 0.0:
        # Noise beyond the link's own time: the largest message shows at least what it took.
        nbytes, us = one_way[-1]
        slope, least_us = us / nbytes, 0.0
    # An empty message cannot be much faster than half of its round trip, whatever the line says.
    return max(float(least_us), half / 2.0), 1.0 / max(float(slope), 1.0 / fastest)


def _processor_loss(peer: int, device: torch.device, one_way: OneWay | None) -> tuple[float, float]:
    """Step 3, on both ends: microseconds of compute lost to a message, and for each 10**6 bytes; 0 on an
    accelerator, whose links copy. one_way: what the sender has measured; None on the receiver."""
    if device.type != "cpu":
        return 0.0, 0.0

    losses: list[tuple[int, float]] = []
    for nbytes in STREAMED_BYTES:
        alone_us = 0.0 if one_way is None else one_way[0] + one_way[2] + nbytes / one_way[1]
        out, into = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)

        def start(out: torch.Tensor = out, into: torch.Tensor = into) -> Exchange:
            with keeping_core():
                return Exchange([dist.isend(out, peer), dist.irecv(into, peer)])

        def meet(us: float) -> float:
            mine = float(torch.tensor(us))  # as the peer gets it: both repeat equally often
            return max(mine, _swap(mine, peer))

        result = compute_loss(start, meet(alone_us), meet, device)
        # Each message costs its sender and its receiver; a rank was both. No op of a plan is the call.
        loss_us = (result.processor_us + result.start_us) / 2
        losses.append((nbytes, (loss_us + _swap(loss_us, peer)) / 2))
    return line_through(losses)


def _swap(mine: float, peer: int) -> float:
    """What a peer says, which receives this; also brings the two together in time."""
    theirs = torch.zeros(1)
    Exchange([dist.isend(torch.tensor([mine]), peer), dist.irecv(theirs, peer)]).wait()
    return float(theirs)
