"""Marks of an accelerator's step, read off events that are made up here; `tests/gpu` has real ones."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

import stretto
from stretto.planning.make_plan import make_plan
from stretto.price.flat import described_costs
from stretto.runtime.record import DeviceClock, Marks
from tests.clusters import cores


class Event:
    """One millisecond after the one that was recorded before it."""

    recorded = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at_ms = -1.0

    def record(self, stream: object) -> None:
        Event.recorded += 1
        self.at_ms = float(Event.recorded)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


def test_marks_become_times_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    clock = DeviceClock(torch.device("cuda", 0))
    for _ in range(2):  # events are used again
        clock.begin()
        marks = Marks(start=clock.now())  # type: ignore[arg-type]
        begun = clock.now()
        marks.runs.append(("0F", (3,), begun, clock.now()))  # type: ignore[arg-type]
        marks.waits.append((1, 2, clock.now(), clock.now()))  # type: ignore[arg-type]
        marks.end = clock.now()  # type: ignore[assignment]
        marks.peak_bytes = 17
        before = time.perf_counter_ns()
        read = clock.read(marks)
        after = time.perf_counter_ns()
        assert len(clock._events) == 6
        # The tie is the seventh event, and is now.
        assert before <= read.start + 6_000_000 <= after
        ms = 1_000_000
        assert read.end - read.start == 5 * ms
        assert read.runs == [("0F", (3,), read.start + ms, read.start + 2 * ms)]
        assert read.waits == [(1, 2, read.start + 3 * ms, read.start + 4 * ms)]
        assert read.peak_bytes == 17
        assert clock.read(read) is read


class Graph:
    """In the place of `StepGraph`: walks a step, then records, then replays."""

    def __init__(self, runner: stretto.Runner) -> None:
        self.runner, self.steps = runner, 0

    @property
    def records(self) -> bool:
        return self.steps == 1

    @property
    def replays(self) -> bool:
        return self.steps > 1

    def step(self, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        self.steps += 1
        return self.runner.state.step(leaves)


def test_marks_are_read_before_steps_are_replayed() -> None:
    """A device's clock and the host's drift apart: marks of long ago would be tied to a wrong time."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    x = torch.ones(2, 4)

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = model(batch).sum()
        return made

    job = stretto.capture(model, x, loss=loss, parallel=stretto.Parallel())
    runner = stretto.Runner(make_plan(job, described_costs(job, cores())), model)
    runner._graph = Graph(runner)  # type: ignore[assignment]
    read: list[Marks] = []

    def look(marks: Marks) -> Marks:
        if not any(marks is one for one in read):
            read.append(replace(marks))
        return read[-1]

    runner.state.clock.read = look  # type: ignore[method-assign]
    runner.step(x)
    assert not runner.replayed
    assert not read
    for _ in range(2):
        runner.step(x)
        assert runner.replayed
        assert len(read) == 1
        assert runner._last is read[0]
    assert runner.timeline().step_us > 0
    assert len(read) == 1
