"""A plan that uses everything that the file format has, and its text with one place changed."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

from stretto.ir.action import Phase
from stretto.ir.costs import CollectiveCost, Link, Prediction
from stretto.ir.curve import Curve
from stretto.ir.parameters import BucketSlot
from stretto.ir.plan import Communicator, Plan
from stretto.ir.program import Buffer, Const, Constant, Op, Ref, Shard, Stage, TensorSpec
from stretto.ir.serialize import plan_to_text
from stretto.schedule.families import make_schedule
from tests.synthetic import make_plan

ODD_OP = Op(
    "odd",
    "aten.odd.default",
    (
        Ref("h0"),
        (Ref("param/w0"), None, True, 3, 2.5, (-0.0, 1e-300)),
        "it's %text",
        Const("dtype", "float32"),
        math.inf,
        -math.inf,
        math.nan,
        "",
        (),
    ),
    (("dim", -1), ("device", Const("device", "job")), ("mode", "'none")),
    (TensorSpec((2, 3), "float32", (1, 2)), None, TensorSpec((), "int64")),
    alias="h0",
    random=True,
    flops=12,
    module="layers.0",
)


def odd_plan() -> Plan:
    """A plan that uses everything that the format has."""
    plan = make_plan(make_schedule("zb-h1", 2, 3), latency_us=3.5)
    stage = plan.job.stages[0]
    start = Op(
        *("tp.0.0", "comm.all_reduce", (Ref("grad/w0"), "sum", "tp", 2), ()),
        (TensorSpec((4,), "float32"),),
        "grad/w0",
    )
    wait = Op("tp.0.0.sum", "comm.wait", (Ref("tp.0.0"),), (), start.outputs, "grad/w0", writes=("grad/w0",))
    sums = start, wait, *stage.ops[Phase.REDUCE_GRAD]
    ops = {**stage.ops, Phase.F: (*stage.ops[Phase.F], ODD_OP), Phase.REDUCE_GRAD: sums}
    job = replace(
        plan.job,
        stages=(Stage(0, ops), *plan.job.stages[1:]),
        buffers=(Buffer("running", TensorSpec((2,), "float32"), (0,), ((0, Phase.F, "h0"),)),),
        constants=(Constant("c", TensorSpec((3,), "float32"), (1.5, math.inf, 0)),),
        param_dtype="bfloat16",
        max_live=4,
        axes=(("dp", 3), ("tp", 2)),
        zero=3,
        updates=True,
        clip_norm=0.5,
        batch_dims=(("x", 1),),
        parameters=(
            replace(
                plan.job.parameters[0],
                shards=(Shard("tp", 1, 3),),
                kept=("dp",),
                slot=BucketSlot("w", 1, 3, 7),
            ),
            replace(plan.job.parameters[1], partial=("tp",)),
        ),
    )
    window = plan.windows["0F"]
    items = (*window.items, replace(window.items[0], ref="odd"))
    prediction = Prediction(
        *(1.25, (1.0, 2.0), (0.5, 0.0), (0.0, math.inf), (10, 20), 1.0, "rank 1 computes"),
        exposed_axis_us={"tp": (0.25, 0.0), "pp": (0.25, 0.0)},
        comm_axis_us={"tp": (0.5, 0.5)},
    )
    curve = Curve(((0.0, 3.5), (1e6, 40.0)))
    axes = (Communicator("loss", (0, 1), ("pp", "dp")), Communicator("tp", (0, 1), ("tp",)))
    return replace(
        plan,
        job=job,
        windows={**plan.windows, "0F": replace(window, items=items)},
        zero_why="nothing else fits",
        costs=replace(
            plan.costs,
            links={(1, 0): Link(1.0, 100.0, 2.0, "measured"), (0, 1): Link(2.0, math.inf)},
            collectives={
                ("tp", "all_reduce"): CollectiveCost(curve, 1.5, 0.125, "measured", 0.625),
                ("tp", "all_gather"): CollectiveCost(curve),
            },
            shared=("tp",),
        ),
        prediction=prediction,
        communicators=(*(c for c in plan.communicators if c.name != "loss"), *axes),
    )


TEXT = plan_to_text(odd_plan())
DOCUMENT = json.loads(TEXT)


def changed(*path: str | int, to: Any) -> str:
    """The odd plan's text with one place changed; `to=...` (Ellipsis) removes it."""
    document = copy.deepcopy(DOCUMENT)
    at = document
    for key in path[:-1]:
        at = at[key]
    if to is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    return json.dumps(document)
