"""A transport without peers: what a single rank sends and receives takes the time that its plan predicts.

1. Lanes, network cards and the other pipeline ranks are those of the simulation, which goes on while this
   rank really works (`stretto.simulating.live`). A peer that is waited for answers at the time of the
   simulation, given when this rank really started what the peer waits for.
2. The k-th start on a lane is the k-th that the plan's order has there.
3. What is received is made up: messages are small random numbers; other members of a collective have what
   this rank has, and an all-reduce leaves its value as it is. A transport's own threads or a device's
   copy engine would write it, not the rank: so the step's clock is stopped meanwhile.
4. A wait that finds its transfer unfinished sleeps until the end that is predicted, and is recorded.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from stretto.backend.collectives import arrived, put_together
from stretto.errors import RunError
from stretto.ir.collectives import KINDS
from stretto.ir.plan import Plan
from stretto.ir.timeline import Span
from stretto.runtime.record import idle_spans
from stretto.runtime.transport import Handle, Transport
from stretto.simulating.cards import Moment
from stretto.simulating.collectives import RunningCollective
from stretto.simulating.live import Live, calls_of, messages_of
from stretto.simulating.windows import make_ready
from stretto.verifying.trace import EventKind

SPIN_US = 150.0
"""The end of a sleep that is spent asking the clock. Measured: Linux wakes a sleeper 50 to 100 us late."""

NOISE = 0.02
"""Standard deviation of made-up values: that of freshly initialised weights."""


class SingleRankEnd(Transport):
    """The transport of rank `rank` of a plan, of which no other runs. `begin` comes before each step.

    Raises PlanError for a plan that cannot be simulated.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(rank, plan.world)
        self._plan = plan
        self._pp_rank = plan.mesh.pp_rank(rank)
        self._windows = {name: make_ready(plan, name) for name in plan.windows}
        self._works = calls_of(plan, self._pp_rank, self._windows)
        self._sends = messages_of(plan, self._pp_rank, EventKind.SEND)
        self._posts = messages_of(plan, self._pp_rank, EventKind.RECV)
        self._made_up: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def begin(self) -> None:
        """A step begins: nothing that the plan's order has on a lane has started."""
        self._next_send = {lane: deque(messages) for lane, messages in self._sends.items()}
        self._next_post = {lane: deque(messages) for lane, messages in self._posts.items()}
        self._next_work = {lane: deque(works) for lane, works in self._works.items()}

    @abstractmethod
    def _collective(self, lane: str, fill: Callable[[], object] | None = None) -> Handle:
        """Start the lane's next collective; `fill` writes what it gives."""

    def broadcast(self, lane: str, value: torch.Tensor, source: int) -> Handle:
        return self._collective(lane)

    def collective(
        self, lane: str, kind: str, result: torch.Tensor, value: torch.Tensor, how: str = ""
    ) -> Handle:
        row, members = KINDS[kind], self.members_of(lane)
        if row.in_place:
            return self._collective(lane)
        me = members.index(self.rank)
        parts = arrived(row, [value] * len(members), me)
        return self._collective(
            lane, lambda: put_together(row, result, parts[me : me + 1] if row.sums else parts, how)
        )

    def all_gather(self, item: Any) -> list[Any]:
        return [item] * self.size

    def _fill(self, buffer: torch.Tensor, scale: float = NOISE) -> None:
        """Write made-up values of normal distribution into what is received."""
        key = (buffer.shape, buffer.dtype)
        if key not in self._made_up:
            built = self._made_up[key] = torch.zeros_like(buffer)
            if scale and buffer.is_floating_point():
                built.normal_(0.0, scale)
        buffer.copy_(self._made_up[key])

    def _take(self, queues: dict[str, deque[Any]], lane: str) -> Any:
        """What the plan's order starts next on a lane. Raises RunError when that is nothing."""
        self.members_of(lane)
        if not queues.get(lane):
            raise RunError(f"rank {self.rank}: the plan's order has nothing more to start on lane {lane!r}")
        return queues[lane].popleft()


class EmulatedTransport(SingleRankEnd):
    """The end of rank `rank` of a plan. `begin` comes before each step and `end` after it."""

    # The step.

    def begin(self) -> None:
        """A step begins now."""
        super().begin()
        self._live = Live(self._plan, self._pp_rank, self._windows)
        self.idle: list[Span] = []
        # When the clock went on after it had stopped, and for how long it had in all, in nanoseconds.
        self._went_on_ns: list[int] = []
        self._stalled_ns: list[int] = [0]
        self._origin_ns = time.perf_counter_ns()
        self._live.begin()

    def end(self) -> tuple[float, Live]:
        """The step has ended here: (when the last pipeline rank ends, in microseconds; the simulation)."""
        return self._live.end(self.now_us()), self._live

    def now_us(self) -> float:
        """Microseconds since `begin`."""
        return self.us_of(time.perf_counter_ns())

    def us_of(self, time_ns: int) -> float:
        """A reading of the process's clock, as microseconds of the step: since `begin`, without the time in
        which values were made up."""
        stalled_ns = self._stalled_ns[bisect_right(self._went_on_ns, time_ns)]
        return (time_ns - self._origin_ns - stalled_ns) / 1000.0

    # The transport's words.

    def send(self, lane: str, value: torch.Tensor, to: int) -> Handle:
        edge, microbatch = self._take(self._next_send, lane)
        self._live.clock.advance(self.now_us())
        message = self._live.network.send(edge, microbatch)
        return Handle(partial(self._wait_for, message.left, message.name, None))

    def recv(self, lane: str, buffer: torch.Tensor, source: int) -> Handle:
        edge, microbatch = self._take(self._next_post, lane)
        self._live.clock.advance(self.now_us())
        message = self._live.network.post(edge, microbatch)
        fill = partial(self._fill, buffer)
        return Handle(partial(self._wait_for, message.arrived, message.name, fill))

    # Behind them.

    def _collective(self, lane: str, fill: Callable[[], object] | None = None) -> Handle:
        work, microbatch = self._take(self._next_work, lane)
        self._live.clock.advance(self.now_us())
        built: RunningCollective = self._live.collectives.start(work, self._pp_rank, microbatch)
        return Handle(partial(self._wait_for, built.done, work.name, fill))

    def _wait_for(self, moment: Moment, name: str, fill: Callable[[], object] | None) -> None:
        start_us = self.now_us()
        self._live.clock.advance(start_us)
        end_us = start_us if moment.happened else self._live.until(moment, name)
        if fill is not None:  # while the step's clock is stopped
            begun_ns = time.perf_counter_ns()
            with torch.no_grad():
                fill()
            now_ns = time.perf_counter_ns()
            self._went_on_ns.append(now_ns)
            self._stalled_ns.append(self._stalled_ns[-1] + now_ns - begun_ns)
        if end_us <= start_us:
            return
        if (rest_us := end_us - self.now_us() - SPIN_US) > 0:
            time.sleep(rest_us / 1e6)
        while self.now_us() < end_us:
            pass
        begun_us = start_us if moment.begun_us is None else moment.begun_us
        self.idle += idle_spans(self._pp_rank, name, start_us, begun_us, self.now_us())
