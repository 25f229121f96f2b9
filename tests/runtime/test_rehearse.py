"""Rehearsal: one rank alone, with real compute and communication that takes the predicted time."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import stretto
from stretto.capturing import capture
from stretto.cli.main import app
from stretto.config import Parallel
from stretto.errors import PlanError, RunError, UsageError
from stretto.ir.action import Phase
from stretto.ir.costs import CollectiveCost, Costs, Link
from stretto.ir.curve import Curve
from stretto.ir.mesh import Mesh
from stretto.ir.plan import Communicator, Plan
from stretto.ir.program import Op
from stretto.ir.timeline import COMPUTE_LANE, SpanKind
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.runtime.emulated_cuda import CudaTransport
from stretto.runtime.emulated_transport import SPIN_US, EmulatedTransport
from stretto.runtime.rank import RankState
from stretto.runtime.rehearse import made_up_batch, made_up_buffers, made_up_parameters, rehearse
from stretto.simulating.cards import Moment
from tests.cells import slow
from tests.runtime.equality import made_up_costs

COLLECTIVE_US = 3000.0
LATENCY_US = 4000.0


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=64, layers=2, hidden=32, heads=4, context=16), seed=1)


def batch() -> Tensor:
    return torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(0))


@functools.cache
def plan_of(**layout: Any) -> Plan:
    """Communication takes milliseconds, and compute what it really takes: next to nothing."""
    job = capture(gpt(), batch(), next_token_loss, Parallel(microbatches=4 // layout.get("dp", 1), **layout))
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    curve = Curve(((0.0, COLLECTIVE_US),))
    collectives = {(axis, kind): CollectiveCost(curve) for axis, _ in job.axes for kind in kinds}
    costs: Costs = replace(
        made_up_costs(job), collectives=collectives, default_link=Link(LATENCY_US, 1e6), action_us=0.0
    )
    costs = replace(costs, op_us=dict.fromkeys(costs.op_us, 20.0))
    return make_plan(job, costs, schedule="1f1b", overlap="local")


LAYOUTS = (
    {"tp": 2},
    {"pp": 2},
    slow({"pp": 2, "tp": 2, "sequence_parallel": True}),
    {"dp": 2},
)


@pytest.mark.quiet
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_takes_what_communication_takes(layout: dict[str, Any]) -> None:
    plan = plan_of(**layout)
    assert plan.prediction is not None
    for rank in range(plan.world):
        place = plan.mesh.coordinates(rank)["pp"]
        guess_us = plan.prediction.step_us - plan.prediction.compute_us[place]
        for _ in range(3):  # a busy machine can spoil a measurement, never make it better thrice
            found = rehearse(plan, rank, steps=3)
            stood_us = found.step_us - found.compute_us
            if stood_us < 2.0 * guess_us:
                break
        assert found.pp_rank == place
        assert len(found.steps_us) == 3
        assert found.step_us == sorted(found.steps_us)[1]
        assert 0.85 * guess_us < stood_us < 2.0 * guess_us
        for axis, _ in plan.job.axes:
            assert 0.85 * plan.prediction.exposed_axis_us[axis][place] < found.exposed_us[axis]
        peak_bytes = plan.prediction.peak_bytes[place]
        assert 0.9 * peak_bytes < found.peak_bytes < 1.1 * peak_bytes
        accounts_us = found.compute_us + found.bubble_us + sum(found.exposed_us.values())
        assert accounts_us == pytest.approx(found.step_us, rel=0.02)


@pytest.mark.parametrize("kind", ["op", "link", "inf"])
def test_a_step_that_never_ends_is_refused_before_it_begins(kind: str) -> None:
    plan = plan_of(pp=2)
    costs = plan.costs
    name = plan.job.stages[1].ops[Phase.F][0].name
    changed = {
        "op": replace(costs, op_us={**costs.op_us, (1, name): 1e15}),
        "inf": replace(costs, op_us={**costs.op_us, (1, name): float("inf")}),
        "link": replace(costs, default_link=Link(1e15, 1e6)),
    }
    with pytest.raises(stretto.StrettoError, match=r"3,600 s can be rehearsed.* plan again") as caught:
        rehearse(replace(plan, costs=changed[kind]), 0)
    if kind == "op":
        assert f"{name!r} of stage 1, 1,000,000,000 s" in str(caught.value)


@pytest.mark.quiet
def test_the_timeline_shows_the_rank_and_its_simulated_peers() -> None:
    for _ in range(3):  # where the machine stops this rank for a moment, its peer has sent before it is
        found = rehearse(plan_of(pp=2), 1, steps=1)
        spans = found.timeline.spans
        waited = [s for s in spans if s.rank == 1 and s.lane == COMPUTE_LANE and s.name == "pp 0>1 e0:0"]
        if len(waited) == 2:
            break
    ran = {span.name for span in spans if span.rank == 1 and span.kind is SpanKind.COMPUTE}
    assert ran == {"1REDUCE_GRAD", *(f"1{phase}{m}" for phase in "FB" for m in range(4))}
    peer = [span for span in spans if span.rank == 0 and span.lane == COMPUTE_LANE]
    assert sum(span.duration_us for span in peer) == pytest.approx(found.step_us, rel=1e-6)
    arrived = {s.name: s.end_us for s in spans if s.rank == 1 and s.sender == 0}
    assert arrived.keys() == {f"pp 0>1 e0:{m}" for m in range(4)}
    assert [span.kind for span in waited] == [SpanKind.BUBBLE, SpanKind.EXPOSED]
    assert waited[1].end_us - arrived["pp 0>1 e0:0"] < 20_000.0, "it goes on when the message is there"
    assert waited[1].end_us >= arrived["pp 0>1 e0:0"]


@pytest.mark.quiet
def test_making_up_what_is_received_is_no_work_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be booked as compute where a transfer had ended before it was waited for."""
    plain = EmulatedTransport._fill

    def slow(end: EmulatedTransport, buffer: Tensor) -> None:
        time.sleep(0.1)
        plain(end, buffer)

    monkeypatch.setattr(EmulatedTransport, "_fill", slow)
    found = rehearse(plan_of(pp=2), 1, steps=1)
    assert found.compute_us < 200_000.0, "four messages, 0.1 s each"
    assert found.step_us < 300_000.0
    assert found.compute_us + sum(found.exposed_us.values()) + found.bubble_us == pytest.approx(
        found.step_us, rel=0.01
    )


def test_a_model_and_a_batch_may_be_given() -> None:
    plan = plan_of(tp=2)
    made_up, given = rehearse(plan, 1, steps=1), rehearse(plan, 1, model=gpt(), batch=batch(), steps=1)
    assert made_up.peak_bytes == given.peak_bytes
    tokens = made_up_batch(plan_of(pp=2).job, torch.device("cpu"), seed=0)["batch"]
    assert 1 < int(tokens.max()) < 64, "rows of the embedding"
    assert "predicted, rehearsed" in str(given)
    assert "exposed tp" in str(given)
    with pytest.raises(UsageError, match="shape"):
        rehearse(plan, 1, batch=batch()[:, :9], steps=1)


def test_a_wait_whose_end_comes_while_it_looks_at_the_clock_does_not_sleep_for_less_than_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = EmulatedTransport(plan_of(tp=2), 0)
    transport.begin()
    # The second look comes shortly before the end; each later one is a second on.
    looks = iter((0.0, 1000.0 - SPIN_US - 1.0, *(1e6 * k for k in range(1, 9))))
    monkeypatch.setattr(transport, "now_us", lambda: next(looks))
    monkeypatch.setattr(transport._live.clock, "advance", lambda _: None)
    monkeypatch.setattr(transport._live, "until", lambda *_: 1000.0)
    transport._wait_for(Moment(), "a wait", None)


# Refusals.


def test_lanes_that_were_not_opened_and_starts_that_are_not_planned_are_refused() -> None:
    plan = plan_of(tp=2)
    transport = EmulatedTransport(plan, 0)
    transport.begin()
    with pytest.raises(RunError, match="lane 'tp' was not opened"):
        transport.broadcast("tp", torch.zeros(1), 0)
    transport.open(
        [Communicator("loss", (0,)), *plan.communicators], torch.device("cpu"), Mesh((("pp", 1), ("tp", 2)))
    )
    transport.begin()
    with pytest.raises(RunError, match="nothing more to start on lane 'loss'"):
        transport.broadcast("loss", torch.zeros(1), 0)


@pytest.mark.parametrize(
    ("changes", "given", "word"),
    [
        ({}, {"rank": 2}, "there is no rank 2"),
        ({}, {"rank": 0, "steps": 0}, "0 steps"),
        ({"communicators": ()}, {"rank": 0}, "the plan cannot run"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(
    changes: dict[str, Any], given: dict[str, Any], word: str
) -> None:
    with pytest.raises((UsageError, PlanError), match=word):
        rehearse(replace(plan_of(tp=2), **changes), **given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_a_device_that_is_not_here_is_refused() -> None:
    plan = plan_of(tp=2)
    with pytest.raises(UsageError, match="captured for cuda"):
        rehearse(replace(plan, job=replace(plan.job, device="cuda")), 0)


@pytest.mark.parametrize(
    ("edited", "message"),
    [
        (lambda op: replace(op, target="aten.mm.other"), "has no operator 'aten.mm.other'"),
        (lambda op: replace(op, target="aten.mm"), "has no operator 'aten.mm'"),
        (lambda op: replace(op, target="aten.__class__.mro"), "has no operator 'aten.__class__.mro'"),
        (lambda op: replace(op, args=(op.args[0],)), "cannot take .*missing"),
        (lambda op: replace(op, args=(*op.args[:1], 1.5)), "cannot take .*float"),
    ],
)
def test_ops_that_cannot_be_computed_are_said_in_one_line(edited: Callable[[Op], Op], message: str) -> None:
    plan = plan_of(pp=2)
    stage = plan.job.stages[0]
    at = next(k for k, op in enumerate(stage.ops[Phase.F]) if op.target == "aten.mm.default")
    ops = list(stage.ops[Phase.F])
    ops[at] = edited(ops[at])
    changed = replace(stage, ops={**stage.ops, Phase.F: tuple(ops)})
    broken = replace(plan, job=replace(plan.job, stages=(changed, *plan.job.stages[1:])))
    with pytest.raises((RunError, PlanError), match=message) as caught:
        rehearse(broken, 0, steps=1)
    assert str(caught.value).count("\n") <= 1


def test_the_command(tmp_path: Path) -> None:
    path, trace = tmp_path / "plan.json", tmp_path / "rank.perfetto-trace"
    plan_of(tp=2).save(path)
    call = ["rehearse", str(path), "--rank", "1", "--steps", "1"]
    said = CliRunner().invoke(app, [*call, "--trace", str(trace)], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    assert "rank 1 of 2: predicted, rehearsed" in said.output
    for row in ("step", "exposed tp", "peak memory"):
        [line] = [line for line in said.output.splitlines() if line.strip().startswith(row)]
        assert len(re.findall(r"[0-9.]+ (?:us|ms|s|MiB)\b", line)) == 2, line
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    assert len(Trace.FromString(trace.read_bytes()).packet) > 100


# The accelerator's transport, on a device whose streams and events are made up.


class Stream:
    """A queue whose work is done at known times."""

    current: Stream

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.now_us, self.priority = 0.0, priority

    def wait_event(self, event: Event) -> None:
        self.now_us = max(self.now_us, event.at_us)


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at_us = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.at_us = (stream or Stream.current).now_us

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: Event) -> float:
        return (end.at_us - self.at_us) / 1000.0


ROW_US, LAUNCH_US = 0.05, 4.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device on which the sum down the rows takes time and nothing else does."""

    def cumsum(value: Tensor, dim: int, out: Tensor) -> None:
        assert (dim, value.shape) == (0, out.shape)
        Stream.current.now_us += LAUNCH_US + ROW_US * len(value)

    @contextmanager
    def stream(inner: Stream) -> Iterator[None]:
        outer, Stream.current = Stream.current, inner
        yield
        Stream.current = outer

    Stream.current = Stream()
    monkeypatch.setattr(torch, "cumsum", cumsum)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream.current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return torch.device("cpu")


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_lanes_are_streams_that_take_the_predicted_time(layout: dict[str, Any], device: torch.device) -> None:
    plan = plan_of(**layout)
    rank = plan.world - 1
    place = plan.mesh.coordinates(rank)["pp"]
    transport = CudaTransport(plan, rank, device)
    transport.open(plan.communicators, device, plan.mesh)
    parameters = made_up_parameters(plan, place, device, 0)
    state = RankState(plan, transport, device, parameters, made_up_buffers(plan, place, device), 0)
    assert all(stream.priority < 0 for stream in transport._streams.values())
    for _ in range(2):
        transport.begin()
        state.step(made_up_batch(plan.job, device, 0))
        timeline = transport.timeline(7)
    assert timeline.peak_bytes[place] == 7
    messages = [s for s in timeline.spans if s.kind is SpanKind.MESSAGE and s.lane == "tp"]
    assert all(s.duration_us == pytest.approx(COLLECTIVE_US, rel=0.01) for s in messages)
    exposed_us = sum(by_place[place] for by_place in timeline.exposed_axis_us().values())
    bubble_us = timeline.total_us(SpanKind.BUBBLE, place)
    assert timeline.step_us == pytest.approx(exposed_us + bubble_us, rel=0.01)
    if layout == {"tp": 2}:
        assert timeline.step_us == pytest.approx(COLLECTIVE_US * len(messages), rel=0.02)
    with pytest.raises(RunError, match="was not opened"):
        transport.send("pp 3>4", torch.zeros(1), 4)
