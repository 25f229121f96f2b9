"""What a report is made of: communication by kind, runs and their ops, the costliest ops, findings, text."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.ir.action import Schedule
from stretto.ir.plan import Plan
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline
from stretto.report.detail import laid_over, runs_of, window_ops
from stretto.report.findings import findings
from stretto.report.grid import format_us
from stretto.report.ops import costliest_ops
from stretto.report.tables import axes_of, communication_of, traffic_grid, traffic_of
from stretto.report.text import timeline_text
from stretto.schedule.families import make_schedule
from stretto.simulating import predict, simulate
from tests.simulating.test_engine import schedule
from tests.synthetic_comm import make_comm_plan


def comm_plan(order: Schedule | None = None) -> Plan:
    return make_comm_plan(
        order or make_schedule("1f1b", 2, 4), blocks=2, latency_us=10, bytes_per_us=5000, collective_us=70.0
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pp 0>1 e3:0", ("pp", "message")),
        ("pp loss", ("pp", "loss")),
        ("pp tied.w.0", ("pp", "tied gradients")),
        ("tp all_reduce mm_3", ("tp", "all_reduce")),
        ("tp reduce_scatter mm_3", ("tp", "reduce_scatter")),
        ("dp 1.0", ("dp", "gradients")),
        ("dp_shard scatter.1W.0", ("dp_shard", "gradients")),
        ("dp unshard.0.3", ("dp", "parameters")),
        ("ep dp.unshard.0F.0", ("ep", "parameters")),
    ],
)
def test_what_a_name_says(name: str, expected: tuple[str, str]) -> None:
    assert communication_of(name) == expected


def test_traffic_counts_everything_once() -> None:
    plan = comm_plan()
    timeline = simulate(plan)
    kinds = {(t.axis, t.kind): t for t in traffic_of(timeline)}
    # Two blocks, F and I, two stages, four microbatches; one message forward and one back for each of these.
    assert len(kinds["tp", "all_reduce"].messages) == 2 * 2 * 2 * 4
    assert len(kinds["pp", "message"].messages) == 2 * 4
    assert kinds["tp", "all_reduce"].total_us == pytest.approx(70.0 * 2 * 2 * 4)
    axes = {t.axis: t for t in axes_of(timeline)}
    for axis, us in timeline.exposed_us.items():
        assert axes[axis].exposed_us == pytest.approx(us)
        assert axes[axis].hidden == pytest.approx(timeline.hidden[axis])
    # Nothing in these windows is between a start and its wait.
    assert kinds["tp", "all_reduce"].hidden == pytest.approx(0.0)
    assert 0.0 < (axes["pp"].hidden or 0.0) < 1.0
    rows = {row[0]: row for row in traffic_grid([timeline]).rows}
    assert rows["  all_reduce"][1] == "32"
    assert rows["tp"][-1] == "0.0%"


def test_runs_hold_all_compute_of_a_timeline() -> None:
    plan = comm_plan(schedule("0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1"))
    timeline = simulate(plan)
    runs = runs_of(plan, timeline)
    found = [span for of_rank in runs for run in of_rank for span in run.spans]
    compute = [span for span in timeline.spans if span.kind is SpanKind.COMPUTE]
    assert {id(span) for span in found} == {id(span) for span in compute}
    assert len(found) == len(compute)
    assert [run.window for run in runs[1]] == ["1F", "1F+1B", "1B last"]
    windows = window_ops(plan)
    for of_rank in runs:
        for run in of_rank:
            expected = sum(row.us for row in windows[run.window])
            assert sum(span.duration_us for span in run.spans) == pytest.approx(expected)


def compute_span(start_us: float, end_us: float) -> Span:
    return Span(0, COMPUTE_LANE, SpanKind.COMPUTE, "0F0", start_us, end_us)


@given(
    st.lists(st.floats(0, 100).map(lambda us: round(us, 3)), min_size=1, max_size=8),  # clocks show ns
    st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 50)), min_size=1, max_size=5),
)
def test_ops_fill_a_run_in_order_and_in_proportion(
    times: list[float], pieces: list[tuple[float, float]]
) -> None:
    spans = []
    at = 0.0
    for gap, length in pieces:
        spans.append(compute_span(at + gap, at + gap + length))
        at += gap + length
    laid = list(laid_over(times, spans))
    if sum(times) == 0:
        assert laid == []
        return
    compute = sum(length for _, length in pieces)
    took = [0.0] * len(times)
    for before, after in pairwise(laid):
        assert before[0] <= after[0]
        assert before[3] <= after[2] + 1e-6
    for index, span, start_us, end_us in laid:
        assert span.start_us - 1e-6 <= start_us <= end_us <= span.end_us + 1e-6
        took[index] += end_us - start_us
    for time_us, shown_us in zip(times, took, strict=True):
        assert shown_us == pytest.approx(time_us / sum(times) * compute, abs=1e-5 * compute)


def test_the_costliest_ops_come_first_and_shares_are_of_everything() -> None:
    plan = comm_plan()
    costs = {key: us * (5 if key[1].startswith("dw") else 1) for key, us in plan.costs.op_us.items()}
    plan = replace(plan, costs=replace(plan.costs, op_us=costs))
    found = costliest_ops(plan, most=100)
    assert found[0].makes == "float32[512,256]"
    assert found[0].phases == "W"
    # Two stages of two blocks, four microbatches.
    assert found[0].calls == 2 * 2 * 4
    assert found[0].total_us == pytest.approx(500.0 * found[0].calls)
    assert sum(group.share for group in found) == pytest.approx(1.0)
    assert [group.total_us for group in found] == sorted((d.total_us for d in found), reverse=True)
    merged = costliest_ops(plan, most=100, by_inputs=False)
    assert len({(d.target, d.makes) for d in merged}) == len(merged) < len(found)


def test_findings_say_what_is_exposed_where() -> None:
    timeline = simulate(comm_plan())
    said = findings(None, timeline, None)
    assert any(words.startswith("tp: 0.0% of 1.12 ms is hidden; 1.12 ms is exposed") for words in said)
    assert any("of all_reduce." in words and "on rank" in words for words in said)
    quiet = Timeline("simulated", 1, 10.0, (compute_span(0, 10),), (0,))
    assert findings(None, quiet, None) == ("Communication, predicted: none.",)


def test_a_step_below_its_bound_blames_the_costs() -> None:
    plan = comm_plan()
    prediction = predict(plan)
    timeline = simulate(plan)
    (first, *_) = findings(prediction, timeline, None)
    assert first.startswith(
        f"No order of this work can be faster than {format_us(prediction.bound_us)}; the step"
    )
    quick = replace(timeline, source="measured", step_us=prediction.bound_us / 2)
    (first, *_) = findings(prediction, timeline, quick)
    assert "is 50.0% faster than the lower bound" in first
    assert "costs are too high" in first


def test_text_timeline_keeps_its_width_and_names_every_lane() -> None:
    timeline = simulate(comm_plan())
    lines = timeline_text(timeline, 100).plain.split("\n")
    assert all(len(line) <= 100 for line in lines)
    labels = [line[:13].strip() for line in lines]
    assert labels[1:6] == ["ranks 0-1", "pp 1>0", "reductions", "tp", "ranks 2-3"]
    compute = next(line for line in lines if line.startswith("ranks 2-3"))
    assert len(compute) == 100
    assert "1F0" in compute
    assert "/" in compute
    assert compute[13] == "·"
    assert "W" not in lines[-1].replace("(I and W)", "")
    halves = simulate(comm_plan(make_schedule("zb-h1", 2, 4)))
    *above, first, second = timeline_text(halves, 80).plain.split("\n")
    assert all(len(line) <= 80 for line in (*above, first, second))
    assert first.split()[:4] == ["F", "forward", "I", "input"]
    assert second.split()[-2:] == ["==", "communication"]
