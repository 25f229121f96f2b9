"""The emulated transport of an accelerator: every lane is a side stream, on which a transfer is a kernel that
lasts as long as the plan predicts.

1. A lane is a stream of high priority. A transfer waits there for what was queued on the compute stream
   before it (an event), then takes its time; a wait makes the compute stream wait for the transfer's event.
   The processor that queues the work never stalls.
2. What takes time is a kernel that leaves the device free (`stretto.backend.device_time`).
3. A received message begins at the time of the plan's simulation, or when its receive is posted and the one
   before it has arrived. Peers do not answer to this rank's pace: nothing knows the device's time meanwhile.
4. Lanes do not share network cards here. Times are those of the device's events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from stretto.backend.device_time import DeviceDelay, mark
from stretto.ir.costs import Link
from stretto.ir.mesh import Mesh
from stretto.ir.plan import Communicator, Plan
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline
from stretto.ir.transfers import message_us
from stretto.runtime.emulated_transport import SingleRankEnd
from stretto.runtime.record import LEAST_SPAN_US, idle_spans
from stretto.runtime.transport import Handle
from stretto.simulating import simulate
from stretto.verifying.trace import ends_of

HIGH_PRIORITY = -1
"""The priority of lanes; streams have 0 by default, and lower numbers go first."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A transfer that was queued."""

    name: str
    lane: str
    begun: torch.cuda.Event
    ended: torch.cuda.Event


class CudaTransport(SingleRankEnd):
    """The end of rank `rank` of a plan on `device`. `begin` comes before each step, `timeline` after it."""

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        super().__init__(plan, rank)
        self._device = device
        predicted = [s for s in simulate(plan).spans if s.rank == self._pp_rank and s.sender is not None]
        self._begins_us = {s.name: s.start_us for s in predicted}
        """Name of a received message -> when it begins in the simulation."""
        self._ends_us = {s.name: s.end_us for s in predicted}
        self._streams: dict[str, torch.cuda.Stream] = {}

    def open(self, communicators: Sequence[Communicator], device: torch.device, mesh: Mesh) -> None:
        super().open(communicators, device, mesh)
        for lane in self.members:
            stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)  # type: ignore[no-untyped-call]
            self._streams[lane] = stream
        self._delay = DeviceDelay(device)

    def close(self) -> None:
        super().close()
        self._streams.clear()

    # The step.

    def begin(self) -> None:
        """A step begins here."""
        torch.cuda.synchronize(self._device)
        super().begin()
        self._until_us: dict[str, float] = {}
        self._taken: list[Taken] = []
        self._waits: list[tuple[Taken, torch.cuda.Event, torch.cuda.Event]] = []
        self._start = mark(torch.cuda.current_stream(self._device))
        for stream in self._streams.values():
            stream.wait_event(self._start)

    def timeline(self, peak_bytes: int) -> Timeline:
        """What the device did since `begin`; the compute lane has one span between two waits."""
        end = mark(torch.cuda.current_stream(self._device))
        torch.cuda.synchronize(self._device)

        def us(event: torch.cuda.Event) -> float:
            return 1000.0 * float(self._start.elapsed_time(event))

        pp_rank, step_us = self._pp_rank, us(end)
        spans = [
            Span(pp_rank, taken.lane, SpanKind.MESSAGE, taken.name, us(taken.begun), us(taken.ended))
            for taken in self._taken
        ]
        idle = [
            span
            for taken, before, after in self._waits
            for span in idle_spans(pp_rank, taken.name, us(before), us(taken.begun), us(after))
        ]
        cursor = 0.0
        for start_us, end_us in [*((s.start_us, s.end_us) for s in idle), (step_us, step_us)]:
            if start_us - cursor > LEAST_SPAN_US:
                spans.append(Span(pp_rank, COMPUTE_LANE, SpanKind.COMPUTE, "compute", cursor, start_us))
            cursor = max(cursor, end_us)
        spans += idle
        peaks = tuple(peak_bytes if rank == pp_rank else 0 for rank in range(self._plan.ranks))
        members = self._plan.members
        return Timeline("measured", self._plan.ranks, step_us, tuple(spans), peaks, members=members)

    # The transport's words.

    def send(self, lane: str, value: torch.Tensor, to: int) -> Handle:
        edge, microbatch = self._take(self._next_send, lane)
        return self._queue(lane, f"{lane} e{edge}:{microbatch}", self._message_us(edge))

    def recv(self, lane: str, buffer: torch.Tensor, source: int) -> Handle:
        edge, microbatch = self._take(self._next_post, lane)
        name = f"{lane} e{edge}:{microbatch}"
        gap_us = self._begins_us[name] - self._until_us.get(lane, 0.0)
        self._until_us[lane] = self._ends_us[name]
        self._spend(lane, gap_us)
        return self._queue(lane, name, self._message_us(edge), partial(self._fill, buffer, 0.0))

    # Behind them.

    def _collective(self, lane: str, fill: Callable[[], object] | None = None) -> Handle:
        call, _ = self._take(self._next_work, lane)
        return self._queue(lane, call.name, call.time.us, fill)

    def _message_us(self, edge: int) -> float:
        link: Link = self._plan.costs.link(*ends_of(self._plan, edge))
        return message_us(link, self._plan.job.edges[edge].spec.nbytes)

    def _queue(self, lane: str, name: str, us: float, fill: Callable[[], object] | None = None) -> Handle:
        """Step 1: the transfer, behind what is queued on the compute stream and on its lane."""
        stream = self._streams[lane]
        stream.wait_event(mark(torch.cuda.current_stream(self._device)))
        begun = mark(stream)
        self._spend(lane, us)
        if fill is not None:
            with torch.cuda.stream(stream), torch.no_grad():
                fill()
        taken = Taken(name, lane, begun, mark(stream))
        self._taken.append(taken)
        return Handle(partial(self._wait_for, taken))

    def _spend(self, lane: str, us: float) -> None:
        with torch.cuda.stream(self._streams[lane]):
            self._delay.spend(us, lane)

    def _wait_for(self, taken: Taken) -> None:
        stream = torch.cuda.current_stream(self._device)
        before = mark(stream)
        stream.wait_event(taken.ended)
        self._waits.append((taken, before, mark(stream)))
