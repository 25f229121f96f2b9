"""Clocks for the ops of a program: the host's, or an accelerator's events.

    begin(phase)    a phase of ops begins
    op(name)        the op of this name is called next
    end(rounds)     the microseconds of the phase; those of its ops go to `rounds`

`stretto.measure.profile` says what is measured with them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch

from stretto.backend.device_delay import DeviceDelay, mark
from stretto.ir.action import Phase
from stretto.processor.quota import quota_share

AHEAD = 1.5
"""How long the device is kept busy, over what the host last took to queue the phase. Assumed."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """What the rounds of one stage took. shares: by op, with clocks; thread_shares: the same of the computing
    thread, under a quota; totals: by phase, without clocks."""

    shares: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    thread_shares: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    totals: dict[Phase, list[float]] = field(default_factory=lambda: defaultdict(list))


class Stopwatch(Protocol):
    def begin(self, phase: Phase) -> None: ...

    def op(self, name: str) -> None: ...

    def end(self, rounds: Rounds | None) -> float: ...


class HostStopwatch:
    """The host's clock: an op has ended when its call has."""

    def __init__(self, device: torch.device) -> None:
        self._threads = quota_share() < 1.0
        self._taken: list[tuple[str, int, int]] = []

    def begin(self, phase: Phase) -> None:
        self._taken = []
        self._begin = time.perf_counter_ns()

    def op(self, name: str) -> None:
        mine = time.thread_time_ns() if self._threads else 0
        self._taken.append((name, time.perf_counter_ns(), mine))

    def end(self, rounds: Rounds | None) -> float:
        self.op("")
        for (name, start, mine), (_, stop, mine_then) in pairwise(self._taken):
            assert rounds is not None
            rounds.shares[name].append((stop - start) / 1000.0)
            if self._threads:
                rounds.thread_shares[name].append((mine_then - mine) / 1000.0)
        return (self._taken[-1][1] - self._begin) / 1000.0


class DeviceStopwatch:
    """Events on the stream that computes, behind work that lets the host get ahead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._delay = DeviceDelay(device)
        self._queued_us: dict[tuple[Phase, bool], float] = {}

    def begin(self, phase: Phase) -> None:
        torch.cuda.synchronize(self._device)
        self._phase = phase
        known = [us for (of, _), us in self._queued_us.items() if of is phase]
        self._delay.spend(AHEAD * max(known, default=0.0))
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._began_ns = time.perf_counter_ns()
        self._begin = self._mark()

    def op(self, name: str) -> None:
        self._events.append((name, self._mark()))

    def end(self, rounds: Rounds | None) -> float:
        self.op("")
        self._queued_us[self._phase, rounds is None] = (time.perf_counter_ns() - self._began_ns) / 1000.0
        _, end = self._events[-1]
        end.synchronize()
        for (name, start), (_, stop) in pairwise(self._events):
            assert rounds is not None
            rounds.shares[name].append(1000.0 * start.elapsed_time(stop))
        return 1000.0 * float(self._begin.elapsed_time(end))

    def _mark(self) -> torch.cuda.Event:
        return mark(torch.cuda.current_stream(self._device))
