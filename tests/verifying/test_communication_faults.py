"""Every refusal of a program's collectives, by its message. The base has two places, three copies of the data
and two tensor-parallel ranks; each case changes one op or one window.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.ir.action import Phase
from stretto.ir.program import Buffer, Op, Ref, Stage, TensorSpec
from stretto.verifying import plan_faults
from tests.verifying.comm_plans import comm_job, comm_plan, one_of_each
from tests.verifying.edits import Edit, job, op, parameter, window

BASE = one_of_each()
SLICE = TensorSpec((256, 512), "float32")
START = "rank 0, stage 0F, fg0.0: "
WAIT = "rank 0, stage 0F, fg0.0_w: "

REFUSED: list[tuple[Edit, str]] = [
    # the form of collectives
    (
        op(0, "fg0.0", args=(Ref("batch/x"), "tp")),
        START + "cannot be read. Write comm.all_gather(value, axis, size)",
    ),
    (
        op(0, "fg0.0", args=(Ref("batch/x"), "ep", 2)),
        START + "the job has no axis 'ep' beside pp. It has dp, tp",
    ),
    (
        op(0, "fg0.0", args=(Ref("batch/x"), "tp", 4)),
        START + "is for 4 ranks along tp, but the job has 2. Capture the job for tp = 2",
    ),
    (
        op(0, "fg0.0", outputs=(SLICE,)),
        START + "gives float32[256,512], but the all_gather of batch/x, float32[256,512], over 2 ranks is of "
        "shape [512, 512] and dtype float32",
    ),
    (
        op(0, "fs0.0", args=(Ref("fm0.0"), "mean", "tp", 2)),
        "rank 0, stage 0F, fs0.0: comm.reduce_scatter knows no reduction 'mean'. Use sum",
    ),
    (
        op(0, "fm0.0", outputs=(TensorSpec((511, 512), "float32"),)),
        "rank 0, stage 0F, fs0.0: gives float32[256,512], but the reduce_scatter of fm0.0, float32[511,512], "
        "over 2 ranks is none. Dim 0 must be a multiple of 2",
    ),
    (
        op(0, "fm0.0", outputs=(SLICE, SLICE)),
        "job.stages[0].ops.F[3]: reads 'fm0.0', which is no tensor",
    ),
    (op(0, "fg0.0", alias="param/n0"), START + "says that it is a view of param/n0"),
    (
        op(0, "fg0.0", target="comm.broadcast"),
        START + "there is no op comm.broadcast. Known are comm.all_reduce",
    ),
    # waits
    (
        op(0, "fg0.0_w", target="aten.alias.default"),
        START + "nothing waits until it is done. Add a `comm.wait` of fg0.0 to stage 0",
    ),
    (
        op(0, "fg0.0_w", target="aten.alias.default"),
        WAIT + "reads fg0.0, which is being filled until its communication is done. Read the result of",
    ),
    (
        op(0, "fm0.0", target="comm.wait", args=(Ref("fg0.0"),), alias="fg0.0"),
        START + "is waited for 2 times, by fg0.0_w, fm0.0. Keep one wait",
    ),
    (
        op(0, "fs0.0_w", args=(Ref("fm0.0"),)),
        "rank 0, stage 0F, fs0.0_w: waits for fm0.0, which starts no communication in stage 0",
    ),
    (op(0, "fg0.0_w", args=(Ref("fg0.0"), 1)), WAIT + "cannot be read. Write comm.wait(value)"),
    (
        op(0, "fg0.0_w", outputs=(SLICE,)),
        WAIT + "gives float32[256,512], a view of fg0.0; but fg0.0 is float32[512,512]. Make it a view",
    ),
    (op(0, "fg0.0_w", alias=None), WAIT + "gives float32[512,512], a view of None; but fg0.0 is"),
    (
        window("0F", "fg0.0; fg0.0_w; ", "fg0.0_w; fg0.0; "),
        "rank 0, window 0F, fg0.0_w: reads fg0.0, which is made later, at item 1",
    ),
    (
        window("0F", "fg0.0; ", "fg0.0; fg0.0; "),
        "rank 0, window 0F, fg0.0: stands twice, at items 0 and 1",
    ),
    # what else a start's result must not be
    (
        parameter("w0.0", grads=((0, Phase.I, "bg0.1"),)),
        "rank 0, stage 0I, bg0.1: it is grad w0.0, while it is being filled. Use the result",
    ),
    (
        op(0, "y0", target="comm.all_reduce", args=(Ref("fs0.1_w"), "sum", "tp", 2)),
        "rank 0, stage 0F, y0: edge e0 y0 0F>1F takes it to stage 1, while it is being filled",
    ),
    (job(loss=(1, "loss_sum")), "rank 1, stage 1F, loss_sum: it is loss, while it is being filled"),
    # parts of values
    (
        op(0, "fm0.0", target="axis.chunk", args=(Ref("batch/x"), 2, "tp", 2)),
        "rank 0, stage 0F, fm0.0: batch/x, float32[256,512], has no dim 2",
    ),
    (
        op(0, "fm0.0", target="axis.chunk", args=(Ref("batch/x"), 0, "tp", 2)),
        "rank 0, stage 0F, fm0.0: gives float32[512,512], which is no part of 2 along dim 0 of batch/x",
    ),
    (
        op(0, "fm0.0", target="axis.index", args=("tp", 2)),
        "rank 0, stage 0F, fm0.0: gives float32[512,512]. A coordinate is int64[]",
    ),
    (
        op(0, "fm0.0", target="axis.index", args=("tp",)),
        "rank 0, stage 0F, fm0.0: cannot be read. Write axis.index",
    ),
]


@pytest.mark.parametrize(("edit", "message"), REFUSED, ids=[message[:70] for _, message in REFUSED])
def test_refusals(edit: Edit, message: str) -> None:
    found = [str(fault) for fault in plan_faults(edit(BASE))]
    assert any(fault.startswith(message) for fault in found), found


def test_a_buffer_is_not_written_while_it_is_sent() -> None:
    """The wait stands in the backward, and the next microbatch's forward updates the buffer before that."""

    def faults_of(wait: Phase) -> list[str]:
        of = comm_job(2, 2, (("dp", 2), ("tp", 2)))
        ops = dict(of.stages[0].ops)
        gathered = TensorSpec((512, 512), "float32")
        view = Op(
            "seen_view", "aten.view.default", (Ref("buffer/seen"), (256, 512)), (), (SLICE,), "buffer/seen"
        )
        start = Op("seen_all", "comm.all_gather", (Ref("seen_view"), "tp", 2), (), (gathered,))
        waited = Op("seen_all_w", "comm.wait", (Ref("seen_all"),), (), (gathered,), "seen_all")
        ops[Phase.F] = (*ops[Phase.F], view, start)
        ops[wait] = (*ops[wait], waited)
        buffer = Buffer("seen", SLICE, (0,), ((0, Phase.F, "y0"),))
        sent = replace(of, stages=(Stage(0, ops), of.stages[1]), buffers=(buffer,))
        return [str(fault) for fault in plan_faults(comm_plan("1f1b", sent))]

    assert faults_of(Phase.F) == []
    assert faults_of(Phase.I) == [
        "rank 0, stage 0F, seen_all: sends buffer/seen, which is updated when a window ends, and is waited "
        "for in another window. Wait for it in F, or send a copy"
    ]
