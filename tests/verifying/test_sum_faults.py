"""Every refusal of axes, shards, communicators and sums, by its message. The base has two places,
three copies of the data and two tensor-parallel ranks; orders are edited by their text, the rest by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from stretto.ir.action import Phase
from stretto.ir.plan import Communicator
from stretto.ir.program import Buffer, Job, Ref, Shard, Stage, TensorSpec
from stretto.verifying import plan_faults
from tests.verifying.comm_plans import comm_job, comm_plan, one_of_each
from tests.verifying.edits import Edit, both, communicator, job, op, order, parameter, sums, window

BASE = one_of_each()
END = "0REDUCE_GRAD 2"
"""The window of the step's end on the first place."""
SLICE = TensorSpec((256, 512), "float32")


def on_one_rank() -> Edit:
    """All stages lie on one rank, and one that is not the first has sums."""
    return lambda plan: replace(plan, schedule=replace(plan.schedule, stage_ranks=(1, 1)))


REFUSED: list[tuple[Edit, str]] = [
    # axes and shards
    (
        job(axes=(("tp", 2), ("dp", 3))),
        "axes: are tp, dp. Name each once, of dp, cp, ep, tp and in that order",
    ),
    (job(axes=(("dp", 3), ("ep", 0), ("tp", 2))), "axis ep: has 0 ranks"),
    (
        parameter("w0.1", shards=(Shard("ep", 0),)),
        "parameter w0.1: is spread over 'ep', which is no axis of the job. The job has dp, tp beside pp",
    ),
    (
        parameter("w0.1", shards=(Shard("tp", 2),)),
        "parameter w0.1: is spread along dim 2, but is float32[512,256]",
    ),
    (
        parameter("w0.1", shards=(Shard("tp", 0, 3),)),
        "parameter w0.1: has 512 rows along dim 0, not 3 equal blocks of them",
    ),
    (
        parameter("w0.1", shards=(Shard("tp", 0), Shard("tp", 1))),
        "parameter w0.1: is spread over tp twice. Keep one shard an axis",
    ),
    (
        parameter("n0", partial=("dp",)),
        "parameter n0: has gradients that are parts along 'dp', which is no axis that splits a sample",
    ),
    (parameter("n0", partial=("tp", "tp")), "parameter n0: names an axis of `partial` twice: ['tp', 'tp']"),
    (
        parameter("w0.1", partial=("tp",)),
        "parameter w0.1: is spread over tp, so gradients along it belong to different rows",
    ),
    (
        parameter("w0.1", shards=(Shard("tp", 0, 1, 3),), partial=("tp",)),
        "parameter w0.1: has parts that 3 ranks of tp hold each, but it has 2 ranks. Name a number",
    ),
    (
        parameter("w0.1", shards=(Shard("tp", 0, 1, 0),)),
        "parameter w0.1: has parts that 0 ranks of tp hold each",
    ),
    (
        parameter("w0.1", shards=(Shard("tp", 0, 1, 2),)),
        "parameter w0.1: has parts that 2 ranks of tp hold each, whose gradients are not summed. Name tp in",
    ),
    (
        parameter("w1.0", shards=(Shard("tp", 0),)),
        "parameter w1.0: is one tensor with w0.0, but is spread or shaped differently (float32[512,256], "
        "tp along dim 0; float32[512,256], tp along dim 1). Spread tied parameters alike",
    ),
    (
        parameter("n1", partial=()),
        "parameter n1: is one tensor with n0, but their gradients are parts along different axes "
        "([]; ['tp']). Give both one style",
    ),
    # communicators
    (
        lambda plan: replace(plan, communicators=plan.communicators[:-1]),
        "job.stages[0].ops.REDUCE_GRAD[2]: tp.0.0: there is no communicator 'tp'",
    ),
    (
        communicator("tp", ranks=(1, 0)),
        "communicator tp: joins ranks [1, 0], but its work is between ranks [0, 1]. Give it the ranks [0, 1]",
    ),
    (
        communicator("dp", ranks=(0, 2)),
        "communicator dp: joins ranks [0, 2], but its work is between ranks [0, 1, 2]",
    ),
    (
        communicator("tied n0", axes=("dp",)),
        "communicator tied n0: is along dp, but its work is along pp. Give it the axes ['pp']",
    ),
    (
        communicator("loss", axes=("pp",)),
        "communicator loss: is along pp, but its work is along pp, dp. Give it the axes ['pp', 'dp']",
    ),
    (
        lambda plan: replace(
            plan, communicators=(*plan.communicators, Communicator("x", (0,), ("tp", "tp")))
        ),
        "communicator x: names an axis twice: ['tp', 'tp']. Name each axis once",
    ),
    # the programs
    (
        op(0, "dp.0.0", args=((Ref("grad/w0.1"), Ref("grad/w0.1")), "sum", "dp", 3)),
        "rank 0, dp.0.0: holds a gradient twice: w0.1. Name each once",
    ),
    (
        op(0, "dp.0.0", args=((), "sum", "dp", 3)),
        "job.stages[0].ops.REDUCE_GRAD[3]: dp.0.0: is no sum of gradients or of the loss, and no wait",
    ),
    (
        op(0, "dp.0.0", args=((Ref("grad/w0.1"),), "max", "dp", 3)),
        "job.stages[0].ops.REDUCE_GRAD[3]: dp.0.0: is no sum of gradients or of the loss, and no wait",
    ),
    (
        op(0, "dp.0.0.sum", args=(Ref("dp.0.9"),)),
        "job.stages[0].ops.REDUCE_GRAD[7]: dp.0.0.sum: waits for no sum that starts before it",
    ),
    (
        op(0, "dp.0.0", args=((Ref("grad/w0.9"),), "sum", "dp", 3)),
        "job.stages[0].ops.REDUCE_GRAD[3]: dp.0.0: there is no tied group 'w0.9'",
    ),
    (
        op(0, "dp.0.0", args=((Ref("grad/w0.1"),), "sum", "loss", 6)),
        "rank 0, dp.0.0: sums w0.1 on communicator loss. Sum the loss, and it alone, on loss",
    ),
    (
        op(0, "pp.loss", args=((Ref("step/loss"),), "sum", "dp", 3)),
        "rank 0, pp.loss: sums step/loss on communicator dp. Sum the loss, and it alone, on loss",
    ),
    (
        sums("dp.0.0", lane="pp 0>1"),
        "rank 0, dp.0.0: communicator pp 0>1 joins no parts or copies of gradients. Give it dp, tp, tied",
    ),
    (
        sums("tied.n0", lane="tied w0.0"),
        "rank 0, tied.n0: sums n0 on communicator tied w0.0, which joins the ranks that hold w0.0",
    ),
    (
        op(0, "dp.0.0", args=((Ref("grad/w0.1"),), "sum", "dp", 2)),
        "rank 0, dp.0.0: is not the sum of w0.1 over 3 ranks, float32[131072], in place where it is alone",
    ),
    (
        op(0, "dp.0.1", alias="grad/n0"),
        "rank 0, dp.0.1: is not the sum of n0, w0.0 over 3 ranks, float32[131584], in place where",
    ),
    (
        op(0, "dp.0.1.sum", outputs=(TensorSpec((131584,), "bfloat16"),)),
        "rank 0, dp.0.1.sum: is something else than the sum that it waits for",
    ),
    (on_one_rank(), "rank 1, sums of stage 1: stage 1 is not the first of its rank"),
    # sums
    (
        both(window("0W last", "#1 tp.0.0; ", ""), window(END, "tp.0.0.sum; ", "")),
        "rank 0, gradient of n0: is never summed over tp. Add a sum on communicator tp that holds it",
    ),
    (
        both(window("0W last", "#1 tp.0.0; ", ""), window(END, "tp.0.0.sum; ", "")),
        "rank 0, tp.0.0: never starts. Add it to a window, or remove it",
    ),
    (
        window(END, "tied.n0; tied.n0.sum; ", ""),
        "rank 0, gradient of n0: is never summed over the ranks that hold a copy. Add a sum on communicator "
        "tied n0",
    ),
    (sums("dp.0.1", "w0.0"), "rank 0, gradient of n0: is never summed over dp. Add"),
    (
        sums("dp.0.0", "w0.1", "n0"),
        "rank 0, window 0W last, dp.0.0: sums n0 over dp before its sum over the ranks that hold a "
        "copy. Move it after the wait for that sum",
    ),
    (
        sums("dp.0.0", "w0.1", "n0"),
        "rank 0, window 0REDUCE_GRAD 2, dp.0.1: sums n0 over dp a second time. Take n0 out of it",
    ),
    (
        sums("dp.0.0", "w0.1", "w1.1"),
        "rank 0, window 0W last, dp.0.0: sums w1.1, of which this rank has no gradient. Take w1.1 out of it",
    ),
    (
        sums("tp.0.0", "n0", "w0.1"),
        "rank 0, window 0W last, tp.0.0: sums w0.1 over tp though it has no parts or copies there",
    ),
    (
        window(END, "tp.0.0.sum; dp.0.0.sum; tied.n0; ", "dp.0.0.sum; tied.n0; tp.0.0.sum; "),
        "rank 0, window 0REDUCE_GRAD 2, tied.n0: starts while tp.0.0 still sums n0. Move it after the wait",
    ),
    (
        both(
            window("0W last", "#1 tp.0.0; ", ""),
            window("0REDUCE_GRAD", "pp.loss; ", "pp.loss; tp.0.0; "),
        ),
        "rank 0, window 0REDUCE_GRAD, tp.0.0: starts before `run 0W last:2,-1` has added its part of the "
        "gradient of n0. Move it after instruction 12",
    ),
    (
        order(0, "run 0W last:2,-1; run 0REDUCE_GRAD 1:-1; ", "run 0REDUCE_GRAD 1:-1; run 0W last:2,-1; "),
        "rank 0, window 0REDUCE_GRAD 1, tied.w0.0: starts before `run 0W last:2,-1` has added its part of "
        "the gradient of w0.0. Move it after instruction 13",
    ),
    (
        window("0W last", "dw0.1; #1 dp.0.0; ", "#1 dp.0.0; dw0.1; "),
        "rank 0, window 0W last, dp.0.0: starts before `dw0.1` has added its part of the gradient of "
        "w0.1. Move it after item 3",
    ),
    (
        order(0, "run 0W last:2,-1; ", "run 0W:2; "),
        "rank 0, window 0REDUCE_GRAD 2, tp.0.0.sum: waits for tp.0.0, which does not start before it",
    ),
    (
        order(0, "run 0W:1; ", "run 0W last:1,-1; "),
        "rank 0, window 0W last, tp.0.0: starts a second time; instruction 9 did. Keep one",
    ),
    (
        order(0, "run 0W last:2,-1; ", "run 0W last:2,1; "),
        "rank 0, run 0W last:2,1: binds sums to a microbatch. Bind them to -1",
    ),
    (
        order(0, "run 0REDUCE_GRAD 1:-1; ", "run 1REDUCE_GRAD 1:-1; "),
        "rank 0, run 1REDUCE_GRAD 1:-1: runs sums of rank 1. Run its own",
    ),
    (
        window("0REDUCE_GRAD 1", "tied.w0.0; ", "tied.w0.0; send e0; "),
        "rank 0, run 0REDUCE_GRAD 1:-1: has messages among sums. Move them to an action",
    ),
    (
        window("0REDUCE_GRAD 1", "tied.w0.0; ", "tied.w0.0; dp.0.0; "),
        "rank 0, window 0REDUCE_GRAD 1, dp.0.0: starts a second time; instruction 12 did. Keep one",
    ),
    (
        window("0W last", "#1 dp.0.0; ", "#1 dp.0.0; #1 dp.0.0; "),
        "rank 0, window 0W last, dp.0.0: starts a second time; instruction 12 did. Keep one",
    ),
    (
        window("0W last", "#1 dp.0.0; ", "#1 dp.0.9; "),
        "windows[\"0W last\"].items[3]: stage 0 has no op 'dp.0.9' in its REDUCE_GRAD program",
    ),
    (
        window(END, "dp.0.0.sum; ", "dp.0.0.sum; dp.0.0.sum; "),
        "rank 0, window 0REDUCE_GRAD 2, dp.0.0.sum: is waited for twice",
    ),
    (
        window(END, "dp.0.1; dp.0.1.sum; ", "dp.0.1.sum; dp.0.1; "),
        "rank 0, window 0REDUCE_GRAD 2, dp.0.1.sum: waits for dp.0.1, which does not start before it",
    ),
    (
        window(END, "dp.0.0.sum; ", ""),
        "rank 0, dp.0.0.sum: missing; the step could end before the sum is there. Add it after dp.0.0",
    ),
    # costs
    (
        lambda plan: replace(
            plan,
            costs=replace(
                plan.costs, collectives={("ep", "gather"): plan.costs.collectives["tp", "all_gather"]}
            ),
        ),
        "costs of gather on ep: there is no communicator ep",
    ),
    (
        lambda plan: replace(plan, costs=replace(plan.costs, shared=("ep",))),
        "costs.shared: there is no axis 'ep' beside pp",
    ),
]


@pytest.mark.parametrize(("edit", "message"), REFUSED, ids=[message[:70] for _, message in REFUSED])
def test_refusals(edit: Edit, message: str) -> None:
    found = [str(fault) for fault in plan_faults(edit(BASE))]
    assert any(fault.startswith(message) for fault in found), found


def test_the_base_has_no_fault() -> None:
    assert plan_faults(BASE) == []


def faults_of(change: Callable[[Job], Job], sequence: bool) -> list[str]:
    made = comm_job(2, 2, (("dp", 2), ("tp", 2)), sequence=sequence)
    return [str(fault) for fault in plan_faults(comm_plan("1f1b", change(made)))]


def test_a_gradient_that_differs_is_summed() -> None:
    """The plan is whole in all else: its sums fit what the job says."""

    def forget(of: Job) -> Job:
        return replace(of, parameters=tuple(replace(p, partial=()) for p in of.parameters))

    assert faults_of(forget, sequence=True) == [
        f"rank {s}, parameter n{s}: its gradient dn{s} ({s}W) differs between tp ranks, which all hold it "
        "whole, and is not summed. Name tp in `partial`"
        for s in (0, 1)
    ]


def test_a_gradient_that_is_whole_is_not_summed() -> None:
    def add(of: Job) -> Job:
        return replace(
            of, parameters=tuple(p if p.shards else replace(p, partial=("tp",)) for p in of.parameters)
        )

    assert faults_of(add, sequence=False) == [
        f"rank {s}, parameter n{s}: its gradient dn{s} ({s}W) is the whole on every tp rank, and would be "
        "counted 2 times. Take tp out of `partial`"
        for s in (0, 1)
    ]


def test_a_loss_and_an_update_that_differ() -> None:
    def unsummed(of: Job) -> Job:
        ops = dict(of.stages[1].ops)
        ops[Phase.F] = (*ops[Phase.F][:-3], replace(ops[Phase.F][-3], name="loss"))
        buffer = Buffer("seen", SLICE, (0,), ((0, Phase.F, "y0"),))
        return replace(of, stages=(of.stages[0], Stage(1, ops)), buffers=(buffer,))

    assert faults_of(unsummed, sequence=True) == [
        "rank 1, loss: loss differs between tp ranks. Gather or sum what it is made of first",
        "rank 0, buffer seen: its update y0 (0F) differs between tp ranks, which all hold it whole. "
        "Sum or gather what it is made of first",
    ]


def test_one_place_with_copies_tells_its_loss() -> None:
    plan = comm_plan("1f1b", comm_job(1, 2, (("dp", 2),)))
    assert plan_faults(plan) == []
    silent = window("0REDUCE_GRAD 1", "dp.loss.sum; ", "")(window("0REDUCE_GRAD", "dp.loss; ", "")(plan))
    assert [str(fault) for fault in plan_faults(silent)] == [
        "rank 0, dp.loss: never starts. Add it to a window, or remove it",
        "rank 0, loss: is never summed; other ranks would wait. Add its sum",
    ]
    alone = comm_plan("1f1b", comm_job(1, 2, (("tp", 2),)))
    assert all(op.lane != "loss" for op in alone.sums(0))
