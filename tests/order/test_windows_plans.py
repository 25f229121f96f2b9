"""Plans with ordered windows: chosen by prediction, proved, equal for equal input, no dearer for more
microbatches; pairs, and communications that go on between windows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from stretto.errors import PlanError, TooLargeError, UsageError
from stretto.ir.action import Overlap, Phase, Schedule
from stretto.ir.plan import ItemKind, Plan
from stretto.ir.program import WAIT, Job, Op, Ref, TensorSpec
from stretto.order.depend import WindowGraph
from stretto.order.policies import list_order, register
from stretto.planning.lower import lower
from stretto.planning.make_plan import make_plan
from stretto.planning.pair import pair
from stretto.schedule.families import make_schedule
from stretto.simulating import simulate
from stretto.verifying import verify
from tests.synthetic_comm import ACTIVATION, make_comm_costs
from tests.verifying.comm_plans import comm_job


def job_of(stages: int, microbatches: int, *, blocks: int = 1, sequence: bool = False) -> Job:
    return comm_job(stages, microbatches, (("tp", 2),), blocks=blocks, sequence=sequence)


def plan_of(job: Job, **settings: object) -> Plan:
    return make_plan(job, make_comm_costs(job, collective_us=100.0), schedule="1f1b", **settings)  # type: ignore[arg-type]


def step_us(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_us


@pytest.mark.parametrize(
    ("stages", "sequence"),
    [(1, False), (2, True), *(pytest.param(*c, marks=pytest.mark.slow) for c in ((1, True), (2, False)))],
)
def test_more_overlap_is_never_slower(stages: int, sequence: bool) -> None:
    job = job_of(stages, 6, blocks=3, sequence=sequence)
    off, local, window = (plan_of(job, overlap=mode) for mode in ("off", "local", "window"))
    assert step_us(off) > step_us(local) > step_us(window)
    assert [plan.overlap for plan in (off, local, window)] == ["off", "local", "window"]
    assert any(isinstance(slot, Overlap) for order in window.schedule.orders for slot in order)
    assert plan_of(job).overlap == "window", "the job's own wish"
    assert "overlap          window" in str(window)


def test_off_waits_for_each_collective_at_once() -> None:
    plan = plan_of(job_of(1, 2, blocks=2), overlap="off")
    ops = {op.name: op for ops in plan.job.stages[0].ops.values() for op in ops}
    for window in plan.windows.values():
        names = [str(item.ref) for item in window.items if item.kind is ItemKind.OP]
        for name, after in pairwise(names):
            if ops[name].collective is not None:
                assert (ops[after].target, ops[after].uses) == (WAIT, (name,))


def test_one_live_microbatch_leaves_nothing_to_pair_and_says_so() -> None:
    plan = plan_of(replace(job_of(1, 4, blocks=2), max_live=1))
    assert plan.overlap == "local"
    pairs, window = "pairs need 2 live microbatches", "one window a rank may keep 4 live microbatches"
    assert plan.overlap_why == f"{pairs}, and max_live is 1; {window}, and max_live is 1"
    assert plan.overlap_why in str(plan)


def test_windows_that_gain_less_than_costs_can_tell_are_not_taken() -> None:
    job = job_of(1, 6, blocks=3)
    little, more = (make_plan(job, make_comm_costs(job, collective_us=us)) for us in (8.0, 15.0))
    assert little.overlap == "local"
    assert little.overlap_why == "window is predicted to gain 1.2 %, which is less than costs can show"
    assert (more.overlap, more.overlap_why) == ("window", "")


def test_modes_and_policies_are_checked() -> None:
    job = job_of(1, 2)
    with pytest.raises(UsageError, match="overlap is 'on'; choose one of: off, local, window"):
        plan_of(job, overlap="on")
    with pytest.raises(UsageError, match="unknown ordering policy 'best'"):
        plan_of(job, order="best")


def test_windows_that_are_too_large_for_a_policy_are_done_without() -> None:
    def picky(graph: WindowGraph) -> tuple[int, ...]:
        if len(graph.window.parts) > 1:
            raise TooLargeError("a pair is too many for this one")
        return list_order(graph)

    register("picky", picky)
    plan = plan_of(job_of(1, 6, blocks=3), order="picky")
    assert (plan.overlap, plan.overlap_why) == ("local", "a pair is too many for this one")
    register(
        "picky", lambda graph: picky(replace(graph, window=replace(graph.window, parts=((0, Phase.F),) * 2)))
    )
    with pytest.raises(TooLargeError, match="too many for this one"):
        plan_of(job_of(1, 6), order="picky")


def shown(paired: Schedule | None) -> list[str]:
    assert paired is not None
    return [" ".join(str(slot).replace("OVERLAP_F_B", "") for slot in order) for order in paired.orders]


def test_pairs_of_one_stage() -> None:
    alone = make_schedule("1f1b", 1, 5)
    assert shown(pair(alone)) == ["0F0 (0F1;0B0) (0F2;0B1) (0F3;0B2) (0F4;0B3) 0B4"]
    assert pair(make_schedule("gpipe", 1, 1)) is None
    first = pair(alone)
    assert first is not None
    assert pair(first) is None


def with_gather_in_w(job: Job) -> Job:
    """Each stage gathers something for its norm's gradient in W, of a value that F has made."""
    stages = []
    for stage in job.stages:
        weight = list(stage.ops[Phase.W])
        at = next(k for k, op in enumerate(weight) if op.name.startswith("dn"))
        old = weight[at]
        gathered = TensorSpec((ACTIVATION.shape[0] * 2, *ACTIVATION.shape[1:]), ACTIVATION.dtype)
        start = Op(f"wg{stage.index}", "comm.all_gather", (Ref(f"y{stage.index}"), "tp", 2), (), (gathered,))
        wait = Op(f"wg{stage.index}_w", WAIT, (Ref(start.name),), (), (gathered,), alias=start.name)
        weight[at : at + 1] = [start, wait, replace(old, args=(*old.args, Ref(wait.name)))]
        stages.append(replace(stage, ops={**stage.ops, Phase.W: tuple(weight)}))
    return replace(job, stages=tuple(stages))


def in_two_windows(job: Job) -> Job:
    """Those gathers start at the end of I."""
    stages = []
    for stage in job.stages:
        starts = [op for op in stage.ops[Phase.W] if op.name == f"wg{stage.index}"]
        weight = tuple(op for op in stage.ops[Phase.W] if op not in starts)
        ops = {**stage.ops, Phase.I: (*stage.ops[Phase.I], *starts), Phase.W: weight}
        stages.append(replace(stage, ops=ops))
    return replace(job, stages=tuple(stages))


def test_a_collective_may_start_in_one_window_and_be_waited_for_in_another() -> None:
    job = with_gather_in_w(job_of(2, 6, blocks=2))
    moved = in_two_windows(job)
    costs = make_comm_costs(job, collective_us=150.0)
    schedule = make_schedule("zb-h1", 2, 6)
    plan = lower(moved, schedule, costs)
    where = {
        str(item.ref): name
        for name, window in plan.windows.items()
        for item in window.items
        if str(item.ref).startswith("wg1")
    }
    assert where == {"wg1": "1I", "wg1_w": "1W"}
    verify(plan)
    # The gather takes 300 us, of which W's own 200 us of matmuls can hide 200; I and F between them the rest.
    plain = make_plan(job, costs, schedule=schedule, overlap="off")
    assert simulate(plan).step_us < step_us(plain)
    with pytest.raises(PlanError, match=r"reads wg1 of microbatch 0, which 1I0 has not made yet"):
        verify(swapped(plan))


def swapped(plan: Plan) -> Plan:
    """The plan in which the last place's first W runs before its I."""
    order = list(plan.orders[1])
    first, second = (order.index(i) for i in order if str(i) in ("run 1I:0", "run 1W:0"))
    order[first], order[second] = order[second], order[first]
    return replace(plan, orders=(plan.orders[0], tuple(order)))
