"""A layer with experts, forward, and the same of another microbatch, backward: what others arrange by hand is
found by the scheduler.

Times are those of the figures in which fb-overlap is explained (Megatron-Core, MindSpeed): attention takes 2
forward and 4 backward, the experts 2 forward, 2 for the gradient of their input and 2 for those of their
weights, an all-to-all 1. One pair is 12 of compute and 4 of all-to-all. All of these are even, so a step
without stalls takes an even time; with norm and router on their own, 1 forward and 2 backward (`post_attn` of
Megatron-Core), a pair is 15. With tokens that go to other nodes first and to the neighbours within the node
then, as in DeepSeek's dispatch, all-to-alls are 8 of them, and one after the other 23.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.hand_orders import megatron, steady_us
from benchmarks.hand_orders import planned as by_hand

from stretto.ir.action import Phase
from stretto.ir.collectives import ALL_TO_ALL, PRICED
from stretto.ir.costs import CollectiveCost, Costs, Link
from stretto.ir.curve import Curve
from stretto.ir.plan import Plan
from stretto.ir.program import Job, Op, OverlapMode, Parameter, Ref, Stage, TensorSpec
from stretto.ir.timeline import Span, SpanKind, Timeline
from stretto.planning.make_plan import listed, make_plan
from stretto.simulating import simulate
from tests.synthetic import ACTIVATION, WEIGHT, WORK, chain

TIMES = {
    "attention": 2.0,
    "post": 1.0,
    "mlp": 2.0,
    "mlp_b": 2.0,
    "mlp_w": 2.0,
    "post_b": 2.0,
    "attention_b": 4.0,
}
MICROBATCHES = 12


def layers_job(layers: int, post: bool, hops: int) -> tuple[Job, Costs]:
    """post: whether norm and router are ops of their own. hops: all-to-alls of a dispatch, as of a
    combine."""
    programs: dict[Phase, list[Op]] = {Phase.F: [], Phase.I: [], Phase.W: []}
    us: dict[tuple[int, str], float] = {}

    def op(phase: Phase, kind: str, layer: int, *uses: str, spec: TensorSpec = ACTIVATION) -> str:
        name = f"{kind}{layer}"
        programs[phase].append(Op(name, WORK, tuple(Ref(use) for use in uses), (), (spec,), flops=1000))
        us[0, name] = TIMES.get(kind, 0.0)
        return name

    def moved(phase: Phase, kind: str, layer: int, value: str) -> str:
        for hop in range(hops):
            name = f"{kind}{layer}_{hop}"
            start = Op(name, ALL_TO_ALL.target, (Ref(value), "ep", 2), (), (ACTIVATION,))
            value = f"{name}_wait"
            wait = Op(value, "comm.wait", (Ref(name),), (), (ACTIVATION,), alias=name)
            programs[phase] += [start, wait]
            us[0, name] = 0.0
        return value

    x = "batch/x"
    for n in range(layers):
        x = op(Phase.F, "attention", n, x)
        x = op(Phase.F, "post", n, x) if post else x
        x = op(Phase.F, "mlp", n, moved(Phase.F, "dispatch", n, x), f"param/w{n}")
        x = moved(Phase.F, "combine", n, x)
    op(Phase.F, "loss", 0, x, spec=TensorSpec((), "float32"))
    gradient = op(Phase.I, "loss_b", 0, "tangent", x)
    for n in reversed(range(layers)):
        gradient = moved(Phase.I, "combine_b", n, gradient)
        op(Phase.W, "mlp_w", n, gradient, f"attention{n}", spec=WEIGHT)
        gradient = op(Phase.I, "mlp_b", n, gradient, f"mlp{n}")
        gradient = moved(Phase.I, "dispatch_b", n, gradient)
        gradient = op(Phase.I, "post_b", n, gradient) if post else gradient
        gradient = op(Phase.I, "attention_b", n, gradient, f"attention{n}")
    parameters = [
        Parameter(f"w{n}", WEIGHT, (0,), ((0, Phase.W, f"mlp_w{n}"),), f"w{n}") for n in range(layers)
    ]
    stage = Stage(0, {phase: tuple(ops) for phase, ops in programs.items()})
    job = chain("layers", MICROBATCHES, [stage], parameters, ACTIVATION, (("ep", 2),))
    job = replace(job, loss=(0, "loss0"))
    each = {("ep", kind): CollectiveCost(Curve(((0.0, 0.0), (1e12, 0.0)))) for kind in PRICED}
    each["ep", ALL_TO_ALL.name] = CollectiveCost(Curve(((0.0, 1.0), (1e12, 1.0))))
    return job, Costs(us, {}, Link(0.0, 1e6), 0.0, "made up", each)


def planned(case: tuple[Job, Costs], overlap: OverlapMode) -> Plan:
    return make_plan(*case, schedule="1f1b", overlap=overlap)


def stalls(timeline: Timeline) -> list[Span]:
    """Between the ends."""
    begin_us, end_us = steady_us(timeline)
    kinds = SpanKind.EXPOSED, SpanKind.BUBBLE
    return [s for s in timeline.spans if s.kind in kinds and s.end_us > begin_us and s.start_us < end_us]


@pytest.mark.parametrize(
    ("post", "hops", "serial", "compute"), [(False, 1, 16, 12), (True, 1, 19, 15), (True, 2, 23, 15)]
)
@pytest.mark.parametrize("layers", [1, 2])
def test_nothing_is_exposed_between_the_ends(
    layers: int, post: bool, hops: int, serial: float, compute: float
) -> None:
    case = layers_job(layers, post, hops)
    plans = [planned(case, mode) for mode in ("off", "window")]
    off, window = map(simulate, plans)
    pairs = layers * MICROBATCHES
    # Gradients of several layers are copied into a bucket, which takes what an op like it takes.
    copied_us = sum(plans[0].costs.op_us.get((0, op.name), 0.0) for op in plans[0].once(0))
    assert (copied_us > 0.0) == (layers > 1)
    assert off.step_us == pytest.approx(serial * pairs + copied_us)
    begin_us, end_us = steady_us(window)
    assert end_us - begin_us >= 0.6 * window.step_us
    assert not stalls(window)
    most_us = compute * pairs + layers * (serial - compute) + copied_us
    assert compute * pairs <= window.step_us <= most_us


def test_the_order_by_hand_is_no_faster() -> None:
    job, costs = layers_job(2, post=True, hops=1)
    by_others = simulate(by_hand(job, listed(job, costs), megatron))
    assert simulate(planned((job, costs), "window")).step_us <= by_others.step_us
    assert not stalls(by_others), "it hides all that has another microbatch beside it"
