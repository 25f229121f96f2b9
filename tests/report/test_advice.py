"""Why communication is exposed and what would help, for every axis; speed as FLOPs, MFU and tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.ir.action import Phase
from stretto.ir.axes import AXES
from stretto.ir.costs import Peak
from stretto.ir.parameters import Zero
from stretto.ir.plan import Plan
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Stall, Timeline
from stretto.ir.work import Work
from stretto.report.advice import SEQUENCE, Stakes, advice_grid, less_to_send, more_to_run
from stretto.report.tables import rates_grid
from stretto.schedule.families import make_schedule
from stretto.simulating import simulate
from tests.synthetic_comm import make_comm_plan

NAMES = {
    "pp": "pp 0>1 e0:0",
    "dp": "dp 0.0",
    "cp": "cp all_gather k",
    "ep": "ep all_to_all x",
    "tp": "tp all_reduce m",
}


def plan_of(family: str = "1f1b", microbatches: int = 4, **how: float) -> Plan:
    given = {"latency_us": 10.0, "bytes_per_us": 5000.0, "collective_us": 70.0, **how}
    return make_comm_plan(make_schedule(family, 2, microbatches), blocks=2, **given)  # type: ignore[arg-type]


def timeline_of(*spans: Span, step_us: float = 100.0, members: int = 1, **more: object) -> Timeline:
    return Timeline("measured", 1, step_us, spans, (0,), members=members, **more)  # type: ignore[arg-type]


def compute(start_us: float, end_us: float) -> Span:
    return Span(0, COMPUTE_LANE, SpanKind.COMPUTE, "0F0", start_us, end_us, 0, Phase.F, 0)


def waited(name: str, start_us: float, end_us: float) -> tuple[Span, Span]:
    """A communication that is waited for all its time."""
    lane = name.split(" ")[0]
    return (
        Span(0, lane, SpanKind.MESSAGE, name, start_us, end_us, nbytes=4096),
        Span(0, COMPUTE_LANE, SpanKind.EXPOSED, name, start_us, end_us),
    )


def told(timeline: Timeline, plan: Plan | None = None) -> dict[str, tuple[str, str]]:
    """Axis -> (why, what would help)."""
    grid = advice_grid(timeline, plan)
    return {} if grid is None else {row[0]: (row[2], row[3]) for row in grid.rows}


def test_help_differs_between_axes() -> None:
    said = {name: " ".join(less_to_send(name, None)) for name in AXES}
    assert len(set(said.values())) == len(AXES)


@pytest.mark.parametrize(
    ("family", "advised"),
    [("gpipe", "eager-1f1b"), ("interleaved-1f1b", "eager-interleaved-1f1b"), ("zb-h1", "auto")],
)
def test_a_family_that_sends_earlier_is_advised(family: str, advised: str) -> None:
    said = " ".join(more_to_run("pp", plan_of(family), Stakes(10.0)))
    assert f'parallel.schedule = "{advised}" (now "{family}")' in said


@pytest.mark.parametrize("zero", [1, 3])
def test_what_every_microbatch_gathers_is_not_shared_by_more_of_them(zero: Zero) -> None:
    plan = plan_of()
    plan = replace(plan, job=replace(plan.job, zero=zero))
    said = " ".join(less_to_send("dp", plan))
    assert ("more microbatches to a step" in said) == (zero == 1)
    assert ("parallel.zero = 1" in said) == (zero == 3)
    assert ("in the last backward" in " ".join(more_to_run("dp", plan, Stakes(10.0)))) == (zero == 1)


def test_sequence_parallelism_is_told_apart_from_tp() -> None:
    spans = (*waited("tp all_gather x", 40, 50), *waited("tp all_reduce y", 50, 60))
    said = told(timeline_of(compute(0, 40), *spans, compute(60, 100)))
    assert list(said) == [SEQUENCE, "tp"]


@pytest.mark.parametrize(
    ("axis", "timeline", "why", "helps"),
    [
        (
            "dp",
            timeline_of(compute(0, 80), *waited("dp 0.0", 80, 100)),
            "20 us of it is after",
            "microbatches",
        ),
        (
            "pp",
            timeline_of(*waited("pp 0>1 e0:0", 0, 20), compute(20, 100)),
            "20 us of it is before",
            "now 4",
        ),
        (
            "ep",
            timeline_of(compute(0, 20), *waited("ep all_to_all x", 20, 80), compute(80, 100)),
            "it takes 60 us, and all compute that could hide it 40 us",
            "links 1.5 times as fast",
        ),
        (
            "tp",
            timeline_of(
                compute(0, 40),
                *waited("tp all_reduce m", 40, 60),
                compute(60, 100),
                busy_us=(80.0, 90.0),
                stalls=(Stall("tp", 0, 1, 30.0),),
            ),
            "15 us a rank is spent until the last rank",
            "who waits for whom",
        ),
    ],
    ids=["after the last op", "before the first", "a slow network", "late ranks"],
)
def test_the_reason_and_what_helps(axis: str, timeline: Timeline, why: str, helps: str) -> None:
    said = told(timeline, plan_of())[axis]
    assert said[0].startswith(why)
    assert helps in said[1]


def test_latency_is_told_by_the_plans_costs() -> None:
    slow = plan_of(latency_us=100.0, bytes_per_us=1e6)
    spans = [replace(span, sender=1, rank=0) for span in waited("pp 1>0 e1:0", 40, 60)]
    why, helps = told(timeline_of(compute(0, 40), *spans, compute(60, 100)), slow)["pp"]
    assert why.startswith("1 of 4 KiB on average: ")
    assert "half as many have half the messages" in helps


def test_processor_time_is_named_where_it_is_that() -> None:
    """Gloo copies and adds on the cores that compute: no faster link helps, and no order hides it."""
    plan = plan_of()
    costs = plan.costs
    busy = {
        key: replace(cost, processor_us=0.6 * cost.curve.us(4096)) for key, cost in costs.collectives.items()
    }
    timeline = timeline_of(compute(0, 20), *waited("tp all_reduce m", 20, 80), compute(80, 100))
    why, helps = told(timeline, replace(plan, costs=replace(costs, collectives=busy)))["tp"]
    assert why.startswith("60.0% of its time is processor time")
    assert "links" not in helps
    assert "one thread less than they have cores" in helps
    assert "processor" not in told(timeline, plan)["tp"][0]


def bubble(start_us: float, end_us: float) -> Span:
    return Span(0, COMPUTE_LANE, SpanKind.BUBBLE, "", start_us, end_us)


@pytest.mark.parametrize(("bubble_us", "advised"), [(0.0, True), (5.0, True), (15.0, False)])
def test_fewer_microbatches_are_advised_where_they_save_more_than_bubbles_cost(
    bubble_us: float, advised: bool
) -> None:
    slow = plan_of(latency_us=100.0, bytes_per_us=1e6)  # all of a message is latency: half of 20 us is saved
    spans = [replace(span, sender=1, rank=0) for span in waited("pp 1>0 e1:0", 40, 60)]
    step = timeline_of(compute(0, 40), *spans, compute(60, 100 - bubble_us), bubble(100 - bubble_us, 100))
    _, helps = told(step, slow)["pp"]
    assert ("fewer and larger microbatches (now 4)" in helps) == advised
    assert ("it saves up to " in helps) == advised
    assert ("5 us more bubble" in helps) == (bubble_us == 5.0)
    assert ("fewer cost more bubble than they save" in helps) == (not advised)


@pytest.mark.parametrize(("bubble_us", "advised"), [(1.0, True), (30.0, False)])
def test_virtual_stages_are_given_up_only_where_that_saves_more(bubble_us: float, advised: bool) -> None:
    said = " ".join(more_to_run("pp", plan_of("interleaved-1f1b"), Stakes(20.0, bubble_us)))
    assert ("one stage a pipeline rank" in said) == advised


def test_a_simulated_plan_is_told_with_its_own_numbers() -> None:
    plan = plan_of()
    said = told(simulate(plan), plan)
    assert "tp" in said
    # Overlap "local", one window an action: nothing to run while a sum is under way.
    assert "parallel.split_ops = true" in said["tp"][1]
    off = replace(plan, overlap="off")
    assert told(simulate(off), off)["tp"] == (
        "the plan waits for each as soon as it is started (overlap = off)",
        'parallel.overlap = "window"',
    )


def test_work_is_a_ranks_and_counts_repeats_apart() -> None:
    plan = plan_of()
    work = plan.work
    of_ops = sum(op.flops for s in plan.job.stages for ops in s.ops.values() for op in ops)
    assert work.flops == of_ops * plan.job.microbatches / 2 > 0
    assert work.again_flops == 0


def test_attentions_backward_makes_the_scores_again() -> None:
    plan = plan_of()
    stage = plan.job.stages[0]
    product = next(op for op in stage.ops[Phase.F] if op.flops)
    fused = replace(product, target="aten._scaled_dot_product_flash_attention_backward.default")
    ops = {**stage.ops, Phase.F: tuple(fused if op is product else op for op in stage.ops[Phase.F])}
    stages = (replace(stage, ops=ops), *plan.job.stages[1:])
    before, work = plan.work, replace(plan, job=replace(plan.job, stages=stages)).work
    assert work.flops + work.again_flops == pytest.approx(before.flops)
    assert work.again_flops == pytest.approx(product.flops / 5 * plan.job.microbatches / 2)


def test_what_stays_in_float32_is_no_reason_for_bf16() -> None:
    here = plan_of()
    plan = replace(here, job=replace(here.job, device="cuda"))
    said = " ".join(less_to_send("tp", plan))
    assert 'precision = "bf16"' in said
    assert "bf16" not in " ".join(less_to_send("tp", here)), "processors may compute slower in it"
    low = replace(plan, job=replace(plan.job, param_dtype="bfloat16"))
    assert 'precision = "bf16"' not in " ".join(less_to_send("tp", low))


def test_mfu_and_hfu_of_a_known_peak() -> None:
    work = Work(4000.0, 1000.0, Peak(100.0, "a sheet"))
    assert work.mfu(80.0) == pytest.approx(0.5)
    assert work.hfu(80.0) == pytest.approx(0.625)
    assert Work(4000.0, 0.0).mfu(80.0) is None
    timeline = timeline_of(compute(0, 80), step_us=80.0)
    grid = rates_grid(work, [timeline], 4, {"tokens_per_s": 400.0})
    assert grid is not None
    assert [tuple(row) for row in grid.rows] == [
        ("FLOPs of a rank in a step", "4 kFLOP"),
        ("  computed again", "1 kFLOP"),
        ("rate of a rank", "62.5 MFLOP/s"),
        ("MFU", "50.0%"),
        ("HFU", "62.5%"),
        ("tokens a second", "400"),
        ("tokens a second a device", "100"),
    ]
    assert "100 MFLOP/s (a sheet)" in grid.caption
