"""Steps with one window a rank: what may share a window, orders of all ranks together, and their proofs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from stretto.bounds.step import lower_bound
from stretto.errors import PlanError
from stretto.ir.action import Action, Overlap, Phase, Schedule
from stretto.ir.costs import Costs, Processor
from stretto.ir.flow import PHASES
from stretto.ir.plan import Instruction, InstructionKind, Plan
from stretto.ir.program import WAIT, Buffer, Job, Stage
from stretto.ir.serialize import plan_from_text, plan_to_text
from stretto.order import rank_window, whole_step
from stretto.order.depend import make_graph
from stretto.order.policies import list_order
from stretto.order.rank_window import RankWindow, WindowMemory, make_rank_window
from stretto.order.search import ForwardBackward, OrderSearch, SearchPoint, SearchScope, WalkBudget
from stretto.order.walk import WalkResult, replay
from stretto.order.whole_step import EFFORT, StepGraphs, order_together
from stretto.planning import windows
from stretto.planning.lower import lower
from stretto.planning.make_plan import make_plan
from stretto.planning.pair import full
from stretto.schedule.families import make_schedule
from stretto.schedule.windows import make_window
from stretto.simulating import simulate
from stretto.simulating.windows import make_ready
from stretto.verifying import plan_faults, verify
from tests.synthetic_comm import ACTIVATION, make_comm_costs, plan_with
from tests.verifying.comm_plans import comm_job


def job_of(
    microbatches: int = 6, stages: int = 2, blocks: int = 2, collective_us: float = 100.0
) -> tuple[Job, Costs]:
    """A job whose collectives share cards with messages."""
    job = comm_job(stages, microbatches, (("tp", 2),), blocks=blocks)
    return job, make_comm_costs(job, collective_us=collective_us, latency_us=20.0, shared=("tp",))


def whole_plan(job: Job, costs: Costs) -> Plan:
    """One window a rank, in the captured order."""
    schedule = full(make_schedule("1f1b", len(job.stages), job.microbatches))
    assert schedule is not None
    return plan_with(job, schedule, costs, overlap="window")


def wholes_of(plan: Plan) -> list[RankWindow]:
    """By rank, its window ready to be walked."""
    found = []
    for (slot,) in plan.schedule.orders:
        window = make_window(plan.job, slot)
        graph = make_graph(plan.job, plan.costs, window, plan.schedule.stage_ranks)
        calls = make_ready(plan, window.name).calls
        microbatches = tuple(action.microbatch for action in slot.actions)
        found.append(make_rank_window(graph, microbatches, calls, 0.0005))
    return found


@pytest.mark.parametrize("of", [0, 1])
def test_forwards_that_wait_for_a_backward_may_have_no_ops(of: int) -> None:
    """A stage that a layout gives nothing to do, beside one that does all."""
    job, costs = job_of(microbatches=3)
    job = replace(job, stages=(job.stages[0], Stage(1, dict.fromkeys(PHASES, ()))), edges=())
    schedule = full(make_schedule("1f1b", 2, 3))
    assert schedule is not None
    [slot] = schedule.orders[of]
    window = make_window(job, slot)
    later = [at for at, one in enumerate(slot.actions) if one.phase is Phase.F][-1]
    first = next(at for at, one in enumerate(slot.actions) if one.phase is not Phase.F)
    plain, kept = (
        make_graph(job, costs, window, schedule.stage_ranks, frees=frees) for frees in ((), [(first, later)])
    )
    assert (plain == kept) is (of == 1)


def in_order(plan: Plan, full_values: list[RankWindow], found: WalkResult) -> Plan:
    """The plan with the orders that were found."""
    windows = {
        one.graph.window.name: replace(
            one.graph.window, items=tuple(one.graph.nodes[index].item for index in order)
        )
        for one, order in zip(full_values, found.orders, strict=True)
    }
    return lower(plan.job, plan.schedule, plan.costs, overlap="window", windows=windows)


def choose(
    plan: Plan,
    full_values: Sequence[RankWindow],
    urgency: Sequence[Sequence[float]],
    patience: Sequence[float],
) -> WalkResult | None:
    """The step, walked by urgencies."""
    return SearchScope(tuple(full_values), 0.0, 0.0, plan).walk(SearchPoint(tuple(urgency), tuple(patience)))


def follow(
    plan: Plan, full_values: Sequence[RankWindow], orders: Sequence[Sequence[int]]
) -> WalkResult | None:
    """The step, walked in these orders."""
    return SearchScope(tuple(full_values), 0.0, 0.0, plan).walk(SearchPoint(orders=tuple(orders)))


def poor_step(enough_us: float = 0.0, walks: int = 10**6) -> tuple[Plan, OrderSearch, WalkResult]:
    """A step with long collectives and urgencies that were drawn, and a search that has come there."""
    plan = whole_plan(*job_of(collective_us=300.0))
    draw = random.Random(0)
    scope = SearchScope(StepGraphs.of(plan).rank_windows(0.0005), enough_us, 1000.0, plan)
    search = OrderSearch(scope, WalkBudget(walks + 1))
    urgency = tuple([draw.uniform(0.0, 1000.0) for _ in one.graph.nodes] for one in scope.windows)
    assert search.tried(SearchPoint(urgency, (0.0, 0.0)))
    assert search.best is not None
    return plan, search, search.best


def step_us(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_us


# What may share a window.


def test_a_forward_and_a_backward_of_one_microbatch_are_one_window() -> None:
    job, costs = job_of(microbatches=1, stages=1)
    parts = (Action(0, Phase.F, 0), Action(0, Phase.B, 0))
    window = make_window(job, Overlap(parts))
    assert (window.name, window.shares) == ("0F+0B=0,0", (0, 0))
    graph = make_graph(job, costs, window, (0,))
    made = {node.item.ref: at for at, node in enumerate(graph.nodes) if node.item.part == 0}
    backward = {op.name: op for sub in Phase.B.programs for op in job.stages[0].ops[sub]}
    reads = [
        (at, made[name])
        for at, node in enumerate(graph.nodes)
        if node.item.part == 1
        for name in backward[str(node.item.ref)].uses
        if name in made
    ]
    assert reads, "B reads what F has saved"
    assert all(source in graph.before[at] for at, source in reads)
    # What F makes goes with its last reader in B: nothing is left but what leaves.
    memory = WindowMemory(len(graph.nodes), graph.storages)
    for index in list_order(graph):
        memory.take(index)
    assert memory.peak > 0
    assert memory.now == 0


def test_a_backward_before_the_forward_that_it_reads_is_refused() -> None:
    job, costs = job_of(microbatches=2)
    plan = whole_plan(job, costs)
    assert plan_faults(plan) == []
    window = plan.windows[str(next(i.ref for i in plan.orders[1] if i.kind is InstructionKind.RUN))]
    backward = next(part for part, (_, phase) in enumerate(window.parts) if phase is Phase.B)
    first = [item for item in window.items if item.part == backward]
    rest = [item for item in window.items if item.part != backward]
    broken = replace(plan, windows={**plan.windows, window.name: replace(window, items=(*first, *rest))})
    said = [str(fault) for fault in plan_faults(broken)]
    assert any("which is made later, at item" in fault for fault in said), said
    assert any("of 1F of the same microbatch, item" in fault for fault in said), said


def test_a_run_binds_microbatches_as_its_window_says() -> None:
    job, costs = job_of(microbatches=2, stages=1)
    slots = (
        Overlap((Action(0, Phase.F, 0), Action(0, Phase.B, 0), Action(0, Phase.F, 1))),
        Action(0, Phase.B, 1),
    )
    schedule = replace(make_schedule("1f1b", 1, 2), orders=(slots,))
    plan = plan_with(job, schedule, costs, overlap="window")
    assert plan_faults(plan) == []

    def bound(microbatches: tuple[int, ...]) -> Plan:
        order = tuple(
            Instruction(i.kind, i.ref, microbatches) if len(i.microbatches) == 3 else i
            for i in plan.orders[0]
        )
        return replace(plan, orders=(order,))

    said = [str(fault) for fault in plan_faults(bound((0, 1, 1)))]
    wrong = "binds parts to microbatches as [0, 1, 1], but the window's order is for [0, 0, 2]"
    assert any(wrong in fault for fault in said), said


@pytest.mark.parametrize("shares", [(0,), (0, 0, 1), (1, 1, 2), (0, 2, 2)])
def test_what_no_window_can_share_is_refused(shares: tuple[int, ...]) -> None:
    job, costs = job_of(microbatches=2, stages=1)
    slot = Overlap((Action(0, Phase.F, 0), Action(0, Phase.B, 0), Action(0, Phase.F, 1)))
    schedule = replace(make_schedule("1f1b", 1, 2), orders=((slot, Action(0, Phase.B, 1)),))
    plan = plan_with(job, schedule, costs, overlap="window")
    name = next(name for name, window in plan.windows.items() if window.shares)
    broken = replace(plan.windows[name], shares=shares)
    with pytest.raises(PlanError, match="names, for each part, the first part of its stage"):
        verify(replace(plan, windows={**plan.windows, name: broken}))


# Orders of all ranks together.


@pytest.mark.parametrize(
    ("stages", "processor", "skew"),
    [
        (2, None, 0.0),
        (3, None, 0.0),
        (2, Processor(200.0, 0.5), 0.0),
        (2, None, 0.2),
    ],
)
def test_any_urgencies_and_patience_give_a_plan_that_is_proved_and_takes_as_long(
    stages: int, processor: Processor | None, skew: float
) -> None:
    job, costs = job_of(microbatches=4, stages=stages, blocks=1)
    plan = whole_plan(job, replace(costs, processor=processor, skew=skew))
    full_values = wholes_of(plan)
    draw = random.Random(stages)
    steps = set()
    for _ in range(12):
        urgency = [[draw.uniform(0.0, 1000.0) for _ in one.graph.nodes] for one in full_values]
        found = choose(plan, full_values, urgency, [draw.choice((0.0, 0.5, 2.0)) for _ in full_values])
        assert found is not None
        for one, order in zip(full_values, found.orders, strict=True):
            place = {index: at for at, index in enumerate(order)}
            assert len(place) == len(one.graph.nodes)
            assert all(place[n] < place[at] for at, needs in enumerate(one.graph.before) for n in needs)
        made = in_order(plan, full_values, found)
        verify(made)
        # The loss and `action_us` are the simulation's alone.
        assert simulate(made).step_us == pytest.approx(found.step_us, rel=0.02)
        steps.add(round(found.step_us))
        # The same orders, given: nothing is between that the walk would not have chosen.
        given = [
            [index for index in order if mine.placed[index]]
            for mine, order in zip(full_values, found.orders, strict=True)
        ]
        again = follow(plan, full_values, given)
        assert again is not None
        assert again.step_us == pytest.approx(found.step_us, rel=0.02)
        verify(in_order(plan, full_values, again))
    assert len(steps) > 1, "urgencies matter"


def test_a_window_may_have_no_ops() -> None:
    job, costs = job_of(stages=1, microbatches=1)
    job = replace(job, stages=(Stage(0, dict.fromkeys(PHASES, ())),), edges=())
    graph = make_graph(job, costs, make_window(job, Action(0, Phase.W, 0)), (0,))
    assert make_rank_window(graph, little=0.01).placed == ()


def test_where_all_ops_take_little_some_are_placed_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ops before an op would come directly before it, which needs memory by the square of their count."""
    most, plan = 8, whole_plan(*job_of(blocks=6))
    graphs = StepGraphs.of(plan)
    least = min(len(one.graph.nodes) for one in graphs.rank_windows(1.0))
    monkeypatch.setattr(rank_window, "MOST_NEEDED", most * least)
    found = graphs.rank_windows(1.0)
    inputs = max(len(before) for one in found for before in one.graph.before)
    for one in found:
        assert max(map(len, one.needs)) <= inputs * most + 1
        assert sum(one.placed) > len(one.placed) // (inputs * most + 1) > 10
        assert not any(placed and waits for placed, waits in zip(one.placed, one.waits, strict=True))
    slopes = [[-float(at) for at in range(len(one.graph.nodes))] for one in found]
    walked = choose(plan, list(found), slopes, (0.0, 0.0))
    assert walked is not None
    verify(in_order(plan, list(found), walked))


@pytest.mark.parametrize("skew", [0.0, 0.2])
@pytest.mark.parametrize("slowdown", [0.0, 0.3])
def test_a_window_by_itself_takes_as_long_as_it_is_simulated(skew: float, slowdown: float) -> None:
    job, _ = job_of(microbatches=3, stages=1)
    costs = replace(make_comm_costs(job, collective_us=150.0, slowdown=slowdown), skew=skew)
    plan = whole_plan(job, costs)
    (one,) = wholes_of(plan)
    order = list_order(one.graph)
    made = in_order(plan, [one], WalkResult(0.0, (order,), 0.0, 0.0, 0.0))
    assert simulate(made).step_us == pytest.approx(replay(one.graph, order).end_us, rel=0.01)


def test_forward_backward_improvement_makes_steps_shorter_proved_and_equal_for_equal_jobs() -> None:
    plan, search, poor = poor_step()
    full_values = search.scope.windows

    def improved(search: OrderSearch) -> WalkResult:
        best = search.go(ForwardBackward(full_values), 100, 100).best
        assert best is not None
        return best

    found = improved(search)
    assert found.step_us < poor.step_us
    made = in_order(plan, list(full_values), found)
    verify(made)
    assert simulate(made).step_us == pytest.approx(found.step_us, rel=0.02)
    assert improved(poor_step()[1]).orders == found.orders
    assert improved(poor_step(enough_us=poor.step_us)[1]).orders == poor.orders, "short enough"
    assert improved(poor_step(walks=0)[1]).orders == poor.orders, "no time is left"


@pytest.mark.parametrize(
    ("stages", "collective_us"), [(2, 100.0), pytest.param(1, 400.0, marks=pytest.mark.slow)]
)
def test_one_window_a_rank_is_faster_proved_and_equal_for_equal_jobs(
    stages: int, collective_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, costs = job_of(stages=stages, collective_us=collective_us)
    monkeypatch.setattr(whole_step, "MOVES", 30)
    plan = make_plan(job, costs, schedule="1f1b", overlap="window")
    assert all(window.shares for window in plan.windows.values() if window.actions)
    verify(plan)
    text = plan_to_text(plan)
    assert text == plan_to_text(make_plan(job, costs, schedule="1f1b", overlap="window"))
    assert plan_from_text(text) == plan
    monkeypatch.setattr(windows, "order_together", lambda *_: None)
    assert step_us(plan) < 0.95 * step_us(make_plan(job, costs, schedule="1f1b", overlap="window"))


def test_where_one_window_a_rank_is_not_for() -> None:
    job, costs = job_of(microbatches=4, blocks=1)
    summed = next(op for op in job.stages[0].ops[Phase.F] if op.target == WAIT)
    written = Buffer("seen", ACTIVATION, (0,), ((0, Phase.F, summed.name),))
    for one, shares in (
        (replace(job, max_live=3), True),  # one more than in its own order
        (replace(job, max_live=2), False),
        (replace(job, buffers=(written,)), False),  # forwards would read what is not written yet
    ):
        plan = make_plan(one, costs, schedule="1f1b", overlap="window")
        assert any(window.shares for window in plan.windows.values()) is shares


def virtual_stages(microbatches: int) -> Schedule:
    """Two ranks, each with two stages: forwards of all, then backwards."""
    count = range(microbatches)
    orders = tuple(
        tuple(
            Action(stage, phase, m)
            for phase, stages in ((Phase.F, (rank, rank + 2)), (Phase.B, (rank + 2, rank)))
            for stage in stages
            for m in count
        )
        for rank in (0, 1)
    )
    return Schedule("virtual", 4, microbatches, (0, 1, 0, 1), orders)


def in_a_v(microbatches: int) -> Schedule:
    """Two ranks, the first and the last stage on one of them, so that messages stay on the other."""
    made = virtual_stages(microbatches)
    swapped = [{1: 1, 3: 2}, {0: 0, 2: 3}]
    orders = tuple(
        tuple(replace(slot, stage=swapped[1 - rank][slot.stage]) for slot in made.orders[rank])
        for rank in (0, 1)
    )
    # Stage 3 is behind stage 2, and before it in the backward.
    return replace(made, stage_ranks=(0, 1, 1, 0), orders=orders)


@pytest.mark.parametrize(
    ("microbatches", "family"),
    [
        # With many microbatches: several stages a rank.
        pytest.param(m, f, marks=() if (m == 4) != (f == "v") else pytest.mark.slow)
        for m in (4, 32)
        for f in ("virtual", "v", "zb-h1", "zb-h2", "1f1b", "gpipe")
    ],
)
def test_any_schedule_may_have_one_window_a_rank_which_takes_the_time_that_it_is_given(
    family: str, microbatches: int
) -> None:
    own = {"virtual": virtual_stages, "v": in_a_v}
    stages = 4 if family in own else 2
    job, costs = job_of(microbatches, stages, blocks=1)
    schedule = own[family](microbatches) if family in own else make_schedule(family, stages, microbatches)
    paired = full(schedule)
    assert paired is not None
    plan = plan_with(job, paired, costs, overlap="window")
    items = sum(len(window.items) for window in plan.windows.values())
    bound_us = lower_bound(job, paired, costs).us
    steps = []
    for walks in (1, 30):
        worth_us = (walks + 0.5) * items / EFFORT
        found = order_together(plan, bound_us, worth_us=worth_us)
        assert found is not None
        windows, budget = found
        assert budget.spent <= budget.allowed == walks
        made = lower(plan.job, plan.schedule, plan.costs, overlap="window", windows=windows)
        verify(made)
        steps.append(simulate(made).step_us)
    off = make_plan(job, costs, schedule=schedule, overlap="off")
    assert steps[1] <= steps[0]
    assert steps[1] < 0.9 * step_us(off)
    again = order_together(plan, bound_us, worth_us=worth_us)
    assert again is not None
    assert again[0] == windows
