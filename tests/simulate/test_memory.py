"""Memory against cases worked out by hand, in units of one activation (a weight is two)."""

from __future__ import annotations

from dataclasses import replace

from stretto.ir.action import Phase
from stretto.ir.plan import Plan
from stretto.ir.program import Op, Ref
from stretto.schedule.lower import lower
from stretto.simulate import simulate
from tests.simulate.test_engine import schedule
from tests.synthetic import ACTIVATION, make_costs, make_job, make_plan

A = ACTIVATION.nbytes


def levels(steps: tuple[tuple[float, int], ...]) -> list[float]:
    return [round(held / A, 4) for _, held in steps]


def test_one_microbatch() -> None:
    timeline = simulate(make_plan(schedule("0F0 0B0", "1F0 1B0")))
    # Weight 2, receive buffer 1, h0 and y0; g0 comes (6) before h0 and the received dx1 go (4); in the end
    # the weight, its gradient, and y0 until it is known to have left.
    assert levels(timeline.memory[0]) == [2, 3, 5, 6, 5, 4]
    assert timeline.peak_bytes[0] == 6 * A
    # Weight, receive buffer, h1, y1 and the loss (4 bytes); p1 comes beside dx1, g1 and y0 (6).
    assert timeline.memory[1][0][1] == 2 * A
    assert timeline.peak_bytes[1] == 6 * A
    assert timeline.memory[1][-1][1] == 4 * A
    assert 5 * A + 4 in [held for _, held in timeline.memory[1]]


def test_later_gradients_are_added_and_go() -> None:
    timeline = simulate(make_plan(schedule("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1")))
    # Weight and gradient, and nothing else is left.
    assert [steps[-1][1] for steps in timeline.memory] == [4 * A, 4 * A]
    # The second time dw0 (2) stands beside the gradient (2), the weight (2), two unsent y0 and p0.
    assert timeline.peak_bytes[0] == 9 * A


def test_live_microbatches_are_what_differs_between_orders() -> None:
    gpipe = simulate(make_plan(schedule("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")))
    early = simulate(make_plan(schedule("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")))
    assert gpipe.peak_bytes[1] > early.peak_bytes[1]


def test_a_split_backward_keeps_what_the_weight_gradient_reads() -> None:
    timeline = simulate(make_plan(schedule("0F0 0I0 0W0", "1F0 1I0 1W0")))
    whole = simulate(make_plan(schedule("0F0 0B0", "1F0 1B0")))
    assert timeline.peak_bytes == whole.peak_bytes


def test_views_keep_the_result_that_they_belong_to() -> None:
    job = make_job(1, 1)
    stage = job.stages[0]
    view = Op("v0", "aten.view.default", (Ref("h0"),), (), (ACTIVATION,), alias="h0")
    h0, y0, loss = stage.ops[Phase.F]
    dw0 = stage.ops[Phase.W][1]
    kept = replace(dw0, args=(*dw0.args, Ref("v0")))
    forward = (h0, view, y0, loss)
    ops = {**stage.ops, Phase.F: forward, Phase.W: (stage.ops[Phase.W][0], kept)}
    viewed = replace(job, stages=(replace(stage, ops=ops),))
    order = schedule("0F0 0B0")

    def peak(of: object) -> int:
        assert isinstance(of, type(job))
        return simulate(Plan(of, order, *lower(of, order), make_costs(of))).peak_bytes[0]

    # Without the view h0 goes after g0; with it, it stays until dw0: weight 2, p0, dw0 2, and h0.
    assert peak(job) == 5 * A
    assert peak(viewed) == 6 * A


def test_a_value_for_another_stage_of_the_rank_lives_until_that_stage_has_read_it() -> None:
    job = make_job(2, 1)
    order = schedule("0F0 1F0 1B0 0B0", stage_ranks=(0, 0))
    timeline = simulate(Plan(job, order, *lower(job, order), make_costs(job)))
    # In the end two weights and two gradients; there are neither receive nor send buffers.
    assert timeline.memory[0][0][1] == 4 * A
    assert timeline.memory[0][-1][1] == 8 * A
