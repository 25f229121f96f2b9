"""The clock that a step is marked with: the host's on processors, the device's own on accelerators.

On an accelerator the host queues work and goes on, so its clock knows when something was queued. There a mark
is an event on the stream that computes: what the device has done when it comes to it. Nothing waits for it;
the marks are read when the step is asked for.

    1. `now` gives a mark, `read` a step's marks in nanoseconds of this process's monotonic clock.
    2. Events are reused from step to step: the marks of a step are lost when the next begins.
    3. The device's time is tied to the host's by one event that the host waits for. Events differ exactly, so
       that what a rank does is exact, however rough the tie.
"""

from __future__ import annotations

import time
from dataclasses import fields, replace
from typing import Any, Protocol

import torch

from stretto.runtime.record import Marks


class Clock(Protocol):
    """What `Marks` are made with."""

    def begin(self) -> None:
        """A step begins."""

    def now(self) -> Any:
        """A mark: what `read` will know the time of."""

    def read(self, marks: Marks) -> Marks:
        """The same marks, in nanoseconds of `time.perf_counter_ns`; those that are read already stay."""


class HostClock:
    """Marks are nanoseconds at once."""

    now = staticmethod(time.perf_counter_ns)

    def begin(self) -> None:
        """Nothing is kept."""

    def read(self, marks: Marks) -> Marks:
        return marks


class DeviceClock:
    """Marks are events on the current stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def begin(self) -> None:
        """Step 2."""
        self._used = 0

    def now(self) -> torch.cuda.Event:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._events[self._used]
        self._used += 1
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, marks: Marks) -> Marks:
        """Step 3. Waits for the device. The sooner after the step, the better: two clocks drift apart, and a
        long time between events is known to fewer digits."""
        if not isinstance(marks.start, torch.cuda.Event):
            return marks
        tie = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        tie.record(torch.cuda.current_stream(self._device))
        tie.synchronize()
        host_ns = time.perf_counter_ns()
        start: Any = marks.start
        start_ns = host_ns - round(1e6 * start.elapsed_time(tie))

        def ns(mark: Any) -> Any:
            if isinstance(mark, torch.cuda.Event):
                return start_ns + round(1e6 * start.elapsed_time(mark))
            return [tuple(map(ns, item)) for item in mark] if isinstance(mark, list) else mark

        return replace(marks, **{field.name: ns(getattr(marks, field.name)) for field in fields(marks)})


def clock_of(device: torch.device) -> Clock:
    """The clock of a device's work."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
