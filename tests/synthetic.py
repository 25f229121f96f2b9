"""A made-up job of known costs, for tests that need a plan but no model.

Every stage has two forward ops, two input-gradient ops and two weight-gradient ops; activations go to
the next stage, gradients to the one before. Op times are the phase's time, halved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.ir.action import Phase, Schedule
from stretto.ir.costs import Costs, Link
from stretto.ir.plan import Plan
from stretto.ir.program import Edge, Job, Op, Parameter, Ref, Stage, TensorSpec
from stretto.ir.storage import PRODUCT
from stretto.planning.lower import lower

WORK = "made_up.work.default"
"""An op of no library: of any operands, with any result, which no one infers."""

ACTIVATION = TensorSpec((256, 512), "float32")
WEIGHT = TensorSpec((512, 512), "float32")


def product(op: Op) -> Op:
    """The op as one whose result is added to a gradient as it is made; its note keeps shapes from being
    inferred."""
    return replace(op, target=PRODUCT, kwargs=(("note", "made up"),))


def make_job(stages: int, microbatches: int, activation: TensorSpec = ACTIVATION) -> Job:
    """A chain of `stages`, each with one parameter; stage 0 reads the batch, the last makes the loss."""
    made: list[Stage] = []
    parameters: list[Parameter] = []
    last = stages - 1
    for s in range(stages):

        def op(name: str, *uses: str, spec: TensorSpec = activation, flops: int = 1000) -> Op:
            return Op(name, WORK, tuple(Ref(u) for u in uses), (), (spec,), flops=flops)

        source = "batch/x" if s == 0 else f"y{s - 1}"
        seed = "tangent" if s == last else f"dx{s + 1}"
        forward = (op(f"h{s}", source, f"param/w{s}"), op(f"y{s}", f"h{s}"))
        if s == last:
            forward += (op("loss", f"y{s}", spec=TensorSpec((), "float32")),)
        into = (op(f"g{s}", seed, f"h{s}"), op(f"dx{s}", f"g{s}", f"param/w{s}"))
        weight = (op(f"p{s}", f"g{s}", source), product(op(f"dw{s}", f"p{s}", spec=WEIGHT)))
        made.append(Stage(s, {Phase.F: forward, Phase.I: into, Phase.W: weight}))
        parameters.append(Parameter(f"w{s}", WEIGHT, (s,), ((s, Phase.W, f"dw{s}"),), f"w{s}"))
    return chain("synthetic", microbatches, made, parameters, activation)


def chain(
    name: str,
    microbatches: int,
    stages: Sequence[Stage],
    parameters: Sequence[Parameter],
    activation: TensorSpec,
    axes: tuple[tuple[str, int], ...] = (),
) -> Job:
    """A job of stages that hand `y{stage}` forward and `dx{stage}` backward; the last makes `loss`."""
    last = len(stages) - 1
    edges = [Edge(s, f"y{s}", s, Phase.F, s + 1, Phase.F, activation) for s in range(last)]
    edges += [
        Edge(last + s - 1, f"dx{s}", s, Phase.I, s - 1, Phase.I, activation) for s in range(1, last + 1)
    ]
    return Job(
        name=name,
        microbatches=microbatches,
        stages=tuple(stages),
        edges=tuple(edges),
        parameters=tuple(parameters),
        buffers=(),
        constants=(),
        batch=(("x", activation),),
        loss=(last, "loss"),
        axes=axes,
        optimizer="sgd",
    )


def make_costs(
    job: Job,
    *,
    f_us: float = 100.0,
    i_us: float = 100.0,
    w_us: float = 100.0,
    latency_us: float = 0.0,
    bytes_per_us: float = float("inf"),
) -> Costs:
    """Phase times spread evenly over each phase's ops; equal links between all ranks."""
    times = {Phase.F: f_us, Phase.I: i_us, Phase.W: w_us}
    op_us = {
        (stage.index, op.name): us / len(stage.ops[phase])
        for stage in job.stages
        for phase, us in times.items()
        for op in stage.ops[phase]
    }
    return Costs(op_us, {}, Link(latency_us, bytes_per_us), 0.0, "made up")


def make_plan(schedule: Schedule, **costs: float) -> Plan:
    """Lower `schedule` onto a synthetic job of as many stages and microbatches."""
    job = make_job(schedule.stages, schedule.microbatches)
    return lower(job, schedule, make_costs(job, **costs))
