"""The measured timeline: its accounts, its names, its files, and what it costs to measure."""

from __future__ import annotations

import copy
import itertools
import time
from dataclasses import replace

import pytest
import torch

import stretto
from stretto.capturing.trace import trace
from stretto.ir.plan import Plan
from stretto.ir.timeline import COMPUTE_LANE, SpanKind, Stall, Timeline
from stretto.models.gpt import next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.price.cluster import described_costs
from stretto.runtime.record import DeviceClock, HostClock, Marks, build_timeline
from stretto.runtime.torch_transport import TorchTransport
from tests.capturing.zoo import Chain, mean_square, rows
from tests.clusters import cores
from tests.families import ONE_STAGE
from tests.runtime.equality import gpt, job_of, lowered, plan_of, tokens
from tests.verifying.plans import hand_schedule


def measured(plan: Plan, model: torch.nn.Module, batch: torch.Tensor) -> Timeline:
    def work(runner: stretto.Runner) -> Timeline:
        for _ in range(2):
            runner.step(batch)
        return runner.timeline()

    found = stretto.run_threads(plan, lambda _: copy.deepcopy(model), work)
    assert all(timeline == found[0] for timeline in found), "every rank is told the same"
    return found[0]


def gpt_plan(family: str, stages: int = 2) -> Plan:
    return plan_of(
        job_of(trace(gpt(True), tokens(4, columns=8), next_token_loss, microbatches=4), stages, 4), family
    )


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in ("1f1b", "zb-h2") else pytest.mark.slow) for f in ONE_STAGE]
)
def test_accounts_add_up_on_every_rank(family: str) -> None:
    plan = gpt_plan(family, 4)
    timeline = measured(plan, gpt(True), tokens(4, columns=8))
    for rank in range(plan.ranks):
        parts = [
            timeline.total_us(kind, rank) for kind in (SpanKind.COMPUTE, SpanKind.EXPOSED, SpanKind.BUBBLE)
        ]
        assert sum(parts) == pytest.approx(timeline.step_us, rel=0.01)
        assert parts[0] > 0
        spans = sorted(
            (s for s in timeline.spans if s.rank == rank and s.lane == COMPUTE_LANE), key=lambda s: s.start_us
        )
        assert all(a.end_us <= b.start_us + 1e-3 for a, b in itertools.pairwise(spans))
        assert spans[0].start_us >= 0
        assert spans[-1].end_us <= timeline.step_us + 1e-3


@pytest.mark.parametrize("family", ["1f1b", "zb-h2"])
def test_names_are_those_of_the_simulated_timeline(family: str) -> None:
    plan = gpt_plan(family)
    timeline = measured(plan, gpt(True), tokens(4, columns=8))
    simulated = stretto.simulate(plan)

    def names(of: Timeline, kind: SpanKind) -> set[tuple[int, str, str]]:
        return {(s.rank, s.lane, s.name) for s in of.spans if s.kind is kind}

    # The loss and tied sums are messages in the simulation only: collectives are not marked one by one.
    lanes = {COMPUTE_LANE, "pp 0>1", "pp 1>0"}
    for kind in (SpanKind.COMPUTE, SpanKind.MESSAGE):
        assert {n for n in names(timeline, kind) if n[1] in lanes} == {
            n for n in names(simulated, kind) if n[1] in lanes
        }
    sizes = {s.name: (s.nbytes, s.sender) for s in simulated.spans if s.kind is SpanKind.MESSAGE}
    for span in timeline.spans:
        if span.kind is SpanKind.MESSAGE:
            assert (span.nbytes, span.sender) == sizes[span.name]


def made_up(plan: Plan, start: int, late: int) -> list[Marks]:
    """Rank 0 runs a forward and sends; rank 1 waits for it from the start. In ns of each rank's clock."""
    edge = plan.job.edges[0]
    one = Marks(start, start + 100_000, [("0F", (0,), start + 10_000, start + 60_000)])
    one.sends.append((edge.index, 0, start + 50_000))
    other = Marks(late, late + 100_000, [("1F", (0,), late + 5_000, late + 90_000)])
    other.waits.append((edge.index, 0, late + 10_000, late + 70_000))
    return [one, other]


def test_waits_of_a_rank_with_no_op_left_are_bubbles() -> None:
    """As the simulation counts them: rank 1 has sent its last and waits while rank 0 still works."""
    plan = gpt_plan("1f1b")
    first, last = made_up(plan, 0, 0)
    last.finishes.append(("tied 0", plan.communicators[0].name, 91_000, 95_000))
    first.runs.append(("0F", (1,), 60_000, 100_000))
    timeline = build_timeline(plan, [first, last], [0.0, 0.0])
    closing = [s for s in timeline.spans if s.name == "tied 0" and s.lane == COMPUTE_LANE]
    assert [(span.kind, span.duration_us) for span in closing] == [(SpanKind.BUBBLE, pytest.approx(4.0))]


def test_a_wait_is_a_bubble_until_the_message_exists_and_exposed_after() -> None:
    plan = gpt_plan("1f1b")
    # Rank 1's clock is a second ahead of rank 0's.
    timeline = build_timeline(plan, made_up(plan, 0, 10**9), [0.0, -1e6])
    assert timeline.step_us == pytest.approx(100.0)
    # Waited from 10 to 70 us; the message was sent at 50.
    assert timeline.total_us(SpanKind.EXPOSED, 1) == pytest.approx(20.0)
    assert timeline.total_us(SpanKind.COMPUTE, 1) == pytest.approx(25.0)
    assert timeline.total_us(SpanKind.BUBBLE, 1) == pytest.approx(40.0 + 5.0 + 10.0)
    assert timeline.total_us(SpanKind.EXPOSED, 0) == 0
    (message,) = (s for s in timeline.spans if s.kind is SpanKind.MESSAGE)
    assert (message.sent_us, message.end_us) == (pytest.approx(50.0), pytest.approx(70.0))


def test_clocks_of_two_machines_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    end = object.__new__(TorchTransport)
    ahead_ns = itertools.chain([5_000_000, 5_200_000, 9_000_000], itertools.repeat(5_100_000))

    def all_gather(item: object) -> list[object]:
        return [item + next(ahead_ns), item] if isinstance(item, int) else [f"rank 0's {item}", item]

    monkeypatch.setattr(end, "all_gather", all_gather)
    assert end.clock_offset_us() == pytest.approx(5_100.0)
    monkeypatch.setattr(end, "all_gather", lambda item: [item, item])
    assert end.clock_offset_us() == 0.0, "one machine, one clock"


def test_a_measured_timeline_tells_actions_of_one_window_apart() -> None:
    model, batch = Chain(), rows(8)
    job = job_of(trace(model, batch, mean_square, microbatches=2), 1, 2)
    plan = lowered(job, hand_schedule((0,), 2, "0F0 (0F1;0B0)OVERLAP_F_B 0B1"))
    timeline = measured(plan, model, batch)
    spans = [span for span in timeline.spans if span.kind is SpanKind.COMPUTE]
    assert {span.name for span in spans} == {"0F0", "0F1", "0B0", "0B1"}
    assert all(span.name == f"{span.stage}{span.phase}{span.microbatch}" for span in spans)
    for before, after in itertools.pairwise(spans):
        assert before.end_us <= after.start_us


def test_who_waits_for_whom() -> None:
    """Rank 1 begins its part of a sum 30 us after rank 0, which waits for it from the start."""
    parallel = stretto.Parallel(dp=2)
    job = stretto.capture(Chain(), rows(4), mean_square, parallel)
    plan = make_plan(job, described_costs(job, cores(latency_us=20.0, link_gbps=0.05)))
    loss = "dp loss"
    marks = [Marks(0, 100_000), Marks(0, 100_000)]
    for m, began, waits in zip(marks, (10_000, 40_000), (10_000, 41_000), strict=True):
        m.runs.append((plan.orders[0][0].ref, (0,), 0, 90_000))
        m.starts.append((loss, 4, began))
        m.finishes.append((loss, "dp", waits, 60_000))
        m.finishes.append(("dp 0.0", "dp", 91_000, 99_000))  # between windows
    timeline = build_timeline(plan, marks, [0.0, 0.0])
    assert timeline.stalls == (Stall("dp", 0, 1, 30.0),)
    assert timeline.busy_us == (40.0, 71.0)


# `runner.report()` shows what is known: the prediction, where no step was measured or can be read.


def runner_of_one() -> stretto.Runner:
    model = Chain()
    job = stretto.capture(model, rows(), mean_square, stretto.Parallel(microbatches=2))
    plan = stretto.plan(job, cores())
    (runner,) = stretto.run_threads(plan, lambda _: model, lambda runner: runner)
    return runner


def test_before_a_step_it_is_the_prediction() -> None:
    found = runner_of_one().report()
    assert found.measured is None
    lines = str(found).splitlines()
    assert lines[-1] == "not measured: there is no measured step yet: call step(batch) first"
    assert any(line.split()[:2] == ["predicted", "step"] for line in lines)
    assert any("peak by rank" in line for line in lines)


def test_marks_that_cannot_be_read_leave_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an accelerator's events may not be, after an error that the script has dealt with."""
    runner = runner_of_one()
    runner.step(rows())

    def broken(*_: object) -> None:
        raise torch.AcceleratorError("an event was lost")

    monkeypatch.setattr(HostClock, "read", broken)
    found = runner.report()
    assert "\nnot measured: AcceleratorError: " in str(found)
    assert "compute by rank" in str(found)
    monkeypatch.undo()
    assert runner.report().measured is not None
    assert "predicted, measured" in str(runner.report())


# Marks of an accelerator's step, read off events that are made up here; `tests/gpu` has real ones.


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
    for _ in range(2):
        marks = Marks(start=clock.now())  # type: ignore[arg-type]
        begun = clock.now()
        marks.runs.append(("0F", (3,), begun, clock.now()))  # type: ignore[arg-type]
        marks.waits.append((1, 2, clock.now(), clock.now()))  # type: ignore[arg-type]
        marks.end = clock.now()  # type: ignore[assignment]
        marks.peak_bytes = 17
        before = time.perf_counter_ns()
        read = clock.read(marks)
        after = time.perf_counter_ns()
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
    runner._now.graph = Graph(runner)  # type: ignore[assignment]
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
        assert runner._now.last is read[0]
    assert runner.timeline().step_us > 0
    assert len(read) == 1
