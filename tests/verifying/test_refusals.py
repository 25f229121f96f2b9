"""Every refusal of a plan: an edit, the place that the fault names, and a key word.

Bases: a chain (1F1B on two ranks with two microbatches; edges e0 y0 0F>1F, e1 dx1 1I>0I, e2 h0 0F>1F); a grid
with two pipeline ranks, three copies of the data and two tensor-parallel ranks; and smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from stretto.capturing.trace import trace
from stretto.errors import PlanError
from stretto.ir.action import Phase
from stretto.ir.plan import Communicator, Plan
from stretto.ir.program import FREE, Buffer, Job, Op, Ref, Shard, Stage, TensorSpec
from stretto.passes.recompute import repeat
from stretto.planning.choose import AHEAD
from stretto.planning.pair import full
from stretto.planning.schedules import paired
from stretto.schedule.families import make_schedule
from stretto.verifying import plan_faults, verify
from tests.capturing.zoo import BatchNorm, mean_square, rows
from tests.passes.steps import step_of
from tests.runtime.equality import job_of
from tests.runtime.equality import lowered as lower_it
from tests.synthetic_comm import make_comm_costs, plan_with
from tests.verifying.comm_plans import comm_job, comm_plan, one_of_each
from tests.verifying.edits import (
    Edit,
    both,
    communicator,
    communicators,
    costs,
    job,
    once,
    op,
    order,
    parameter,
    schedule,
    sums,
    window,
)
from tests.verifying.plans import LOOPED, NEIGHBOURS, hand_schedule, lowered, rich_job, rich_plan

Row = tuple[Edit, str, str]
BASE = rich_plan("1f1b", 2, 2)
GRID_BASE = one_of_each()
CHAIN_LANES, GRID_LANES = BASE.communicators, GRID_BASE.communicators
END = "0REDUCE_GRAD 2"
"""The window of the step's end on the first pipeline rank of the grid."""
LAST = "dp.0.1.1.grad; "
"""What that window ends with."""
AGAIN = f"{LAST}again; again.sum; "
FLAT = Ref("grad/n0"), Ref("grad/w0.0")
"""What the bucket of the grid has."""
WITHOUT = (once(0, lambda ops: [op for op in ops if op.name not in ("tp.0.0", "tp.0.0.sum")]),)
FREED = Op("freed", FREE, (), writes=("grad/w0.1",))


def summed_again(lane: str, size: int) -> tuple[Op, Op]:
    """A gradient of the grid that is summed over dp, as it has to be."""
    value, outputs = "grad/w0.1", (TensorSpec((512, 256), "float32"),)
    start = Op("again", "comm.all_reduce", (Ref(value), "sum", lane, size), (), outputs, value)
    return start, Op("again.sum", "comm.wait", (Ref("again"),), (), outputs, value, writes=(value,))


SLICE = TensorSpec((256, 512), "float32")
ALIKE = GRID_BASE.costs.collectives["tp", "all_gather"]

CHAIN: list[Row] = [
    (window("0F", "h0; send e2; y0; ", "h0; send e2; "), "window 0F, y0", "missing"),
    (window("0B", "g0; ", "g0; g0; "), "window 0B, g0", "is there twice"),
    (window("0F", "h0; send e2; y0; ", "y0; h0; send e2; "), "window 0F, y0", "made later"),
    (window("0F", "send e0; ", ""), "window 0F, send e0", "never leaves"),
    (window("0F", "y0; send e0; ", "send e0; y0; "), "window 0F, send e0", "is before"),
    (window("0F", "send e0; ", "send e0; send e1; "), "window 0F, send e1", "takes nothing"),
    (window("0F", "send e0; ", "send e0; wait e1; "), "window 0F, wait e1", "brings nothing"),
    (window("1F", "wait e0; ", ""), "window 1F, h1", "never waits"),
    (window("1F", "wait e0; h1; ", "h1; wait e0; "), "window 1F, h1", "made later"),
    (order(0, "run 0F:1; ", ""), "0B0", "schedule"),
    (order(0, "run 0B:1; ", ""), "nothing", "schedule"),
    (order(0, "run 0F:1; ", "run 0F:1; run 0F:1; "), "0F1", "runs twice"),
    (order(1, "run 1F:0; run 1B:0; ", "run 1B:0; run 1F:0; "), "1B0", "backward before forward"),
    (order(1, "run 1F:0; run 1B:0; ", "run 1B:0; run 1F:0; "), "run 1B:0", "has not made yet"),
    (order(1, "run 1B:1; ", "run 1B:1; run 1B:1; "), "run 1B:1", "is freed"),
    (order(0, "recv e1:1; ", ""), "run 0B:1", "not posted before"),
    (order(0, "recv e1:1; ", ""), "edge e1 dx1 1I>0I", "not received"),
    (order(0, "run 0B:1; ", "run 0B:1; recv e1:1; "), "recv e1:1", "is there twice"),
    (
        order(1, "recv e0:1; run 1F:0; run 1B:0; run 1F:1; ", "run 1F:0; run 1B:0; run 1F:1; recv e0:1; "),
        "run 1F:1",
        "not posted before",
    ),
    (order(0, "recv e1:1; ", "recv e1:1; recv e0:0; "), "recv e0:0", "leads from"),
    (order(0, "recv e1:1; ", "recv e1:1; recv e1:2; "), "recv e1:2", "no microbatch"),
    (order(1, "recv e0:0; recv e2:1; ", "recv e2:1; recv e0:0; "), "recv e2:1", "sender's order"),
    (order(0, "sent e2:1; ", ""), "edge e2 h0 0F>1F", "nothing waits"),
    (order(0, "sent e2:1; ", "sent e2:1; sent e2:1; "), "sent e2:1", "is there twice"),
    (order(0, "recv e1:0; ", "recv e1:0; sent e2:0; "), "sent e2:0", "has not started before"),
    (order(0, "sent e2:1; ", "sent e2:1; sent e1:1; "), "sent e1:1", "leads from"),
    (order(0, "run 0F:1; ", ""), "edge e0 y0 0F>1F", "not sent"),
    (order(0, "run 0F:1; ", "run 0F:1; run 0F:1; "), "run 0F:1", "is there twice"),
    (order(0, "run 0REDUCE_GRAD:-1; ", ""), "rank 0, pp.loss", "never runs"),
    (
        order(0, "run 0REDUCE_GRAD:-1; ", "run 0REDUCE_GRAD:-1; run 0REDUCE_GRAD:-1; "),
        "window 0REDUCE_GRAD, pp.loss",
        "second time",
    ),
    (
        window("1REDUCE_GRAD", "pp.loss; ", "pp.loss.sum; pp.loss; "),
        "window 1REDUCE_GRAD, pp.loss.sum",
        "reads pp.loss, which is not there yet",
    ),
    (
        order(1, "run 1F:1; run 1REDUCE_GRAD:-1; ", "run 1REDUCE_GRAD:-1; run 1F:1; "),
        "window 1REDUCE_GRAD, pp.loss",
        "added its part",
    ),
    (window("1REDUCE_GRAD 2", "pp.tied.w0.sum; ", ""), "rank 1, pp.tied.w0.sum", "never runs"),
    (
        order(1, "run 1B:1; run 1REDUCE_GRAD 1:-1; ", "run 1REDUCE_GRAD 1:-1; run 1B:1; "),
        "window 1REDUCE_GRAD 1, pp.tied.w0",
        "reads grad/w0 before `run 1B:1` has added its part",
    ),
    (communicators(*CHAIN_LANES[1:]), "communicator pp 0>1", "missing"),
    (communicators(*CHAIN_LANES, CHAIN_LANES[0]), "communicator pp 0>1", "there twice"),
    (communicator("pp 0>1", ranks=(1, 0)), "communicator pp 0>1", "its work"),
    (communicators(*CHAIN_LANES, Communicator("spare", (1, 1))), "communicator spare", "ranks twice"),
    (job(microbatches=3), "schedule", "the job has"),
    (schedule(stages=3), "schedule", "the job has"),
    (order(0, "run 0F:0; ", "run 5F:0; "), "orders[0][2]", "there is no"),
]

GRID: list[Row] = [
    (job(axes=(("tp", 2), ("dp", 3))), "axes", "Name each once"),
    (job(axes=(("dp", 3), ("ep", 0), ("tp", 2))), "axis ep", "has 0 ranks"),
    (parameter("w0.1", shards=(Shard("ep", 0),)), "parameter w0.1", "no axis of the job"),
    (parameter("w0.1", shards=(Shard("tp", 2),)), "parameter w0.1", "sharded along"),
    (parameter("w0.1", shards=(Shard("tp", 0, 3),)), "parameter w0.1", "equal blocks"),
    (parameter("w0.1", shards=(Shard("tp", 0), Shard("tp", 1))), "parameter w0.1", "over tp twice"),
    (parameter("n0", partial=("dp",)), "parameter n0", "no axis that splits"),
    (parameter("n0", partial=("tp", "tp")), "parameter n0", "`partial` twice"),
    (parameter("n0", kept=("dp",)), "parameter n0", "`zero` is 0"),
    (parameter("n0", kept=("tp",)), "parameter n0", "no copies of it"),
    (parameter("n0", kept=("dp", "dp")), "parameter n0", "or twice"),
    (parameter("w0.1", partial=("tp",)), "parameter w0.1", "different rows"),
    (
        parameter("w0.1", shards=(Shard("tp", 0, 1, 3),), partial=("tp",)),
        "parameter w0.1",
        "ranks of tp keep",
    ),
    (parameter("w0.1", shards=(Shard("tp", 0, 1, 0),)), "parameter w0.1", "ranks of tp keep"),
    (parameter("w0.1", shards=(Shard("tp", 0, 1, 2),)), "parameter w0.1", "ranks of tp keep"),
    (parameter("w1.0", shards=(Shard("tp", 0),)), "parameter w1.0", "is one tensor"),
    (parameter("n1", partial=()), "parameter n1", "is one tensor"),
    (communicators(*GRID_LANES[:-1]), "job.stages[0].ops.REDUCE_GRAD[2]", "there is no"),
    (communicator("tp", ranks=(1, 0)), "communicator tp", "its work"),
    (communicator("dp", ranks=(0, 2)), "communicator dp", "its work"),
    (communicator("tied n0", axes=("dp",)), "communicator tied n0", "its work"),
    (communicator("loss", axes=("pp",)), "communicator loss", "its work"),
    (
        communicators(*GRID_LANES, Communicator("x", (0,), ("tp", "tp"))),
        "communicator x",
        "axes twice",
    ),
    (op(0, "dp.0.1.flat", args=((FLAT[1], FLAT[1]), 0, 1)), "rank 0, grad/n0", "made of grad/w0.0 at"),
    (op(0, "dp.0.1.flat", args=(FLAT[::-1], 0, 1)), "rank 0, grad/w0.0", "made of grad/n0 at the end"),
    (op(0, "dp.0.1.flat", args=(FLAT[:1], 0, 1)), "rank 0, grad/w0.0", "made of nothing at the end"),
    (op(0, "dp.0.0", args=((), "sum", "dp", 3)), "job.stages[0].ops.REDUCE_GRAD[3]", "cannot be read"),
    (op(0, "dp.0.0", args=(Ref("grad/w0.1"), "max", "dp", 3)), "rank 0, dp.0.0", "takes the max of grad"),
    (op(0, "dp.0.0.sum", args=(Ref("dp.0.9"),)), "job.stages[0].ops.REDUCE_GRAD[7]", "there is no 'dp.0.9'"),
    (op(0, "dp.0.0.sum", args=(Ref("fg0.0"),)), "job.stages[0].ops.REDUCE_GRAD[7]", "there is no 'fg0.0'"),
    (sums(0, "dp.0.0", "grad/w0.9"), "job.stages[0].ops.REDUCE_GRAD[3]", "there is no 'grad/w0.9' before"),
    (op(0, "dp.0.0.sum", writes=("grad/w0.9",)), "job.stages[0].ops.REDUCE_GRAD[7]", "'grad/w0.9' to write"),
    (
        sums(0, "dp.0.0", lane="loss", size=6),
        "rank 0, dp.0.0",
        "grad/w0.1 on communicator loss, which is not",
    ),
    (sums(0, "pp.loss", lane="dp", size=3), "rank 0, pp.loss", "not for them"),
    (sums(0, "dp.0.0", lane="pp 0>1", size=2), "rank 0, dp.0.0", "not for them"),
    (sums(0, "pp.tied.n0", lane="tied w0.0"), "rank 0, pp.tied.n0", "not for them"),
    (sums(0, "dp.0.0", lane="tp", size=2), "rank 0, grad/w0.1", "never summed over dp"),
    (sums(0, "dp.0.0", lane="tp", size=2), "rank 0, grad/w0.1", "is full along tp at the end"),
    (sums(0, "dp.0.0", size=2), "stage 0REDUCE_GRAD, dp.0.0", "the job has 3"),
    (op(0, "dp.0.1", alias="grad/n0"), "stage 0REDUCE_GRAD, dp.0.1", "a view of grad/n0"),
    (
        op(0, "dp.0.1.sum", outputs=(TensorSpec((131584,), "bfloat16"),)),
        "stage 0REDUCE_GRAD, dp.0.1.sum",
        "but dp.0.1 is float32",
    ),
    (op(0, "dp.0.1.parts", args=(Ref("dp.0.1.sum"), (131072, 512), 1)), "dp.0.1.parts", "the plan says"),
    (op(0, "dp.0.1.1", args=(Ref("dp.0.1.parts"), 0)), "dp.0.1.1", "takes part 0 of"),
    (op(0, "dp.0.1.0.grad", writes=("grad/w0.0",)), "rank 0, grad/n0", "never summed over dp"),
    (op(0, "dp.0.1.0.grad", writes=()), "grad/n0", "never summed over dp"),
    (op(0, "dp.0.1.1.grad", writes=("grad/w0.1",)), "rank 0, grad/w0.1", "made of grad/w0.0 at the end"),
    (schedule(stage_ranks=(1, 1)), "what stage 1 does once a step", "is not the first"),
    (
        both(window("0W last", "#1 tp.0.0; ", ""), window(END, "tp.0.0.sum; ", "")),
        "rank 0, tp.0.0.sum",
        "never runs",
    ),
    (
        both(*WITHOUT, window("0W last", "#1 tp.0.0; ", ""), window(END, "tp.0.0.sum; ", "")),
        "rank 0, grad/n0",
        "never summed over tp",
    ),
    (window(END, "pp.tied.n0; pp.tied.n0.sum; ", ""), "rank 0, pp.tied.n0", "never runs"),
    (
        both(
            once(0, lambda ops: (*ops, *summed_again("dp", 3))),
            window(END, LAST, AGAIN),
        ),
        "again (comm.all_reduce)",
        "which all have it in full (along dp)",
    ),
    (
        both(
            once(0, lambda ops: (*ops, *summed_again("tp", 2))),
            window(END, LAST, AGAIN),
        ),
        "rank 0, grad/w0.1",
        "is full along tp at the end",
    ),
    (
        both(once(0, lambda ops: (*ops, FREED)), window(END, LAST, f"{LAST}freed; ")),
        "rank 0, grad/w0.1",
        "made of nothing at the end",
    ),
    (sums(0, "dp.0.0", "grad/n0"), "window 0W last, dp.0.0", "while tp.0.0 is under way in its memory"),
    (sums(0, "dp.0.0", "grad/w1.1"), "rank 0, dp.0.0", "reads grad/w1.1, which this rank does not have"),
    (
        window(END, "tp.0.0.sum; dp.0.0.sum; pp.tied.n0; ", "dp.0.0.sum; pp.tied.n0; tp.0.0.sum; "),
        "window 0REDUCE_GRAD 2, pp.tied.n0",
        "reads grad/n0 before tp.0.0.sum has written it",
    ),
    (
        both(
            window("0W last", "#1 tp.0.0; ", ""),
            window("0REDUCE_GRAD", "pp.loss; ", "pp.loss; tp.0.0; "),
        ),
        "window 0REDUCE_GRAD, tp.0.0",
        "added its part",
    ),
    (
        order(0, "run 0W last:2,-1; run 0REDUCE_GRAD 1:-1; ", "run 0REDUCE_GRAD 1:-1; run 0W last:2,-1; "),
        "window 0REDUCE_GRAD 1, pp.tied.w0.0",
        "reads grad/w0.0 before `run 0W last:2,-1` has added its part",
    ),
    (
        window("0W last", "dw0.1; #1 dp.0.0; ", "#1 dp.0.0; dw0.1; "),
        "window 0W last, dp.0.0",
        "added its part",
    ),
    (order(0, "run 0W last:2,-1; ", "run 0W:2; "), "window 0REDUCE_GRAD 2, tp.0.0.sum", "not there yet"),
    (order(0, "run 0W:1; ", "run 0W last:1,-1; "), "window 0W last, tp.0.0", "second time"),
    (order(0, "run 0W last:2,-1; ", "run 0W last:2,1; "), "run 0W last:2,1", "once a step to a microbatch"),
    (
        order(0, "run 0REDUCE_GRAD 1:-1; ", "run 1REDUCE_GRAD 1:-1; "),
        "run 1REDUCE_GRAD 1:-1",
        "runs what rank 1 does once a step",
    ),
    (
        window("0REDUCE_GRAD 1", "pp.tied.w0.0; ", "pp.tied.w0.0; send e0; "),
        "run 0REDUCE_GRAD 1:-1",
        "has messages in REDUCE_GRAD",
    ),
    (
        window("0REDUCE_GRAD 1", "pp.tied.w0.0; ", "pp.tied.w0.0; dp.0.0; "),
        "window 0REDUCE_GRAD 1, dp.0.0",
        "second time",
    ),
    (window("0W last", "#1 dp.0.0; ", "#1 dp.0.0; #1 dp.0.0; "), "window 0W last, dp.0.0", "second time"),
    (window("0W last", "#1 dp.0.0; ", "#1 dp.0.9; "), 'windows["0W last"].items[3]', "has no op"),
    (
        window(END, "dp.0.0.sum; ", "dp.0.0.sum; dp.0.0.sum; "),
        "window 0REDUCE_GRAD 2, dp.0.0.sum",
        "second time",
    ),
    (
        window(END, "dp.0.1; dp.0.1.sum; ", "dp.0.1.sum; dp.0.1; "),
        "window 0REDUCE_GRAD 2, dp.0.1.sum",
        "reads dp.0.1, which is not there yet",
    ),
    (
        window(END, "dp.0.1.flat; dp.0.1; ", "dp.0.1; dp.0.1.flat; "),
        "window 0REDUCE_GRAD 2, dp.0.1",
        "reads dp.0.1.flat, which is not there yet",
    ),
    (window(END, "dp.0.0.sum; ", ""), "rank 0, dp.0.0.sum", "never runs"),
    (costs(collectives={("ep", "gather"): ALIKE}), "costs.collectives", "there is no"),
    (costs(shared=("ep",)), "costs.shared", "there is no"),
    (op(0, "fg0.0", args=(Ref("batch/x"), "tp")), "stage 0F, fg0.0", "cannot be read"),
    (op(0, "fg0.0", args=(Ref("batch/x"), "ep", 2)), "stage 0F, fg0.0", "no axis"),
    (op(0, "fg0.0", args=(Ref("batch/x"), "tp", 4)), "stage 0F, fg0.0", "the job has"),
    (op(0, "fg0.0", outputs=(SLICE,)), "stage 0F, fg0.0", "over 2 ranks, is [512"),
    (op(0, "fs0.0", args=(Ref("fm0.0"), "mean", "tp", 2)), "stage 0F, fs0.0", "is none"),
    (op(0, "fm0.0", outputs=(TensorSpec((511, 512), "float32"),)), "stage 0F, fs0.0", "is none"),
    (op(0, "fm0.0", outputs=(SLICE, SLICE)), "job.stages[0].ops.F[3]", "is no tensor"),
    (op(0, "fg0.0", alias="param/n0"), "stage 0F, fg0.0", "a view of"),
    (op(0, "fg0.0", target="comm.broadcast"), "stage 0F, fg0.0", "there is no"),
    (op(0, "fg0.0_w", target="aten.alias.default"), "stage 0F, fg0.0", "nothing waits"),
    (op(0, "fg0.0_w", target="aten.alias.default"), "stage 0F, fg0.0_w", "being filled"),
    (op(0, "fm0.0", target="comm.wait", args=(Ref("fg0.0"),), alias="fg0.0"), "stage 0F, fg0.0", "2 times"),
    (op(0, "fs0.0_w", args=(Ref("fm0.0"),)), "stage 0F, fs0.0_w", "starts no communication"),
    (op(0, "fg0.0_w", args=(Ref("fg0.0"), 1)), "stage 0F, fg0.0_w", "cannot be read"),
    (op(0, "fg0.0_w", outputs=(SLICE,)), "stage 0F, fg0.0_w", "view of"),
    (op(0, "fg0.0_w", alias=None), "stage 0F, fg0.0_w", "view of"),
    (window("0F", "fg0.0; fg0.0_w; ", "fg0.0_w; fg0.0; "), "window 0F, fg0.0_w", "made later"),
    (window("0F", "fg0.0; ", "fg0.0; fg0.0; "), "window 0F, fg0.0", "is there twice"),
    (parameter("w0.0", grads=((0, Phase.I, "bg0.1"),)), "stage 0I, bg0.1", "being filled"),
    (
        op(0, "y0", target="comm.all_reduce", args=(Ref("fs0.1_w"), "sum", "tp", 2)),
        "stage 0F, y0",
        "being filled",
    ),
    (job(loss=(1, "loss_sum")), "stage 1F, loss_sum", "being filled"),
    (op(0, "fm0.0", target="axis.chunk", args=(Ref("batch/x"), 2, "tp", 2)), "stage 0F, fm0.0", "is no part"),
    (op(0, "fm0.0", target="axis.chunk", args=(Ref("batch/x"), 0, "tp", 2)), "stage 0F, fm0.0", "is no part"),
    (op(0, "fm0.0", target="axis.index", args=("tp", 2)), "stage 0F, fm0.0", "A coordinate is"),
    (op(0, "fm0.0", target="axis.index", args=("tp",)), "stage 0F, fm0.0", "cannot be read"),
]


def repeated() -> Plan:
    """One stage whose two multiplications, with their all-reduces, are done again in the backward."""
    base = comm_job(1, 2, (("tp", 2),), blocks=2)
    names = [o.name for o in base.stages[0].ops[Phase.F] if o.name.startswith(("f", "y"))]
    again = repeat(base, {0: names})
    return plan_with(again, hand_schedule((0,), 2, "0F0 0B0 0F1 0B1"), make_comm_costs(again))


def constants(first: float, again: float) -> Edit:
    """A constant among the arguments of an op, and of what repeats it."""
    return both(
        op(0, "fm0.0", args=(Ref("batch/x"), first)), op(0, "fm0.0_again", args=(Ref("batch/x"), again))
    )


REPEATED: list[Row] = [
    (op(0, "fm0.0_again", repeats="gone"), "stage 0I, fm0.0_again", "does not have in F"),
    (op(0, "fm0.0_again", repeats="d0"), "stage 0I, fm0.0_again", "does not have in F"),
    (op(0, "fm0.0_again", repeats="fr0.0"), "stage 0I, fm0.0_again", "instead of"),
    (op(0, "fm0.0_again", repeats="fm0.1"), "stage 0I, fm0.0_again", "other arguments"),
    (op(0, "fm0.0_again", random=True), "stage 0I, fm0.0_again", "random = True"),
    (op(0, "fm0.0_again", args=(Ref("batch/x"),)), "stage 0I, fm0.0_again", "other arguments"),
    (op(0, "fm0.0_again", outputs=(replace(SLICE, dtype="float64"),)), "stage 0I, fm0.0_again", "instead of"),
    (constants(0.0, -0.0), "stage 0I, fm0.0_again", "other arguments"),
    (op(0, "fm0.1", repeats="fm0.0"), "stage 0F, fm0.1", "in F itself"),
]

PAIRED = hand_schedule((0,), 3, "0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2")
SPLIT = hand_schedule((0,), 3, "0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2")


def on_one_rank(late: bool = False) -> Plan:
    """One stage with one all-reduce forward (fr0.0) and one backward (br0.0), in a pair of microbatches, or
    with I and W apart. late: the backward's all-reduce is waited for in W."""
    base = comm_job(1, 3, (("tp", 2),))
    ops = dict(base.stages[0].ops)
    if late:
        at = [o.name for o in ops[Phase.I]].index("br0.0_w")
        ops[Phase.I], ops[Phase.W] = ops[Phase.I][:at], (*ops[Phase.I][at:], *ops[Phase.W])
    return plan_with(replace(base, stages=(Stage(0, ops),)), SPLIT if late else PAIRED, make_comm_costs(base))


PAIR: list[Row] = [
    (window("0F+0B", "fr0.0; fr0.0_w; ", "fr0.0_w; fr0.0; "), "0F+0B, fr0.0_w", "made later"),
    (window("0F+0B", "#1 br0.0; #1 br0.0_w; ", "#1 br0.0_w; #1 br0.0; "), "0F+0B, br0.0_w", "made later"),
    (window("0F+0B", "fr0.0_w; ", "#1 fr0.0_w; "), "", "in its B program"),
    (window("0F+0B", "#1 br0.0_w; ", "br0.0_w; "), "", "in its F program"),
    (order(0, "run 0F+0B:1,0; ", "run 0F+0B:1,1; "), "run 0F+0B:1,1", "binds parts"),
]
LATE: list[Row] = [
    (
        order(
            0,
            "run 0I:1; run 0W:0; run 0F:2; run 0I:2; run 0W:1; ",
            "run 0W:1; run 0I:1; run 0F:2; run 0I:2; run 0W:0; ",
        ),
        "run 0W:1",
        "0I1 has not made yet",
    ),
]
STAYING: list[Row] = [
    (order(0, "run 0F:0; ", "recv e0:0; run 0F:0; "), "recv e0:0", "there is no message"),
    (order(0, "run 0F:0; run 1F:0; ", "run 1F:0; run 0F:0; "), "run 1F:0", "has not made yet"),
]
BASES: dict[str, tuple[Callable[[], Plan], list[Row]]] = {
    "chain": (lambda: BASE, CHAIN),
    "grid": (lambda: GRID_BASE, GRID),
    "repeated": (repeated, REPEATED),
    "pair": (lambda: on_one_rank(), PAIR),
    "late wait": (lambda: on_one_rank(late=True), LATE),
    "neighbours": (lambda: lowered(rich_job(3, 2), NEIGHBOURS), STAYING),
}


@pytest.mark.parametrize("base", BASES)
def test_the_bases_have_no_fault(base: str) -> None:
    assert plan_faults(BASES[base][0]()) == []


@pytest.mark.parametrize(
    ("base", "edit", "where", "word"),
    [(base, *row) for base, (_, table) in BASES.items() for row in table],
    ids=[f"{base}: {where}: {word}" for base, (_, table) in BASES.items() for _, where, word in table],
)
def test_refusals(base: str, edit: Edit, where: str, word: str) -> None:
    found = [str(fault).partition(": ") for fault in plan_faults(edit(BASES[base][0]()))]
    assert any(at.endswith(where) and word in what for at, _, what in found), found


def test_the_error_lists_every_fault() -> None:
    doubled = window("1REDUCE_GRAD", "pp.loss; ", "pp.loss; pp.loss; ")(BASE)
    broken = window("1REDUCE_GRAD 2", "pp.tied.w0.sum; ", "")(doubled)
    with pytest.raises(PlanError, match="2 faults") as caught:
        verify(broken)
    assert [(fault.rank, fault.action) for fault in plan_faults(broken)] == [
        (1, "window 1REDUCE_GRAD, pp.loss"),
        (1, "pp.tied.w0.sum"),
    ]
    assert len(caught.value.faults) == 2


def test_a_constant_that_is_no_number_is_itself() -> None:
    plan = constants(float("nan"), -float("nan"))(repeated())
    assert not [fault for fault in plan_faults(plan) if "repeats" in str(fault)]


def test_two_phases_of_one_microbatch_share_a_window_that_is_ordered_for_it() -> None:
    plan = lowered(rich_job(1, 1), hand_schedule((0,), 1, "0F0 (0I0;0W0)OVERLAP_F_B"))
    assert plan_faults(plan) == []
    ordered = plan.windows["0I+0W=0,0"]
    [fault] = plan_faults(replace(plan, windows={**plan.windows, ordered.name: replace(ordered, shares=())}))
    assert str(fault).startswith("rank 0, run 0I+0W=0,0:0,0: binds parts to microbatches as [0, 0]")


def test_a_value_that_nothing_brings() -> None:
    plan = lowered(rich_job(2, 1), hand_schedule((0, 1), 1, "0F0 0B0", "1F0 1B0"))
    without = job(edges=tuple(edge for edge in plan.job.edges if edge.value != "h0"))
    orders = order(1, "recv e2:0; ", ""), order(0, "sent e2:0; ", "")
    windows = window("1F", "wait e2; ", ""), window("0F", "send e2; ", "")
    first = str(plan_faults(both(without, *orders, *windows)(plan))[0])
    assert first.startswith("rank 1, window 1F, skip: reads h0")
    assert "no edge brings" in first


def test_sums_that_join_ranks_start_in_one_order() -> None:
    """With a second pair of tied parameters on the same two ranks."""
    base = rich_job(4, 2)
    tied = tuple(replace(p, tied_to="w1") if p.name == "w2" else p for p in base.parameters)
    plan = lowered(replace(base, parameters=tied), LOOPED)
    assert plan_faults(plan) == []
    inside = window("0REDUCE_GRAD 1", "pp.tied.w0; pp.tied.w1; ", "pp.tied.w1; pp.tied.w0; ")
    runs = "run 1REDUCE_GRAD 1:-1; ", "run 1B:0; run 1B:1; run 1REDUCE_GRAD 2:-1; "
    for edit in (inside, order(1, runs[0] + runs[1], runs[1] + runs[0])):
        [fault] = plan_faults(edit(plan))
        assert fault.rank == 1
        assert "the order here is loss, tied w" in str(fault)
    shared = [str(fault) for fault in plan_faults(sums(0, "pp.tied.w1", lane="tied w0")(plan))]
    assert "not for them" in shared[0]


def test_microbatches_that_update_one_buffer_do_not_share_a_window() -> None:
    found = trace(BatchNorm(), rows(8), mean_square, microbatches=4)
    made = job_of(found, 2, 4)
    orders = make_schedule("1f1b", 2, 4)
    shared = full(orders)
    assert shared is not None
    assert any("all update buffer" in str(fault) for fault in plan_faults(lower_it(made, shared)))
    assert plan_faults(lower_it(made, orders)) == []
    step, context = step_of(made, orders)
    for ahead in AHEAD:  # a forward beside a backward updates once
        assert plan_faults(lower_it(made, paired(step, context, ahead=ahead).schedule)) == []


def changed_faults(change: Callable[[Job], Job], sequence: bool) -> list[str]:
    made = comm_job(2, 2, (("dp", 2), ("tp", 2)), sequence=sequence)
    return [str(fault) for fault in plan_faults(comm_plan("1f1b", change(made)))]


def without_partial(of: Job) -> Job:
    return replace(of, parameters=tuple(replace(p, partial=()) for p in of.parameters))


def partial_everywhere(of: Job) -> Job:
    return replace(
        of, parameters=tuple(p if p.shards else replace(p, partial=("tp",)) for p in of.parameters)
    )


@pytest.mark.parametrize(
    ("change", "sequence", "word"),
    [(without_partial, True, "is not summed"), (partial_everywhere, False, "and it is summed")],
)
def test_gradients_are_summed_where_they_differ(
    change: Callable[[Job], Job], sequence: bool, word: str
) -> None:
    """The plan is sound in all else: its sums fit what the job says."""
    found = changed_faults(change, sequence)
    assert [fault.partition(": ")[0] for fault in found] == [f"rank {s}, parameter n{s}" for s in (0, 1)]
    assert all(word in fault for fault in found)


def test_a_loss_and_an_update_that_differ() -> None:
    def unsummed(of: Job) -> Job:
        ops = dict(of.stages[1].ops)
        ops[Phase.F] = (*ops[Phase.F][:-3], replace(ops[Phase.F][-3], name="loss"))
        buffer = Buffer("seen", SLICE, (0,), ((0, Phase.F, "y0"),))
        return replace(of, stages=(of.stages[0], Stage(1, ops)), buffers=(buffer,))

    loss, update = changed_faults(unsummed, sequence=True)
    assert loss.startswith("rank 1, loss: loss differs")
    assert update.startswith("rank 0, buffer seen: its update y0 (0F) differs")


def test_one_rank_of_the_pipeline_with_copies_sums_its_loss() -> None:
    plan = comm_plan("1f1b", comm_job(1, 2, (("dp", 2),)))
    silent = both(window("0REDUCE_GRAD", "dp.loss; ", ""), window("0REDUCE_GRAD 1", "dp.loss.sum; ", ""))
    assert [fault.action for fault in plan_faults(silent(plan))] == ["dp.loss", "dp.loss.sum"]
    alone = comm_plan("1f1b", comm_job(1, 2, (("tp", 2),)))
    assert all(op.lane != "loss" for op in alone.once(0))


@pytest.mark.parametrize(("wait", "words"), [(Phase.F, []), (Phase.I, ["sends buffer/seen"])])
def test_a_buffer_is_not_written_while_it_is_sent(wait: Phase, words: list[str]) -> None:
    """Where the wait is in the backward, the next microbatch's forward updates the buffer before that."""
    of = comm_job(2, 2, (("dp", 2), ("tp", 2)))
    ops, gathered = dict(of.stages[0].ops), TensorSpec((512, 512), "float32")
    seen = Ref("buffer/seen"), (256, 512)
    view = Op("seen_view", "aten.view.default", seen, (), (SLICE,), "buffer/seen")
    start = Op("seen_all", "comm.all_gather", (Ref("seen_view"), "tp", 2), (), (gathered,))
    ops[Phase.F] = (*ops[Phase.F], view, start)
    ops[wait] = (*ops[wait], Op("seen_all_w", "comm.wait", (Ref("seen_all"),), (), (gathered,), "seen_all"))
    buffer = Buffer("seen", SLICE, (0,), ((0, Phase.F, "y0"),))
    sent = replace(of, stages=(Stage(0, ops), of.stages[1]), buffers=(buffer,))
    found = plan_faults(comm_plan("1f1b", sent))
    assert [fault.what[:17] for fault in found] == words


# Plans that are right rank by rank, and block only together: each stuck rank and what it awaits is named.


def stuck(plan: Plan) -> list[tuple[int | None, str]]:
    found = plan_faults(plan)
    assert all("deadlock" in fault.what for fault in found)
    return [(fault.rank, fault.action) for fault in found]


def test_deadlock_of_runs_names_every_stuck_rank() -> None:
    crossed = hand_schedule((0, 1), 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    plan = lowered(rich_job(2, 2), crossed)
    assert stuck(plan) == [(0, "run 0B:0"), (1, "run 1F:1")]
    assert "e1:0 (dx1 of microbatch 0), which rank 1 has not sent" in str(plan_faults(plan)[0])


def test_waiting_for_the_loss_too_early() -> None:
    early = both(
        order(0, "run 0REDUCE_GRAD:-1; ", ""), order(0, "recv e1:0; ", "run 0REDUCE_GRAD:-1; recv e1:0; ")
    )(BASE)
    assert plan_faults(early) == []  # it starts nothing that would wait
    heard = window("0REDUCE_GRAD", "pp.loss; ", "pp.loss; pp.loss.sum; ")(early)
    heard = window("0REDUCE_GRAD 2", "pp.loss.sum; ", "")(heard)
    assert stuck(heard) == [(0, "run 0REDUCE_GRAD:-1"), (1, "run 1F:0")]


def test_waiting_for_a_sum_too_early() -> None:
    moved = window("0REDUCE_GRAD 1", "pp.tied.w0; ", "pp.tied.w0; pp.tied.w0.sum; ")(BASE)
    moved = window("0REDUCE_GRAD 2", "pp.tied.w0.sum; ", "")(moved)
    assert plan_faults(moved) == []  # rank 1 needs nothing more of rank 0
    # Only w1's gradient is summed, on a rank that has no run before its sum.
    parameters = tuple(
        replace(p, grads=p.grads if p.name == "w1" else (), tied_to="w0", stages=(0, 1))
        for p in rich_job(2, 2).parameters
    )
    base = lowered(replace(rich_job(2, 2), parameters=parameters), make_schedule("1f1b", 2, 2))
    assert plan_faults(base) == []
    early = both(
        window("0REDUCE_GRAD 1", "pp.tied.w0; ", "pp.tied.w0; pp.tied.w0.sum; "),
        window("0REDUCE_GRAD 2", "pp.tied.w0.sum; ", ""),
    )
    first = plan_faults(early(base))[0]
    assert (first.rank, first.action) == (0, "run 0REDUCE_GRAD 1:-1")
    assert "deadlock: waits for pp.tied.w0 (pp.tied.w0.sum), which ranks [1] have not started" in first.what


def test_waiting_for_a_send_at_once_is_accepted_if_its_receive_is_posted() -> None:
    sent = "sent e2:0; sent e0:0; "
    assert plan_faults(both(order(0, sent, ""), order(0, "run 0F:0; ", f"run 0F:0; {sent}"))(BASE)) == []


def test_sends_that_need_a_buffer_are_refused() -> None:
    """Both ranks wait until a message has left before they post the receive that lets the other's leave."""
    posts, runs = "recv e1:0; recv e1:1; ", "run 0F:0; run 0F:1; "
    crossed = both(
        order(0, posts + runs, runs + posts),
        order(0, "sent e2:1; ", ""),
        order(0, "run 0F:1; ", "run 0F:1; sent e2:1; "),
        order(1, "recv e2:1; recv e0:1; ", ""),
        order(1, "sent e1:0; ", ""),
        order(1, "run 1B:0; ", "run 1B:0; sent e1:0; recv e2:1; recv e0:1; "),
    )(BASE)
    assert stuck(crossed) == [(0, "sent e2:1"), (1, "sent e1:0")]
    assert all("transport without buffers" in str(fault) for fault in plan_faults(crossed))
