"""A tensor-parallel job by hand: real products, real shapes, collectives of all kinds; for tests of costs.

Each stage is x -> all_reduce(x W1 W2) with W1 cut by columns and W2 by rows; its input gradient gathers and
scatters, so that every kind occurs.
"""

from __future__ import annotations

from stretto.ir.action import Phase, Schedule
from stretto.ir.costs import Costs
from stretto.ir.program import Job, Op, Parameter, Ref, Shard, Stage, TensorSpec
from stretto.price.cluster import Description, describe, described
from tests.synthetic import chain


def comm_job(
    stages: int, microbatches: int = 2, *, tp: int = 2, dp: int = 1, rows: int = 64, hidden: int = 128
) -> Job:
    """`stages` equal stages at tp and dp; rows and hidden must be multiples of tp."""
    axes = tuple((axis, size) for axis, size in (("dp", dp), ("tp", tp)) if size > 1)
    x = TensorSpec((rows, hidden), "float32")
    part = TensorSpec((rows // tp, hidden), "float32")
    inner = TensorSpec((rows, 4 * hidden // tp), "float32")
    up = TensorSpec((hidden, 4 * hidden // tp), "float32")
    down = TensorSpec((4 * hidden // tp, hidden), "float32")
    up_t = TensorSpec((4 * hidden // tp, hidden), "float32", (1, 4 * hidden // tp))
    down_t = TensorSpec((hidden, 4 * hidden // tp), "float32", (1, hidden))
    x_t = TensorSpec((hidden, rows), "float32", (1, hidden))
    scalar = TensorSpec((), "float32")
    made, parameters = [], []
    last = stages - 1

    def mm(name: str, a: str, b: str, spec: TensorSpec, deep: int) -> Op:
        flops = 2 * spec.numel * deep
        return Op(name, "aten.mm.default", (Ref(a), Ref(b)), (), (spec,), flops=flops)

    def t(name: str, of: str, spec: TensorSpec) -> Op:
        return Op(name, "aten.t.default", (Ref(of),), (), (spec,), alias=of)

    def wait(name: str, of: str, spec: TensorSpec) -> Op:
        return Op(name, "comm.wait", (Ref(of),), (), (spec,), alias=of)

    for s in range(stages):
        source = "batch/x" if s == 0 else f"y{s - 1}"
        w1, w2 = f"param/up{s}", f"param/down{s}"
        forward = [mm(f"h{s}", source, w1, inner, hidden), mm(f"p{s}", f"h{s}", w2, x, 4 * hidden // tp)]
        if tp > 1:
            forward += [
                Op(f"a{s}", "comm.all_reduce", (Ref(f"p{s}"), "sum", "tp", tp), (), (x,)),
                wait(f"y{s}", f"a{s}", x),
            ]
        else:
            forward += [Op(f"y{s}", "aten.relu.default", (Ref(f"p{s}"),), (), (x,))]
        if s == last:
            forward.append(Op("loss", "aten.mean.default", (Ref(f"y{s}"),), (), (scalar,)))
            backward = [Op(f"gy{s}", "aten.mul.Tensor", (Ref(f"y{s}"), Ref("tangent")), (), (x,))]
            gy = f"gy{s}"
        else:
            backward, gy = [], f"dx{s + 1}"
        backward += [
            t(f"w2t{s}", w2, down_t),
            mm(f"gh{s}", gy, f"w2t{s}", inner, hidden),
            t(f"w1t{s}", w1, up_t),
            mm(f"gp{s}", f"gh{s}", f"w1t{s}", x, 4 * hidden // tp),
        ]
        if tp > 1:
            backward += [
                Op(f"rs{s}", "comm.reduce_scatter", (Ref(f"gp{s}"), "sum", "tp", tp), (), (part,)),
                wait(f"sc{s}", f"rs{s}", part),
                Op(f"ag{s}", "comm.all_gather", (Ref(f"sc{s}"), "tp", tp), (), (x,)),
                wait(f"dx{s}", f"ag{s}", x),
            ]
        else:
            backward += [Op(f"dx{s}", "aten.relu.default", (Ref(f"gp{s}"),), (), (x,))]
        weight = [
            t(f"xt{s}", source, x_t),
            mm(f"dup{s}", f"xt{s}", f"gh{s}", up, rows),
            t(f"ht{s}", f"h{s}", TensorSpec((4 * hidden // tp, rows), "float32", (1, 4 * hidden // tp))),
            mm(f"ddown{s}", f"ht{s}", gy, down, rows),
        ]
        made.append(Stage(s, {Phase.F: tuple(forward), Phase.I: tuple(backward), Phase.W: tuple(weight)}))
        for name, spec, dim, grad in ((f"up{s}", up, 1, "dup"), (f"down{s}", down, 0, "ddown")):
            shards = (Shard("tp", dim),) if tp > 1 else ()
            grads = ((s, Phase.W, f"{grad}{s}"),)
            parameters.append(Parameter(name, spec, (s,), grads, name, shards=shards))
    return chain("comm", microbatches, made, parameters, x, axes)


def costs_on(job: Job, schedule: Schedule, cluster: str | Description) -> Costs:
    """What the job costs on a cluster that is described."""
    found = describe(cluster)
    assert found is not None
    return described(job, schedule, found)[0]
