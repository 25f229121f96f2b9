"""Memory against cases worked out by hand, in units of one activation (a weight is two)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.ir.action import Phase
from stretto.ir.plan import Plan
from stretto.ir.program import Job, Op, Ref, TensorSpec
from stretto.planning.lower import lower
from stretto.schedule.families import forward_schedule
from stretto.simulating import simulate
from stretto.verifying.memory import peak_bytes
from tests.simulating.test_engine import schedule
from tests.synthetic import ACTIVATION, WORK, make_costs, make_job, make_plan
from tests.synthetic_comm import make_comm_costs

A = ACTIVATION.nbytes
NOTHING = {Phase.I: (), Phase.W: ()}


def levels(steps: tuple[tuple[float, int], ...]) -> list[float]:
    return [round(resident / A, 4) for _, resident in steps]


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
    assert 5 * A + 4 in [resident for _, resident in timeline.memory[1]]


def test_later_gradients_are_added_and_go() -> None:
    timeline = simulate(make_plan(schedule("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1")))
    # Weight and gradient, and nothing else is left.
    assert [steps[-1][1] for steps in timeline.memory] == [4 * A, 4 * A]
    # The second time g0 comes beside h0, the received dx1, gradient (2), weight (2) and two unsent y0.
    assert timeline.peak_bytes[0] == 9 * A


def part_of_gradient(**changes: object) -> Job:
    """One stage, two microbatches, a forward of nothing: what W adds to the gradient makes the peak."""
    job = make_job(1, 2)
    stage = job.stages[0]
    p0, dw0 = stage.ops[Phase.W]
    loss = Op("loss", "aten.sum.default", (Ref("batch/x"),), (), (TensorSpec((), "float32"),))
    weight = (replace(p0, args=(Ref("batch/x"),)), replace(dw0, **changes))  # type: ignore[arg-type]
    ops = {Phase.F: (loss,), Phase.I: (), Phase.W: weight}
    return replace(job, stages=(replace(stage, ops=ops),))


def weight_peaks(job: Job) -> tuple[float, float]:
    """The most that is resident, in activations, with one microbatch and with two."""
    found = []
    for text in ("0F0 0B0", "0F0 0B0 0F1 0B1"):
        order = schedule(text)
        of = replace(job, microbatches=order.microbatches)
        plan = lower(of, order, make_costs(of))
        found.append(simulate(plan).peak_bytes[0])
        assert peak_bytes(plan, 0) == found[-1]
    return found[0] / A, found[1] / A


def test_a_product_is_added_where_the_gradient_is() -> None:
    # Weight (2), p0, and dw0 (2), which becomes the gradient: later ones are added to it (2).
    assert weight_peaks(part_of_gradient()) == (5, 5)
    # Any other op makes its result first, beside weight (2), gradient (2) and p0.
    assert weight_peaks(part_of_gradient(target=WORK)) == (5, 7)


def test_a_gradient_of_another_dtype_begins_as_a_copy() -> None:
    job = part_of_gradient()
    [parameter] = job.parameters
    wide = replace(job, parameters=(replace(parameter, own_dtype="float64"),))
    # The parameter (4), p0, dw0 (2), and the gradient (4) from it: both times. No program here makes what
    # ops read.
    assert weight_peaks(wide) == (11, 11)


def test_a_gradient_that_others_read_begins_as_a_copy() -> None:
    job = part_of_gradient()
    [parameter] = job.parameters
    other = replace(parameter, name="v0", tied_to="v0")
    # Two weights (4), p0, dw0 (2), and two gradients (4): neither may be what the other is.
    assert weight_peaks(replace(job, parameters=(parameter, other))) == (11, 11)


def test_results_of_one_op_go_one_by_one() -> None:
    job = make_job(1, 1)
    stage = job.stages[0]
    _, y0, loss = stage.ops[Phase.F]

    def peak(taken: int, read_last: int) -> float:
        """An op returns three activations; some are taken, and the loss reads one of them."""
        made = Op("t0", "made_up", (Ref("batch/x"),), (), (ACTIVATION,) * 3)
        parts = [Op(f"t0_{k}", "getitem", (Ref("t0"), k), (), (ACTIVATION,)) for k in range(taken)]
        read = replace(y0, args=tuple(Ref(part.name) for part in parts))
        end = replace(loss, args=(Ref("y0"), Ref(f"t0_{read_last}")))
        of = replace(job, stages=(replace(stage, ops={Phase.F: (made, *parts, read, end), **NOTHING}),))
        of = replace(of, parameters=())
        order = forward_schedule(1, 1)
        plan = lower(of, order, make_costs(of))
        assert peak_bytes(plan, 0) == simulate(plan).peak_bytes[0]
        return simulate(plan).peak_bytes[0] / A

    # All three exist when the op runs. The one that no one takes goes at once, so y0 comes beside two.
    assert peak(2, 0) == 3
    # Taken, it is there with y0.
    assert peak(3, 2) == 4
    # After y0 only what the loss reads is left: the loss (4 bytes) is beside y0 and one part.
    assert peak(1, 0) == 3


def test_a_split_backward_keeps_what_the_weight_gradient_reads() -> None:
    timeline = simulate(make_plan(schedule("0F0 0I0 0W0", "1F0 1I0 1W0")))
    full = simulate(make_plan(schedule("0F0 0B0", "1F0 1B0")))
    assert timeline.peak_bytes == full.peak_bytes


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
        return simulate(lower(of, order, make_costs(of))).peak_bytes[0]

    # Without the view h0 goes after g0; with it, it stays until dw0: weight 2, p0, dw0 2, and h0.
    assert peak(job) == 5 * A
    assert peak(viewed) == 6 * A


def test_a_value_for_another_stage_of_the_rank_lives_until_that_stage_has_read_it() -> None:
    job = make_job(2, 1)
    order = schedule("0F0 1F0 1B0 0B0", stage_ranks=(0, 0))
    timeline = simulate(lower(job, order, make_costs(job)))
    # In the end two weights and two gradients; there are neither receive nor send buffers.
    assert timeline.memory[0][0][1] == 4 * A
    assert timeline.memory[0][-1][1] == 8 * A


def test_gradients_that_are_summed_together_are_put_into_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(large_bytes: int) -> float:
        monkeypatch.setattr("stretto.passes.flat.LARGE_BYTES", large_bytes)
        plan = sums_plan()
        assert peak_bytes(plan, 0) == simulate(plan).peak_bytes[0]
        return simulate(plan).peak_bytes[0] / A

    # Two weights and two gradients, each of 2, one tensor of both, and none of what made them.
    assert peak(2**30) == 12
    # One by one they are summed where they are; p0 and dw0 were there before (11, as above).
    assert peak(1) == 11


def test_gradients_of_tied_parameters_become_one() -> None:
    plan = sums_plan(tied_to="w0")
    assert peak_bytes(plan, 0) == simulate(plan).peak_bytes[0]
    # One weight (2), p0, dw0 (2) and two gradients (4); then these and their sum, of which one is left.
    assert simulate(plan).peak_bytes[0] == 9 * A
    assert simulate(plan).memory[0][-1][1] == 4 * A


def sums_plan(tied_to: str = "v0") -> Plan:
    """One microbatch, whose weight gradient is that of two parameters, and sums over two copies."""
    job = replace(part_of_gradient(), microbatches=1, axes=(("dp", 2),))
    [parameter] = job.parameters
    job = replace(job, parameters=(parameter, replace(parameter, name="v0", tied_to=tied_to)))
    return lower(job, schedule("0F0 0B0"), make_comm_costs(job), overlap="off")
