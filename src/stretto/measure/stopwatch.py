"""Clocks for the ops of a program: the host's, or an accelerator's events.

    begin(phase)    a phase of ops begins
    op(name)        the op of this name is called next
    end(rounds)     the microseconds of the phase; those of its ops go to `rounds`

`stretto.measure.profile` says what is measured with them.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from stretto.backend.device_time import DeviceDelay, mark
from stretto.ir.action import Phase
from stretto.processor.quota import quota_share

AHEAD = 1.5
"""How long the device is kept busy, over what the host takes to queue the phase. Assumed."""

ALONE = 2
"""Runs of a phase before that. The first also looks for kernels."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """What the rounds of one stage took. shares: by op, with clocks; thread_shares: the same of the computing
    thread, under a quota; totals: by phase, without clocks."""

    shares: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    thread_shares: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    totals: dict[Phase, list[float]] = field(default_factory=lambda: defaultdict(list))


class HostStopwatch:
    """The host's clock: an op has ended when its call has."""

    def __init__(self) -> None:
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
    """Events on the stream that computes, behind work that lets the host get ahead. The first runs of a phase
    show how long the host takes to queue it, without such work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._delay = DeviceDelay(device)
        self._host_us: dict[Phase, float] = {}
        self._runs: Counter[Phase] = Counter()

    def begin(self, phase: Phase) -> None:
        torch.cuda.synchronize(self._device)
        self._phase = phase
        self._runs[phase] += 1
        if self._runs[phase] > ALONE:
            self._delay.spend(AHEAD * self._host_us[phase])
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._began_ns = time.perf_counter_ns()
        self._begin = self._mark()

    def op(self, name: str) -> None:
        self._events.append((name, self._mark()))

    def end(self, rounds: Rounds | None) -> float:
        self.op("")
        if self._runs[self._phase] <= ALONE:
            host_us = (time.perf_counter_ns() - self._began_ns) / 1000.0
            self._host_us[self._phase] = min(host_us, self._host_us.get(self._phase, host_us))
        _, end = self._events[-1]
        end.synchronize()
        for (name, start), (_, stop) in pairwise(self._events):
            assert rounds is not None
            rounds.shares[name].append(1000.0 * start.elapsed_time(stop))
        return max(1000.0 * float(self._begin.elapsed_time(end)), self._host_us[self._phase])

    def _mark(self) -> torch.cuda.Event:
        return mark(torch.cuda.current_stream(self._device))


Stopwatch = HostStopwatch | DeviceStopwatch


def repeats(once_us: float, enough_us: float, least: int, most: int) -> int:
    """How often to repeat what takes `once_us`: for about `enough_us`, within the limits."""
    return int(min(most, max(least, enough_us / max(once_us, 0.1))))
