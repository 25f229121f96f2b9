"""A transport without peers: what a lone rank sends and receives takes the time that its plan predicts.

May touch `stretto.simulate` and `stretto.verify.trace`. The contract:

1. Lanes, network cards and the other places of the pipeline are those of the simulation, which goes on while
   this rank really works (`stretto.simulate.live`). The clock is this machine's. A peer that is waited for
   answers when the simulation says, given when this rank really started what the peer waits for.
2. What every lone end does is that of `stretto.runtime.lone`; by it a transfer is known.
3. What is received is made up: messages are small random numbers; other members of a collective hold what
   this rank holds, and an all-reduce leaves its value as it is. It is written while the rank stands, where it
   does.
4. A wait that finds its transfer unfinished sleeps until the end that is predicted, and is recorded.
5. With a load, a thread takes the processor time that the costs say a transfer's threads take, beginning
   with the transfer's start (for a received message: with its wait).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from stretto.ir.mesh import Mesh
from stretto.ir.plan import Communicator, Plan
from stretto.ir.transfers import processor_us
from stretto.runtime.lone import LoneEnd
from stretto.simulate.clock import Moment
from stretto.simulate.collectives import Collective
from stretto.simulate.live import Live, calls_of, messages_of, ready_windows
from stretto.verify.trace import EventKind, ends_of

SPIN_US = 150.0
"""The end of a sleep that is spent asking the clock. Measured: Linux wakes a sleeper 50 to 100 us late."""

NOISE = 0.02
"""Standard deviation of made-up values: that of freshly initialised weights."""

CHUNK = 2**15
"""Elements that the load copies at a time: the most that PyTorch copies on the calling thread alone (its
GRAIN_SIZE)."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The rank stood from start to end for a communication that was under way from `begun_us` on. Times are
    microseconds from the step's start."""

    name: str
    start_us: float
    begun_us: float
    end_us: float


class EmulatedTransport(LoneEnd["Emulated"]):
    """The end of rank `rank` of a plan. `begin` comes before each step and `end` after it.

    load: take the predicted processor time of transfers as well. Raises PlanError for a plan that cannot be
    simulated.
    """

    def __init__(self, plan: Plan, rank: int, *, load: bool = False) -> None:
        super().__init__(rank, plan.world)
        self._plan = plan
        self._place = plan.mesh.place(rank)
        self._windows = ready_windows(plan)
        self._works = calls_of(plan, self._place, self._windows)
        self._sends = messages_of(plan, self._place, EventKind.SEND)
        self._posts = messages_of(plan, self._place, EventKind.RECV)
        self._noise: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
        self._load = LoadThread() if load else None
        self.idle: list[Idle] = []
        self.emulation_us = 0.0
        self._live = Live(plan, self._place, self._windows)
        self._origin_ns = 0

    # The step.

    def begin(self) -> None:
        """A step begins now."""
        self._live = Live(self._plan, self._place, self._windows)
        self._next_send = {lane: deque(messages) for lane, messages in self._sends.items()}
        self._next_post = {lane: deque(messages) for lane, messages in self._posts.items()}
        self._next_work = {lane: deque(works) for lane, works in self._works.items()}
        self.idle = []
        self.emulation_us = 0.0
        self._origin_ns = time.perf_counter_ns()
        self._live.begin()

    def end(self) -> tuple[float, Live]:
        """The step has ended here: (when the last of all places ends, in microseconds; the simulation)."""
        return self._live.end(self.now_us()), self._live

    def now_us(self) -> float:
        """Microseconds since `begin`."""
        return self.us_of(time.perf_counter_ns())

    def us_of(self, time_ns: int) -> float:
        """A reading of the process's clock, as microseconds since `begin`."""
        return (time_ns - self._origin_ns) / 1000.0

    # The transport's words.

    def open(self, communicators: Sequence[Communicator], device: torch.device, mesh: Mesh) -> None:
        for communicator in communicators:
            group = mesh.group(self.rank, communicator.axes, communicator.ranks)
            if group is not None:
                self._members[communicator.name] = group

    def close(self) -> None:
        self._members.clear()
        if self._load is not None:
            self._load.close()

    def send(self, lane: str, value: torch.Tensor, to: int) -> Emulated:
        edge, microbatch = self._take(self._next_send, lane)
        with _Counted(self):
            message = self._live.send(edge, microbatch)
        self._owe_message(edge)
        return Emulated(self, message.left, message.name)

    def recv(self, lane: str, buffer: torch.Tensor, source: int) -> Emulated:
        edge, microbatch = self._take(self._next_post, lane)
        with _Counted(self):
            message = self._live.post(edge, microbatch)

        def arrive() -> None:
            self._owe_message(edge)
            buffer.copy_(self._made_up(buffer))

        return Emulated(self, message.arrived, message.name, arrive)

    # Behind them.

    def _collective(self, lane: str, fill: Callable[[], object] | None = None) -> Emulated:
        work, microbatch = self._take(self._next_work, lane)
        with _Counted(self):
            made: Collective = self._live.start(work, microbatch)
        if self._load is not None:
            self._load.owe(made.time.processor * made.time.us)
        return Emulated(self, made.done, made.name, fill)

    def _owe_message(self, edge: int) -> None:
        if self._load is not None:
            link = self._plan.costs.link(*ends_of(self._plan, edge))
            self._load.owe(processor_us(link, self._plan.job.edges[edge].spec.nbytes))

    def _made_up(self, like: torch.Tensor) -> torch.Tensor:
        """Step 3."""
        key = (like.shape, like.dtype)
        if key not in self._noise:
            made = torch.zeros_like(like)
            if like.is_floating_point():
                made.normal_(0.0, NOISE)
            self._noise[key] = made
        return self._noise[key]

    def wait_for(self, moment: Moment, name: str, fill: Callable[[], object] | None) -> None:
        """Step 4."""
        start_us = self.now_us()
        end_us = start_us
        with _Counted(self):
            if not moment.happened:
                end_us = self._live.until(moment, name)
        if fill is not None:
            with torch.no_grad():
                fill()
        if end_us <= start_us:
            return
        self._sleep_until(end_us)
        begun_us = start_us if moment.begun_us is None else moment.begun_us
        self.idle.append(Idle(name, start_us, begun_us, self.now_us()))

    def _sleep_until(self, time_us: float) -> None:
        left_us = time_us - self.now_us()
        if left_us > SPIN_US:
            time.sleep((left_us - SPIN_US) / 1e6)
        while self.now_us() < time_us:
            pass


class _Counted:
    """The simulation catches up with the clock, and what it takes is counted: a real transport has no such
    work on the rank's own thread."""

    def __init__(self, end: EmulatedTransport) -> None:
        self._end = end

    def __enter__(self) -> None:
        self._start_us = self._end.now_us()
        self._end._live.advance(self._start_us)

    def __exit__(self, *_: object) -> None:
        self._end.emulation_us += self._end.now_us() - self._start_us


class Emulated:
    """A transfer under way. fill: what writes the received values."""

    def __init__(
        self,
        end: EmulatedTransport,
        moment: Moment,
        name: str,
        fill: Callable[[], object] | None = None,
    ) -> None:
        self._end, self._moment, self._name, self._fill = end, moment, name, fill

    def wait(self) -> None:
        self._end.wait_for(self._moment, self._name, self._fill)


class LoadThread:
    """A thread that takes processor time, as a transport does that copies on the cores that compute."""

    def __init__(self) -> None:
        self._owed_us = 0.0
        self._changed = threading.Condition()
        self._closed = False
        self.done_us = 0.0
        self._thread = threading.Thread(target=self._work, name="load", daemon=True)
        self._thread.start()

    def owe(self, us: float) -> None:
        """So much processor time is to be taken from now on."""
        if us > 0:
            with self._changed:
                self._owed_us += us
                self._changed.notify()

    def close(self) -> None:
        """Stop at once; what is still owed is not taken."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        source, target = torch.zeros(2, CHUNK)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._owed_us > 0)
                if self._closed:
                    return
            start_ns = time.thread_time_ns()
            target.copy_(source)  # gives the interpreter free meanwhile
            took_us = (time.thread_time_ns() - start_ns) / 1000.0
            with self._changed:
                self._owed_us -= took_us
                self.done_us += took_us
